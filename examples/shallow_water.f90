! Shallow water on a periodic plane, rotating, with a drag that a torch model may give, in another program of the job or
! on the same ranks:
!     h_t = -H (u_x + v_y),   u_t = f v - g h_x - tau u,   v_t = -f u - g h_y - tau v
! An ordinary MPI program: MPI_Cart, one ghost layer, forward-backward steps on one grid of cells.
!
!   mpif90 shallow_water.f90 $(mpishard config --build build --cflags --libs) -o shallow_water
!   mpiexec -n 4 ./shallow_water 100 : -n 2 python drag_model.py
!   mpiexec -n 4 ./shallow_water 100 drag_model.py:drag
!   mpiexec -n 4 ./shallow_water 100 alone
program shallow_water
    use mpi_f08
    use mpishard
    use, intrinsic :: iso_fortran_env, only: real64, int64, error_unit
    implicit none
    integer, parameter :: nx = 48, ny = 36
    real(real64), parameter :: g = 9.81_real64, depth = 10, f = 1e-2_real64, dx = 100, dt = 2
    real(real64), allocatable, target :: h(:, :), u(:, :), v(:, :), tau(:, :)
    real(real64), allocatable :: before(:, :)
    type(MPI_Comm) :: comm, cart
    type(mps_handle) :: job, domain, fields(3), drag(1), link, hook
    integer :: grid(2) = 0, coords(2), own(2), first(2), ranks, rank, steps, step, i, j, d
    integer(int64) :: mark, all_marks
    character(1024) :: word, model
    logical :: beside, here
    real(real64) :: energy, total

    call MPI_Init()
    steps = 100
    model = ""
    if (command_argument_count() > 0) then
        call get_command_argument(1, word)
        read (word, *) steps
    end if
    if (command_argument_count() > 1) call get_command_argument(2, model)
    beside = model == ""
    here = .not. beside .and. model /= "alone"
    comm = MPI_COMM_WORLD
    if (beside) then
        call check(mps_join("water", job))
        call check(mps_comm(job, comm))
    end if

    call MPI_Comm_size(comm, ranks)
    call MPI_Dims_create(ranks, 2, grid)
    call MPI_Cart_create(comm, 2, grid, [.true., .true.], .false., cart)
    call MPI_Comm_rank(cart, rank)
    call MPI_Cart_coords(cart, rank, 2, coords)
    do d = 1, 2
        call cut(merge(nx, ny, d == 1), grid(d), coords(d), first(d), own(d))
    end do
    allocate(h(0:own(1) + 1, 0:own(2) + 1), u(0:own(1) + 1, 0:own(2) + 1), v(0:own(1) + 1, 0:own(2) + 1))
    allocate(tau(own(1), own(2)), before(own(1), own(2)))
    u = 0
    v = 0
    tau = 0
    do j = 1, own(2)
        do i = 1, own(1)
            h(i, j) = exp(-((first(1) + i - nx / 2)**2 + (first(2) + j - ny / 2)**2) / 30._real64)
        end do
    end do

    if (beside .or. here) then
        call check(mps_adopt(cart, [nx, ny], domain, sizes=own))
        call check(mps_field(domain, "h", h, fields(1), lo=[1, 1]))
        call check(mps_field(domain, "u", u, fields(2), lo=[1, 1]))
        call check(mps_field(domain, "v", v, fields(3), lo=[1, 1]))
        call check(mps_field(domain, "tau", tau, drag(1)))
    end if
    if (beside) call check(mps_connect(job, "model", link, out=fields, into=drag))
    if (here) call check(mps_hook(domain, model, hook, inputs=fields, outputs=drag))
    do step = 1, steps
        if (beside) then
            call check(mps_put(link))
            call check(mps_get(link))
        end if
        if (here) call check(mps_step(hook))
        call refresh(h)
        before = u(1:own(1), 1:own(2))
        do j = 1, own(2)
            do i = 1, own(1)
                u(i, j) = u(i, j) + dt * (f * v(i, j) - g * (h(i + 1, j) - h(i - 1, j)) / (2 * dx) - tau(i, j) * u(i, j))
                v(i, j) = v(i, j) + dt * (-f * before(i, j) - g * (h(i, j + 1) - h(i, j - 1)) / (2 * dx) - tau(i, j) * v(i, j))
            end do
        end do
        call refresh(u)
        call refresh(v)
        do j = 1, own(2)
            do i = 1, own(1)
                h(i, j) = h(i, j) - dt * depth * (u(i + 1, j) - u(i - 1, j) + v(i, j + 1) - v(i, j - 1)) / (2 * dx)
            end do
        end do
    end do

    ! bits, not a sum: the same on every decomposition, or not right
    mark = 0
    energy = 0
    do j = 1, own(2)
        do i = 1, own(1)
            mark = ieor(mark, ishftc(transfer(h(i, j), mark), modulo((first(1) + i) * ny + first(2) + j, 64)))
            energy = energy + depth * (u(i, j)**2 + v(i, j)**2) + g * h(i, j)**2
        end do
    end do
    call MPI_Reduce(mark, all_marks, 1, MPI_INTEGER8, MPI_BXOR, 0, cart)
    call MPI_Reduce(energy, total, 1, MPI_DOUBLE_PRECISION, MPI_SUM, 0, cart)
    if (rank == 0) print "(a, i0, a, es22.15, a, z16.16)", "after ", steps, " steps: energy ", total, ", mark ", all_marks
    if (here) call check(mps_release(hook))
    if (beside) call check(mps_release(link))
    if (beside .or. here) then
        do d = 1, 3
            call check(mps_release(fields(d)))
        end do
        call check(mps_release(drag(1)))
        call check(mps_release(domain))
    end if
    if (beside) call check(mps_release(job))
    call MPI_Comm_free(cart)
    call MPI_Finalize()

contains

    subroutine cut(n, blocks, block, before_it, cells)
        integer, intent(in) :: n, blocks, block
        integer, intent(out) :: before_it, cells
        cells = n / blocks + merge(1, 0, block < mod(n, blocks))
        before_it = block * (n / blocks) + min(block, mod(n, blocks))
    end subroutine

    subroutine refresh(a)
        real(real64), intent(inout) :: a(0:, 0:)
        real(real64) :: give(own(2)), take(own(2))
        integer :: low, high
        call MPI_Cart_shift(cart, 0, 1, low, high)
        give = a(1, 1:own(2))
        call MPI_Sendrecv(give, own(2), MPI_DOUBLE_PRECISION, low, 0, take, own(2), MPI_DOUBLE_PRECISION, high, 0, cart, &
                          MPI_STATUS_IGNORE)
        a(own(1) + 1, 1:own(2)) = take
        give = a(own(1), 1:own(2))
        call MPI_Sendrecv(give, own(2), MPI_DOUBLE_PRECISION, high, 1, take, own(2), MPI_DOUBLE_PRECISION, low, 1, cart, &
                          MPI_STATUS_IGNORE)
        a(0, 1:own(2)) = take
        call MPI_Cart_shift(cart, 1, 1, low, high)
        call MPI_Sendrecv(a(1:own(1), 1), own(1), MPI_DOUBLE_PRECISION, low, 2, a(1:own(1), own(2) + 1), own(1), &
                          MPI_DOUBLE_PRECISION, high, 2, cart, MPI_STATUS_IGNORE)
        call MPI_Sendrecv(a(1:own(1), own(2)), own(1), MPI_DOUBLE_PRECISION, high, 3, a(1:own(1), 0), own(1), &
                          MPI_DOUBLE_PRECISION, low, 3, cart, MPI_STATUS_IGNORE)
    end subroutine

    subroutine check(status)
        integer, intent(in) :: status
        if (status >= 0) return
        write (error_unit, *) mps_error()
        call MPI_Abort(MPI_COMM_WORLD, 1)
    end subroutine
end program
