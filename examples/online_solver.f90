! Shallow water on a rotating periodic plane, in two resolutions at once: the fine run is the truth for the coarse one.
!     u_t = f v - g h_x - u u_x - v u_y + nu lap u,   v_t likewise,   h_t = -((H + h) u)_x - ((H + h) v)_y + nu lap h
! An ordinary MPI program: MPI_Cart, one ghost layer, central differences. At every coarse step it gives a model in
! another program of the job
!     fine     the fine run, averaged over the coarse cells
!     coarse   what one coarse step makes of the fine run's state one step ago
!     alone    a coarse run without a model
!     closed   a coarse run with the model, which gives back what to add: closure
! Both coarse runs begin anew from the fine one every WINDOW steps. online_solver.py is the same in Python.
!
!   mpif90 online_solver.f90 $(mpishard config --build build --cflags --libs) -o online_solver
!   mpiexec -n 4 ./online_solver 800 100 64 : -n 2 python online_model.py 800 64
program online_solver
    use mpi_f08
    use mpishard
    use, intrinsic :: iso_fortran_env, only: real64, error_unit
    implicit none
    integer, parameter :: ratio = 4, h = 1, u = 2, v = 3
    real(real64), parameter :: g = 1, depth = 1, f = 0.05_real64, nu = 0.02_real64, dt = 0.3_real64
    real(real64), allocatable, target :: fine(:, :, :), coarse(:, :, :), alone(:, :, :), closed(:, :, :), closure(:, :, :)
    real(real64), allocatable :: truth(:, :, :)
    type(MPI_Comm) :: comm, cart
    type(mps_handle) :: job, domain, fields(4), back(1), link
    integer :: grid(2) = 0, coords(2), own(2), first(2), numbers(3), ranks, step, d, k
    character(16) :: word

    call MPI_Init()
    do k = 1, 3
        call get_command_argument(k, word)
        read (word, *) numbers(k)
    end do
    call check(mps_join("water", job))
    call check(mps_comm(job, comm))
    call MPI_Comm_size(comm, ranks)
    call MPI_Dims_create(ranks, 2, grid)
    call MPI_Cart_create(comm, 2, grid, [.true., .true.], .false., cart)
    call MPI_Comm_rank(cart, k)
    call MPI_Cart_coords(cart, k, 2, coords)
    do d = 1, 2
        first(d) = coords(d) * numbers(3) / grid(d)
        own(d) = (coords(d) + 1) * numbers(3) / grid(d) - first(d)
    end do
    allocate(truth(0:ratio * own(1) + 1, 0:ratio * own(2) + 1, 3), closure(own(1), own(2), 3))
    allocate(fine(0:own(1) + 1, 0:own(2) + 1, 3), coarse(0:own(1) + 1, 0:own(2) + 1, 3))
    allocate(alone(0:own(1) + 1, 0:own(2) + 1, 3), closed(0:own(1) + 1, 0:own(2) + 1, 3))
    call start()
    call average()
    coarse = fine

    call check(mps_adopt(cart, [numbers(3), numbers(3)], domain, sizes=own))
    call check(mps_field(domain, "fine", fine, fields(1), lo=[1, 1, 0], dims=[1, 2, 0]))
    call check(mps_field(domain, "coarse", coarse, fields(2), lo=[1, 1, 0], dims=[1, 2, 0]))
    call check(mps_field(domain, "alone", alone, fields(3), lo=[1, 1, 0], dims=[1, 2, 0]))
    call check(mps_field(domain, "closed", closed, fields(4), lo=[1, 1, 0], dims=[1, 2, 0]))
    call check(mps_field(domain, "closure", closure, back(1), dims=[1, 2, 0]))
    call check(mps_connect(job, "model", link, out=fields, into=back, timeout=600._real64))
    do step = 0, numbers(1) - 1
        if (modulo(step, numbers(2)) == 0) then
            alone = fine
            closed = fine
        end if
        call check(mps_put(link))
        ! the model works meanwhile
        do k = 1, ratio
            call advance(truth, 1._real64 / ratio)
        end do
        coarse = fine
        call advance(coarse, 1._real64)
        call advance(alone, 1._real64)
        call advance(closed, 1._real64)
        call average()
        call check(mps_get(link))
        closed(1:own(1), 1:own(2), :) = closed(1:own(1), 1:own(2), :) + closure
    end do
    call check(mps_close(link))
    call check(mps_release(link))
    do k = 1, 4
        call check(mps_release(fields(k)))
    end do
    call check(mps_release(back(1)))
    call check(mps_release(domain))
    call check(mps_release(job))
    call MPI_Comm_free(cart)
    call MPI_Finalize()

contains

    ! Hills and hollows of several widths, at rest.
    subroutine start()
        real(real64) :: center(2), width, away(2), n
        integer :: i, j, hill
        n = numbers(3)
        truth = 0
        do hill = 1, 16
            center = n * [modulo(hill * 0.6180339887_real64, 1._real64), modulo(hill * 0.7548776662_real64, 1._real64)]
            width = 2.5_real64 + 2 * modulo(hill * 0.5698402910_real64, 1._real64)
            do j = 1, ratio * own(2)
                do i = 1, ratio * own(1)
                    away = first + ([i, j] - 0.5_real64) / ratio - center
                    away = modulo(away + n / 2, n) - n / 2
                    truth(i, j, h) = truth(i, j, h) + 0.05_real64 * (-1)**hill * exp(-sum(away**2) / (2 * width**2))
                end do
            end do
        end do
    end subroutine

    ! The fine run on the coarse cells.
    subroutine average()
        integer :: i, j, k
        do k = 1, 3
            do j = 1, own(2)
                do i = 1, own(1)
                    fine(i, j, k) = sum(truth(ratio * (i - 1) + 1:ratio * i, ratio * (j - 1) + 1:ratio * j, k)) / ratio**2
                end do
            end do
        end do
    end subroutine

    ! One step of cells of width dx: first the flow, then, with the new one, the height.
    subroutine advance(q, dx)
        real(real64), intent(inout) :: q(0:, 0:, :)
        real(real64), intent(in) :: dx
        real(real64), allocatable :: old(:, :, :), flux(:, :, :)
        real(real64) :: push, step
        integer :: i, j, k, m, n
        m = ubound(q, 1) - 1
        n = ubound(q, 2) - 1
        step = dt * dx
        call refresh(q, m, n)
        allocate (old(0:m + 1, 0:n + 1, 3), flux(0:m + 1, 0:n + 1, 2))
        old = q
        do k = u, v
            do j = 1, n
                do i = 1, m
                    if (k == u) then
                        push = f * old(i, j, v) - g * (old(i + 1, j, h) - old(i - 1, j, h)) / (2 * dx)
                    else
                        push = -f * old(i, j, u) - g * (old(i, j + 1, h) - old(i, j - 1, h)) / (2 * dx)
                    end if
                    q(i, j, k) = old(i, j, k) + step * (push &
                        - old(i, j, u) * (old(i + 1, j, k) - old(i - 1, j, k)) / (2 * dx) &
                        - old(i, j, v) * (old(i, j + 1, k) - old(i, j - 1, k)) / (2 * dx) + diffusion(old, i, j, k, dx))
                end do
            end do
        end do
        call refresh(q, m, n)
        do k = 1, 2
            flux(:, :, k) = (depth + old(:, :, h)) * q(:, :, 1 + k)
        end do
        do j = 1, n
            do i = 1, m
                q(i, j, h) = old(i, j, h) - step * ((flux(i + 1, j, 1) - flux(i - 1, j, 1)) / (2 * dx) &
                    + (flux(i, j + 1, 2) - flux(i, j - 1, 2)) / (2 * dx) - diffusion(old, i, j, h, dx))
            end do
        end do
    end subroutine

    pure real(real64) function diffusion(q, i, j, k, dx)
        real(real64), intent(in) :: q(0:, 0:, :), dx
        integer, intent(in) :: i, j, k
        diffusion = nu * (q(i + 1, j, k) + q(i - 1, j, k) + q(i, j + 1, k) + q(i, j - 1, k) - 4 * q(i, j, k)) / dx**2
    end function

    ! The ghost cells of m x n cells; no corner is read.
    subroutine refresh(q, m, n)
        real(real64), intent(inout) :: q(0:, 0:, :)
        integer, intent(in) :: m, n
        call swap(0, q(1, 1:n, :), q(m, 1:n, :), q(0, 1:n, :), q(m + 1, 1:n, :))
        call swap(1, q(1:m, 1, :), q(1:m, n, :), q(1:m, 0, :), q(1:m, n + 1, :))
    end subroutine

    subroutine swap(dim, bottom, top, below, above)
        integer, intent(in) :: dim
        real(real64), intent(in) :: bottom(:, :), top(:, :)
        real(real64), intent(inout) :: below(:, :), above(:, :)
        real(real64) :: send(size(top)), recv(size(top))
        integer :: low, high
        call MPI_Cart_shift(cart, dim, 1, low, high)
        send = reshape(bottom, [size(bottom)])
        call MPI_Sendrecv(send, size(send), MPI_DOUBLE_PRECISION, low, 0, recv, size(recv), MPI_DOUBLE_PRECISION, high, 0, &
                          cart, MPI_STATUS_IGNORE)
        above = reshape(recv, shape(above))
        send = reshape(top, [size(top)])
        call MPI_Sendrecv(send, size(send), MPI_DOUBLE_PRECISION, high, 1, recv, size(recv), MPI_DOUBLE_PRECISION, low, 1, &
                          cart, MPI_STATUS_IGNORE)
        below = reshape(recv, shape(below))
    end subroutine

    subroutine check(status)
        integer, intent(in) :: status
        if (status >= 0) return
        write (error_unit, *) mps_error()
        call MPI_Abort(MPI_COMM_WORLD, 1)
    end subroutine
end program
