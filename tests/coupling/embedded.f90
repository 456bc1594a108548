! A host in Fortran with a model on its own ranks: arrays with ghost cells, sections of arrays, and what goes wrong.
program embedded
    use mpi_f08
    use mpishard
    use, intrinsic :: iso_c_binding
    implicit none
    integer, parameter :: nx = 6, ny = 7
    type :: cell
        integer(c_int) :: kind
        real(c_double) :: flux, other
    end type
    type(mps_handle) :: sim, u, tau, level, flux, hook, other, walled, edge
    type(MPI_Comm) :: cart
    real(c_double), allocatable, target :: a(:, :), b(:, :), levels(:, :, :), faces(:, :)
    real(c_float), allocatable, target :: t(:, :), absent(:, :)
    type(cell), allocatable, target :: cells(:, :)
    integer, allocatable :: few(:), many(:)
    integer :: rank, ranks, coords(2), own(2), first, k
    character(1024) :: folder

    call must(mps_adopt(MPI_COMM_WORLD, [nx, ny], sim) == MPS_ERR_MPI, "MPI is not initialised")
    call MPI_Init()
    call get_command_argument(1, folder)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks)
    call MPI_Cart_create(MPI_COMM_WORLD, 2, [1, ranks], [.true., .true.], .false., cart)
    call MPI_Comm_rank(cart, rank)
    call MPI_Cart_coords(cart, rank, 2, coords)
    own = [nx, ny - (ranks - 1)]
    first = 0
    if (coords(2) > 0) then
        own(2) = 1
        first = ny - ranks + coords(2)
    end if
    call must(mps_adopt(cart, [nx, ny], sim, sizes=own + [0, 1]) == MPS_ERR_ARGUMENT, "boxes that overlap")
    call must(says("overlap"), "boxes that overlap")
    if (ranks > 1) then
        call must(mps_adopt(cart, [nx, ny + merge(1, 0, rank == 0)], sim, sizes=own) == MPS_ERR_ORDER, "another shape on one rank")
        call must(says("different arguments"), "another shape on one rank")
    end if
    allocate(few(1), many(3), source=1)
    call must(mps_adopt(cart, [nx, ny], sim, sizes=few) == MPS_ERR_ARGUMENT .and. says("sizes has another length"), "few sizes")
    call must(mps_adopt(cart, [nx, ny], sim, grid=many) == MPS_ERR_ARGUMENT .and. says("grid has another length"), "many ranks")
    if (rank == 0) few = [1, 1]
    call must(mps_adopt(cart, [nx, ny], sim, sizes=own, periodic=few == 1) == merge(MPS_OK, MPS_ERR_ARGUMENT, ranks == 1), &
              "another length on one rank")
    call must(mps_adopt(cart, [nx, ny], sim, sizes=own) == MPS_OK, "adopt")
    allocate(cells(own(1), own(2)))
    allocate(a(0:own(1) + 1, 0:own(2) + 1), b(0:own(1) + 1, 0:own(2) + 1), t(own(1), own(2)))
    allocate(levels(3, 0:own(1) + 1, 0:own(2) + 1))

    call must(mps_field(sim, "u", a(1:own(1), :), u, lo=[merge(1, 0, rank == 0), 1]) == MPS_ERR_ARGUMENT, &
              "a short array on one rank")
    call must(mps_field(sim, "u", a, u, lo=many) == MPS_ERR_ARGUMENT .and. says("lo has another length"), "many ghosts")
    call must(mps_field(sim, "u", a, u, lo=[1, 1], dims=many) == MPS_ERR_ARGUMENT .and. says("dims has"), "many dims")
    call must(mps_field(sim, "u", a, u, lo=[1, 1], dims=[2, 2]) == MPS_ERR_ARGUMENT .and. &
              says("dims[1] is 2" // achar(10) // "  expected: every dim of the domain once, else 0"), "a dim twice")
    call must(mps_field(sim, "u", a, u, lo=[1, own(2) + 3]) == MPS_ERR_ARGUMENT .and. says("array dim 2 is too short"), &
              "ghosts that the array has not")
    call must(mps_field(sim, "u", a, u, lo=[1, -1]) == MPS_ERR_ARGUMENT .and. says("lo[2] is -1"), "fewer ghosts than none")
    call must(mps_adopt(cart, [nx, -1], tau) == MPS_ERR_ARGUMENT .and. says("shape[2] is -1"), "no extent")
    call must(mps_adopt(cart, [nx, ny], tau, sizes=[own(1), -1]) == MPS_ERR_ARGUMENT .and. &
              says("of dim 2 owns -1 cells"), "fewer cells than none")
    call must(mps_field(sim, "u", absent, u) == MPS_ERR_ARGUMENT .and. &
              says("an extent of 0, as of an array that is not allocated"), "not allocated")
    call must(mps_field(sim, "u", a, u, lo=[1, 1]) == MPS_OK, "field")
    call must(mps_field(sim, "u", b, tau, lo=[1, 1]) == MPS_ERR_ARGUMENT, "a name used twice")
    call must(says("used twice"), "a name used twice")
    if (ranks > 1) then
        call must(mps_field(sim, merge("v", "w", rank == 0), t, tau) == MPS_ERR_ORDER, "another name on one rank")
    end if
    call must(mps_field(sim, "tau", t, tau) == MPS_OK, "field")
    call must(mps_field(sim, "level", levels(2, :, :), level, lo=[1, 1]) == MPS_OK, "a section")
    call must(mps_step(u) == MPS_ERR_ORDER, "a field is not a hook")
    call must(mps_hook(sim, model("absent"), hook, inputs=[u], outputs=[tau]) == MPS_ERR_MODEL, "no such model")
    call must(says("absent"), "no such model")
    call must(mps_hook(sim, model("around"), hook, inputs=[sim], outputs=[tau]) == MPS_ERR_ARGUMENT, "not a field")

    call must(mps_hook(sim, model("around"), hook, inputs=[u], outputs=[tau], every=2) == MPS_OK, "hook")
    do k = 0, 3
        call fill(a, k)
        call must(mps_step(hook) == merge(MPS_OK, MPS_NO_TURN, mod(k, 2) == 0), "step")
        call must(right(t, k - mod(k, 2)), "periodic in both dims")
    end do
    call fill(b, 9)
    call must(mps_rebind(u, c_loc(b)) == MPS_OK, "rebind")
    call must(mps_step(hook) == MPS_OK, "rebind")
    call must(right(t, 9), "rebind")
    call must(mps_rebind(u, merge(c_null_ptr, c_loc(a), rank == 0)) == MPS_ERR_ARGUMENT, "null on one rank")
    call must(says("null pointer"), "null on one rank")
    call must(mps_step(hook) == MPS_NO_TURN, "the host goes on")
    call must(mps_wait(hook) == MPS_ERR_ORDER, "wait alone")
    call must(mps_release(hook) == MPS_OK, "release")

    levels = -5
    call fill(b, 4)
    levels(2, :, :) = b
    call must(mps_hook(sim, model("around"), hook, inputs=[level], outputs=[tau]) == MPS_OK, "a section")
    call must(mps_step(hook) == MPS_OK, "a section")
    call must(right(t, 4), "a section of an array")
    call must(all(levels(1, :, :) == -5), "a section of an array")
    call must(all(levels(3, :, :) == -5), "a section of an array")

    ! a compiler may hand on a copy of these, which is gone after the call, or the address of another part
    cells = cell(7, -5, -6)
    k = mps_field(sim, "flux", cells%flux, flux)
    if (k == MPS_ERR_ARGUMENT) then
        call must(says("a part of structures"), "a part of structures")
        k = mps_field(sim, "flux", cells%flux, flux, at=c_loc(cells(1, 1)%flux))
    end if
    call must(k == MPS_OK, "a part of structures")
    call must(mps_hook(sim, model("around"), other, inputs=[level], outputs=[flux]) == MPS_OK, "a part of structures")
    call must(mps_step(other) == MPS_OK, "a part of structures")
    call must(right(real(cells%flux, c_float), 4), "a part of structures")
    call must(all(cells%kind == 7) .and. all(cells%other == -6), "beside a part of structures")
    call must(mps_release(other) == MPS_OK .and. mps_release(flux) == MPS_OK, "release")

    ! a point more than cells along x: of a periodic dim the copy of the first, else the last wall
    allocate(faces(0:own(1) + 2, 0:own(2) + 1))
    call must(mps_field(sim, "faces", faces, edge, lo=[1, 1], faces=few == 1) == merge(MPS_OK, MPS_ERR_ARGUMENT, &
              ranks == 1), "another length on one rank")
    if (ranks > 1) call must(says("faces has another length") .or. rank > 0, "another length on one rank")
    if (ranks == 1) call must(mps_release(edge) == MPS_OK, "release")
    call must(mps_field(sim, "faces", faces, edge, lo=[1, 1], faces=[.true., .false.]) == MPS_OK, "faces")
    call must(mps_hook(sim, model("around"), other, inputs=[edge], outputs=[tau]) == MPS_OK, "faces")
    faces = -1000
    faces(:own(1) + 1, :) = b
    call must(mps_step(other) == MPS_OK .and. right(t, 4), "faces of a periodic dim")
    call must(mps_release(other) == MPS_OK .and. mps_release(edge) == MPS_OK, "release")
    call must(mps_adopt(cart, [nx, ny], walled, sizes=own, periodic=[.false., .false.]) == MPS_OK, "adopt")
    call must(mps_field_at(walled, "faces", MPS_FLOAT64, c_loc(faces), shape(faces), edge, lo=[1, 1], &
                           faces=[.true., .false.]) == MPS_OK, "faces")
    call must(mps_hook(walled, model("ring"), other, inputs=[edge], outputs=[edge]) == MPS_OK, "faces")
    faces = -1000
    call must(mps_step(other) == MPS_OK, "the last wall")
    call must(all(faces(1:own(1) + 1, 1:own(2)) == 0), "the last wall")
    call must(all(faces(own(1) + 2, :) == -1000) .and. all(faces(0, 1:own(2)) == -1000), "the host's own cells")
    call must(mps_release(other) == MPS_OK .and. mps_release(walled) == MPS_OK .and. mps_release(edge) == MPS_OK, "release")

    call must(mps_hook(sim, model("raises_on_one"), other, inputs=[u], outputs=[tau]) == MPS_OK, "hook")
    call must(mps_step(other) == MPS_ERR_MODEL, "raises on one rank")
    call must(says("no such regime"), "raises on one rank")
    call must(right(t, 4), "the output is as it was")
    call must(mps_release(other) == MPS_OK, "the host goes on")
    call refused("raises_late", "no such regime")
    call refused("misshapen", "")
    call refused("two", "")
    call refused("plain", "")
    call refused("leaves", "")
    call must(mps_step(hook) == MPS_OK, "the host goes on")
    call must(right(t, 4), "the host goes on")
    call must(mps_release(tau) == MPS_OK, "released and used")
    call must(mps_step(hook) == MPS_ERR_ORDER, "released and used")
    call must(says("'tau' was released"), "released and used")
    call must(mps_release(sim) == MPS_OK, "the domain was released")
    call must(mps_step(hook) == MPS_ERR_ORDER, "the domain was released")
    call must(mps_release(u) == MPS_OK, "release")
    call must(mps_release(level) == MPS_OK, "release")
    call must(mps_release(hook) == MPS_OK, "release")
    if (rank == 0) print *, "EMBEDDED FORTRAN IS RIGHT"
    call MPI_Finalize()

contains

    ! a model that does not do: an error on all ranks, and the output is as it was
    subroutine refused(name, text)
        character(*), intent(in) :: name, text
        call must(mps_hook(sim, model(name), other, inputs=[u], outputs=[tau]) == MPS_OK, name)
        call must(mps_step(other) == MPS_ERR_MODEL, name)
        call must(says(text), name)
        call must(right(t, 4), name)
        call must(mps_release(other) == MPS_OK, name)
    end subroutine

    real(c_double) function value(i, j, k)
        integer, intent(in) :: i, j, k
        value = modulo(i - 1, nx) * 10 + modulo(j - 1, ny) * modulo(j - 1, ny) + k
    end function

    subroutine fill(x, k)
        real(c_double), intent(inout) :: x(0:, 0:)
        integer, intent(in) :: k
        integer :: i, j
        x = -1000
        do j = 1, own(2)
            do i = 1, own(1)
                x(i, j) = value(i, first + j, k)
            end do
        end do
    end subroutine

    logical function right(x, k)
        real(c_float), intent(in) :: x(:, :)
        integer, intent(in) :: k
        real(c_double) :: total
        integer :: i, j, p, q
        right = .true.
        do j = 1, own(2)
            do i = 1, own(1)
                total = 0
                do q = -1, 1
                    do p = -1, 1
                        total = total + value(i + p, first + j + q, k)
                    end do
                end do
                right = right .and. abs(x(i, j) - total) < 1e-3 * abs(total)
            end do
        end do
    end function

    function model(name) result(text)
        character(*), intent(in) :: name
        character(:), allocatable :: text
        text = trim(folder) // "/closure_of_host.py:" // name
    end function

    logical function says(text)
        character(*), intent(in) :: text
        says = index(mps_error(), text) > 0
    end function

    subroutine must(right, what)
        logical, intent(in) :: right
        character(*), intent(in) :: what
        if (right) return
        print *, "rank", rank, what, ": ", mps_error()
        call MPI_Abort(MPI_COMM_WORLD, 1)
    end subroutine
end program
