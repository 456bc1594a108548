! A host in Fortran with a Cartesian communicator and ghost layers, and the model of model_of_host.py.
program host
    use mpi_f08
    use mpishard
    use, intrinsic :: iso_c_binding
    implicit none
    integer, parameter :: nx = 7, ny = 5
    type(mps_handle) :: job, sim, u_field, tau_field, link, back
    type(MPI_Comm) :: comm, cart
    real(c_double), allocatable, target :: u(:, :)
    real(c_float), allocatable, target :: tau(:, :)
    real(c_double), target :: few(2)
    integer :: rank, ranks, own(2), coords(2), first, step, i, j, k, status, dropped

    call MPI_Init()
    call must(mps_field(sim, "u", few, u_field) == MPS_ERR_ORDER, "field before adopt")
    call must(mps_put(link) == MPS_ERR_ORDER, "put before connect")
    call must(mps_join("", job, 30d0) == MPS_ERR_PEER, "a name that is none")
    call must(mps_join("solver", job) == MPS_OK, "join")
    call must(mps_comm(job, comm) == MPS_OK, "comm")
    call must(mps_ranks(job, "model", ranks) == MPS_OK .and. ranks == 2, "ranks")
    call MPI_Comm_size(comm, ranks)
    call MPI_Cart_create(comm, 2, [1, ranks], [.false., .true.], .true., cart)
    call MPI_Comm_rank(cart, rank)
    call MPI_Cart_coords(cart, rank, 2, coords)
    own = [nx, ny - (ranks - 1)]
    first = 0
    if (coords(2) > 0) then
        own(2) = 1
        first = ny - (ranks - 1) + coords(2) - 1
    end if
    call must(mps_adopt(cart, [nx, ny + 1], sim, sizes=own) == MPS_ERR_ARGUMENT, "a gap")
    call must(index(mps_error(), "gap") > 0, mps_error())
    call must(mps_adopt(cart, [nx, ny], sim, sizes=own) == MPS_OK, "adopt")
    allocate(u(0:own(1) + 1, 0:own(2) + 1), tau(-1:own(1) + 2, own(2)))
    tau = 0
    call must(mps_field(sim, "u", u, u_field, lo=[1, 1]) == MPS_OK, "field")
    call must(mps_field(sim, "tau", tau, tau_field, lo=[2, 0]) == MPS_OK, "field")

    call must(mps_field(sim, "u", u, back, lo=[1, 1]) == MPS_ERR_ARGUMENT, "a name used twice")
    call must(index(mps_error(), "used twice") > 0, mps_error())
    call must(mps_field_at(sim, "none", MPS_FLOAT64, c_null_ptr, [integer ::], back) == MPS_ERR_ARGUMENT, "no dims")
    call must(index(mps_error(), "ndim is 0") > 0, mps_error())
    call must(mps_field(sim, "v", u, back, lo=[1, merge(3, 1, rank == 0)]) == MPS_ERR_ARGUMENT, "too short on one rank")
    call must(index(mps_error(), "too short") > 0, mps_error())
    call must(mps_rebind(u_field, merge(c_null_ptr, c_loc(u), rank == 0)) == MPS_ERR_ARGUMENT, "null on one rank")
    call must(mps_connect(job, "nobody", link, out=[u_field]) == MPS_ERR_PEER, "no such program")
    call must(mps_connect(job, merge("nobody", "model ", rank == 0), link, out=[u_field]) == MPS_ERR_PEER, "on one rank")
    call must(mps_put(sim) == MPS_ERR_ORDER, "a handle of another kind")
    call must(mps_connect(job, "model", link, out=[sim]) == MPS_ERR_ARGUMENT, "no field")
    call must(mps_connect(job, "model", link, out=[u_field], into=[tau_field]) == MPS_ERR_MATCH, "other shapes")
    call must(mps_connect(job, "model", link, out=[u_field], into=[tau_field], timeout=20d0) == MPS_OK, "connect")
    do k = 0, 4
        do j = 1, own(2)
            do i = 1, own(1)
                u(i, j) = (i - 1) * 100 + first + j - 1 + k
            end do
        end do
        call must(mps_put(link) == MPS_OK, "put")
        call must(mps_get(link, step) == MPS_OK .and. step == k, "get")
        call must(all(tau(1:own(1), :) == real(2 * u(1:own(1), 1:own(2)), c_float)), "tau")
        call must(all(tau(:0, :) == 0), "ghost cells are left alone")
    end do
    call must(mps_close(link) == MPS_OK, "close")
    call must(mps_put(link) == MPS_ERR_ORDER .and. mps_get(link) == MPS_ERR_ORDER, "put after close")
    call must(index(mps_error(), "closed") > 0, mps_error())
    call must(mps_release(link) == MPS_OK .and. .not. c_associated(link%object), "release")

    call must(mps_connect(job, "model", link, out=[u_field], policy=MPS_LATEST, depth=2) == MPS_OK, "connect")
    call must(mps_get(link) == MPS_ERR_ORDER, "the other direction")
    call must(mps_connect(job, "model", back, into=[tau_field]) == MPS_OK, "connect")
    do k = 0, 5
        u = k
        call must(mps_put(link) == MPS_OK, "put")
    end do
    call MPI_Barrier(MPI_COMM_WORLD)  ! only then the model reads
    call must(mps_close(link) == MPS_OK, "close")
    step = 0
    do while (mps_get(back) == MPS_OK)
        step = step + 1
    end do
    call must(step == 3 .and. mps_get(back) == MPS_END, "the end")
    call must(mps_release(back) == MPS_OK .and. mps_release(link) == MPS_OK, "release")

    call must(mps_connect(job, "model", link, out=[u_field], policy=MPS_DROP_NEWEST, depth=1) == MPS_OK, "connect")
    dropped = 0
    do
        status = mps_put(link)
        if (status == MPS_END) exit
        if (status == MPS_DROPPED) dropped = dropped + 1
        if (status == MPS_DROPPED .and. dropped == 1) call MPI_Barrier(MPI_COMM_WORLD)
        call must(status >= 0, "put")
    end do
    call must(dropped > 0, "a slow reader makes it drop")
    call must(mps_release(u_field) == MPS_OK .and. mps_put(link) == MPS_ERR_ORDER, "a field released and used")
    call must(index(mps_error(), "'u' was released") > 0, mps_error())
    call must(mps_release(link) == MPS_OK, "release")
    call must(mps_release(tau_field) == MPS_OK .and. mps_release(sim) == MPS_OK .and. mps_release(job) == MPS_OK, "release")
    if (rank == 0) print *, "FORTRAN IS RIGHT"
    call MPI_Finalize()

contains

    subroutine must(right, what)
        logical, intent(in) :: right
        character(*), intent(in) :: what
        if (right) return
        print *, "rank", rank, what, ": ", mps_error()
        call MPI_Abort(MPI_COMM_WORLD, 1)
    end subroutine
end program
