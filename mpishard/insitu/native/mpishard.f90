! mpishard for Fortran: the calls of mpishard.h. Every function returns a status that is the same on all ranks of the
! program: MPS_OK, another one that is positive, or a negative number; mps_error() then says what was wrong.
!
! The index order of a field is its array's: a(x, y) here is the tensor [x, y] there.
module mpishard
    use, intrinsic :: iso_c_binding
    use mpi_f08, only: MPI_Comm
    implicit none
    private

    public :: mps_handle, mps_adopt, mps_field, mps_field_at, mps_rebind, mps_join, mps_comm, mps_ranks, mps_connect
    public :: mps_put, mps_get, mps_close, mps_release, mps_error, mps_hook, mps_step, mps_start, mps_wait

    type, bind(c) :: mps_handle
        type(c_ptr) :: object = c_null_ptr
    end type

    integer, parameter, public :: MPS_OK = 0, MPS_END = 1, MPS_DROPPED = 2, MPS_NO_TURN = 3
    integer, parameter, public :: MPS_ERR_ARGUMENT = -1, MPS_ERR_ORDER = -2, MPS_ERR_PEER = -3, MPS_ERR_MATCH = -4
    integer, parameter, public :: MPS_ERR_MPI = -5, MPS_ERR_MEMORY = -6, MPS_ERR_MODEL = -7
    integer, parameter, public :: MPS_ERR_LOST = -8, MPS_ERR_PYTHON = -9
    integer, parameter, public :: MPS_DEFAULT = -1, MPS_BLOCK = 0, MPS_DROP_NEWEST = 1, MPS_LATEST = 2
    integer, parameter, public :: MPS_BOOL = 0, MPS_UINT8 = 1, MPS_INT8 = 2, MPS_INT16 = 3, MPS_INT32 = 4, MPS_INT64 = 5
    integer, parameter, public :: MPS_FLOAT16 = 9, MPS_BFLOAT16 = 10, MPS_FLOAT32 = 11, MPS_FLOAT64 = 12
    integer, parameter, public :: MPS_COMPLEX64 = 13, MPS_COMPLEX128 = 14

    ! mps_field(sim, name, array, field, lo, dims, faces, at): lo(d) ghost cells lie before the owned ones (none if not given);
    ! array dim d is dim dims(d) of the domain, counted from 1, 0 for another (all in order if not given); where faces(d),
    ! it has a point more than cells, of which the first of every rank is its own, the last only at the end. The array is
    ! a target that lives until the field is released; it may be a section of another, or a part of structures (s%a): a
    ! pointer, as compilers hand on a copy of some of these otherwise, of which nothing is left after the call. Of a part
    ! of structures at=c_loc(s(1, 1)%a) says where its first cell is, which gfortran does not hand on
    interface mps_field
        module procedure field_real32_1
        module procedure field_real32_2
        module procedure field_real32_3
        module procedure field_real32_4
        module procedure field_real64_1
        module procedure field_real64_2
        module procedure field_real64_3
        module procedure field_real64_4
        module procedure field_int32_1
        module procedure field_int32_2
        module procedure field_int32_3
        module procedure field_int32_4
        module procedure field_int64_1
        module procedure field_int64_2
        module procedure field_int64_3
        module procedure field_int64_4
    end interface

    integer, parameter :: nbytes(0:14) = [1, 1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 8, 16]

    type :: pair
        real(c_double) :: first = 0, second = 0
    end type
    type(pair), target, save :: pairs(2)

    ! what a compiler keeps of an array, to be looked at in words
    integer(c_intptr_t), parameter :: words(1) = 0
    type :: view_real32_1
        real(c_float), pointer :: a(:)
    end type
    type :: view_real32_2
        real(c_float), pointer :: a(:, :)
    end type
    type :: view_real32_3
        real(c_float), pointer :: a(:, :, :)
    end type
    type :: view_real32_4
        real(c_float), pointer :: a(:, :, :, :)
    end type
    type :: view_real64_1
        real(c_double), pointer :: a(:)
    end type
    type :: view_real64_2
        real(c_double), pointer :: a(:, :)
    end type
    type :: view_real64_3
        real(c_double), pointer :: a(:, :, :)
    end type
    type :: view_real64_4
        real(c_double), pointer :: a(:, :, :, :)
    end type
    type :: view_int32_1
        integer(c_int32_t), pointer :: a(:)
    end type
    type :: view_int32_2
        integer(c_int32_t), pointer :: a(:, :)
    end type
    type :: view_int32_3
        integer(c_int32_t), pointer :: a(:, :, :)
    end type
    type :: view_int32_4
        integer(c_int32_t), pointer :: a(:, :, :, :)
    end type
    type :: view_int64_1
        integer(c_int64_t), pointer :: a(:)
    end type
    type :: view_int64_2
        integer(c_int64_t), pointer :: a(:, :)
    end type
    type :: view_int64_3
        integer(c_int64_t), pointer :: a(:, :, :)
    end type
    type :: view_int64_4
        integer(c_int64_t), pointer :: a(:, :, :, :)
    end type

    interface
        integer(c_int) function c_adopt(comm, ndim, shape, grid, sizes, periodic, lengths, sim) &
            bind(c, name="mps_adopt_f")
            import
            integer(c_int), value :: comm, ndim
            integer(c_int64_t), intent(in) :: shape(*)
            type(c_ptr), value :: grid, sizes, periodic
            integer(c_int), intent(in) :: lengths(*)
            type(mps_handle), intent(out) :: sim
        end function
        integer(c_int) function c_field(sim, name, dtype, data, ndim, dims, extents, lo, strides, faces, &
            lengths, field) bind(c, name="mps_field_f")
            import
            type(mps_handle), value :: sim
            character(kind=c_char), intent(in) :: name(*)
            integer(c_int), value :: dtype, ndim
            type(c_ptr), value :: data, dims, faces
            integer(c_int64_t), intent(in) :: extents(*), lo(*), strides(*)
            integer(c_int), intent(in) :: lengths(*)
            type(mps_handle), intent(out) :: field
        end function
        integer(c_int) function mps_rebind(field, data) bind(c)
            import
            type(mps_handle), value :: field
            type(c_ptr), value :: data
        end function
        integer(c_int) function c_join(name, timeout, program) bind(c, name="mps_join")
            import
            character(kind=c_char), intent(in) :: name(*)
            real(c_double), value :: timeout
            type(mps_handle), intent(out) :: program
        end function
        integer(c_int) function c_comm(program, comm) bind(c, name="mps_comm_f")
            import
            type(mps_handle), value :: program
            integer(c_int), intent(out) :: comm
        end function
        integer(c_int) function c_ranks(program, name, ranks) bind(c, name="mps_ranks")
            import
            type(mps_handle), value :: program
            character(kind=c_char), intent(in) :: name(*)
            integer(c_int), intent(out) :: ranks
        end function
        integer(c_int) function c_connect(program, other, n_out, out, n_into, into, policy, depth, timeout, link) &
            bind(c, name="mps_connect")
            import
            type(mps_handle), value :: program
            character(kind=c_char), intent(in) :: other(*)
            integer(c_int), value :: n_out, n_into, policy, depth
            type(mps_handle), intent(in) :: out(*), into(*)
            real(c_double), value :: timeout
            type(mps_handle), intent(out) :: link
        end function
        integer(c_int) function mps_put(link) bind(c)
            import
            type(mps_handle), value :: link
        end function
        integer(c_int) function c_get(link, step) bind(c, name="mps_get")
            import
            type(mps_handle), value :: link
            integer(c_int64_t), intent(out) :: step
        end function
        integer(c_int) function mps_step(hook) bind(c)
            import
            type(mps_handle), value :: hook
        end function
        integer(c_int) function mps_start(hook) bind(c)
            import
            type(mps_handle), value :: hook
        end function
        integer(c_int) function mps_wait(hook) bind(c)
            import
            type(mps_handle), value :: hook
        end function
        integer(c_int) function mps_close(link) bind(c)
            import
            type(mps_handle), value :: link
        end function
        integer(c_int) function mps_release(handle) bind(c)
            import
            type(mps_handle), intent(inout) :: handle
        end function
        type(c_ptr) function c_error() bind(c, name="mps_error")
            import
        end function
        integer(c_size_t) function strlen(text) bind(c)
            import
            type(c_ptr), value :: text
        end function
    end interface

    interface
        ! mps_hook(sim, model, hook, inputs, outputs, every, train): as in mpishard.h
        module integer function mps_hook(sim, model, hook, inputs, outputs, every, train) result(status)
            type(mps_handle), intent(in) :: sim
            character(*), intent(in) :: model
            type(mps_handle), intent(out) :: hook
            type(mps_handle), intent(in), optional :: inputs(:), outputs(:)
            integer, intent(in), optional :: every
            logical, intent(in), optional :: train
        end function
    end interface

contains

    ! the text of the last error on this rank
    function mps_error() result(text)
        character(:), allocatable :: text
        character(kind=c_char), pointer :: letters(:)
        type(c_ptr) :: from
        integer :: i
        from = c_error()
        call c_f_pointer(from, letters, [strlen(from)])
        allocate(character(size(letters)) :: text)
        do i = 1, size(letters)
            text(i:i) = letters(i)
        end do
    end function

    integer function mps_adopt(comm, shape, sim, grid, sizes, periodic) result(status)
        type(MPI_Comm), intent(in) :: comm
        integer, intent(in) :: shape(:)
        type(mps_handle), intent(out) :: sim
        integer, intent(in), optional :: grid(:), sizes(:)
        logical, intent(in), optional :: periodic(:)
        integer(c_int), allocatable, target :: ranks(:), flags(:)
        integer(c_int64_t), allocatable, target :: own(:)
        type(c_ptr) :: at(3)
        integer(c_int) :: lengths(3)
        at = c_null_ptr
        lengths = size(shape)
        if (present(grid)) then
            allocate(ranks, source=int(grid, c_int))
            at(1) = c_loc(ranks)
            lengths(1) = size(grid)
        end if
        if (present(sizes)) then
            allocate(own, source=int(sizes, c_int64_t))
            at(2) = c_loc(own)
            lengths(2) = size(sizes)
        end if
        if (present(periodic)) then
            allocate(flags, source=merge(1_c_int, 0_c_int, periodic))
            at(3) = c_loc(flags)
            lengths(3) = size(periodic)
        end if
        status = c_adopt(comm%mpi_val, size(shape), int(shape, c_int64_t), at(1), at(2), at(3), lengths, sim)
    end function

    ! an array of any kind and rank, dense in Fortran's order
    integer function mps_field_at(sim, name, dtype, data, extents, field, lo, dims, faces) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer, intent(in) :: dtype
        type(c_ptr), intent(in) :: data
        integer, intent(in) :: extents(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        integer(c_int64_t) :: strides(size(extents))
        integer :: d
        ! without dims, which c_field refuses, there is nothing to write to
        if (size(extents) > 0) strides(1) = nbytes(max(0, min(dtype, 14)))
        do d = 2, size(extents)
            strides(d) = strides(d - 1) * extents(d - 1)
        end do
        status = made(sim, name, dtype, data, extents, strides, field, lo, dims, faces)
    end function

    integer function made(sim, name, dtype, data, extents, strides, field, lo, dims, faces, lost) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer, intent(in) :: dtype, extents(:)
        type(c_ptr), intent(in) :: data
        integer(c_int64_t), intent(in) :: strides(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:), lost
        integer(c_int64_t), allocatable :: ghosts(:)
        integer(c_int), allocatable, target :: numbers(:), flags(:)
        type(c_ptr) :: at(2)
        integer(c_int) :: lengths(4)
        at = c_null_ptr
        lengths(:3) = size(extents)
        lengths(4) = 0
        if (present(lost)) lengths(4) = merge(1, 0, lost)
        allocate(ghosts(size(extents)), source=0_c_int64_t)
        if (present(lo)) then
            ghosts = lo
            lengths(1) = size(lo)
        end if
        if (present(dims)) then
            allocate(numbers, source=int(dims - 1, c_int))
            at(1) = c_loc(numbers)
            lengths(2) = size(dims)
        end if
        if (present(faces)) then
            allocate(flags, source=merge(1_c_int, 0_c_int, faces))
            at(2) = c_loc(flags)
            lengths(3) = size(faces)
        end if
        status = c_field(sim, trim(name) // c_null_char, dtype, data, size(extents), at(1), int(extents, c_int64_t), &
                         ghosts, strides, at(2), lengths, field)
    end function

    ! an array that may be a section of another: cells(1) is its first cell, cells(1 + d) the next one along dim d
    integer function placed(sim, name, dtype, cells, extents, kept, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer, intent(in) :: dtype, extents(:)
        type(c_ptr), intent(in) :: cells(:)
        integer(c_intptr_t), intent(in) :: kept(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        integer(c_int64_t) :: strides(size(extents))
        integer(c_intptr_t) :: first
        integer :: d
        if (any(extents == 0)) then
            status = mps_field_at(sim, name, dtype, c_null_ptr, extents, field, lo, dims, faces)
            return
        end if
        first = transfer(cells(1), first)
        do d = 1, size(extents)
            strides(d) = transfer(cells(1 + d), first) - first
        end do
        if (present(at)) then
            status = made(sim, name, dtype, at, extents, strides, field, lo, dims, faces)
        else
            status = made(sim, name, dtype, cells(1), extents, strides, field, lo, dims, faces, &
                          lost=strays(kept, dtype))
        end if
    end function

    ! Whether the address of an array may be another one than its own: gfortran (12, at least) hands on that of the
    ! structures of which the array is a part. What it keeps of an array tells of a part by its fifth word, the bytes
    ! from cell to cell, which are no more than a cell's of any other.
    logical function strays(kept, dtype)
        integer(c_intptr_t), intent(in) :: kept(:)
        integer, intent(in) :: dtype
        strays = .false.
        if (size(kept) >= 5) strays = kept(5) /= nbytes(dtype)
        if (strays) strays = .not. same_address(pairs%second, c_loc(pairs(1)%second))
    end function

    logical function same_address(part, first)
        real(c_double), pointer, intent(in) :: part(:)
        type(c_ptr), intent(in) :: first
        same_address = c_associated(c_loc(part(lbound(part, 1))), first)
    end function

    integer function mps_join(name, program, timeout) result(status)
        character(*), intent(in) :: name
        type(mps_handle), intent(out) :: program
        real(c_double), intent(in), optional :: timeout
        real(c_double) :: seconds
        seconds = 0
        if (present(timeout)) seconds = timeout
        status = c_join(trim(name) // c_null_char, seconds, program)
    end function

    integer function mps_comm(program, comm) result(status)
        type(mps_handle), intent(in) :: program
        type(MPI_Comm), intent(out) :: comm
        status = c_comm(program, comm%mpi_val)
    end function

    integer function mps_ranks(program, name, ranks) result(status)
        type(mps_handle), intent(in) :: program
        character(*), intent(in) :: name
        integer, intent(out) :: ranks
        status = c_ranks(program, trim(name) // c_null_char, ranks)
    end function

    integer function mps_connect(program, other, link, out, into, policy, depth, timeout) result(status)
        type(mps_handle), intent(in) :: program
        character(*), intent(in) :: other
        type(mps_handle), intent(out) :: link
        type(mps_handle), intent(in), optional :: out(:), into(:)
        integer, intent(in), optional :: policy, depth
        real(c_double), intent(in), optional :: timeout
        type(mps_handle), allocatable :: gives(:), takes(:)
        integer :: what, slots
        real(c_double) :: seconds
        allocate(gives(0), takes(0))
        what = MPS_DEFAULT
        slots = 0
        seconds = 0
        if (present(out)) gives = out
        if (present(into)) takes = into
        if (present(policy)) what = policy
        if (present(depth)) slots = depth
        if (present(timeout)) seconds = timeout
        status = c_connect(program, trim(other) // c_null_char, size(gives), gives, size(takes), takes, what, slots, &
                           seconds, link)
    end function

    integer function mps_get(link, step) result(status)
        type(mps_handle), intent(in) :: link
        integer, intent(out), optional :: step
        integer(c_int64_t) :: number
        status = c_get(link, number)
        if (present(step) .and. status == MPS_OK) step = int(number)
    end function

    integer function field_real32_1(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_float), pointer, intent(in) :: array(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real32_1) :: view
        type(c_ptr) :: cells(2)
        integer :: extents(1), a(1), b(1)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1))), c_loc(array(b(1)))]
        status = placed(sim, name, MPS_FLOAT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real32_2(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_float), pointer, intent(in) :: array(:, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real32_2) :: view
        type(c_ptr) :: cells(3)
        integer :: extents(2), a(2), b(2)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2))), c_loc(array(b(1), a(2))), &
                                       c_loc(array(a(1), b(2)))]
        status = placed(sim, name, MPS_FLOAT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real32_3(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_float), pointer, intent(in) :: array(:, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real32_3) :: view
        type(c_ptr) :: cells(4)
        integer :: extents(3), a(3), b(3)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3))), c_loc(array(b(1), a(2), a(3))), &
                                       c_loc(array(a(1), b(2), a(3))), c_loc(array(a(1), a(2), b(3)))]
        status = placed(sim, name, MPS_FLOAT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real32_4(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_float), pointer, intent(in) :: array(:, :, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real32_4) :: view
        type(c_ptr) :: cells(5)
        integer :: extents(4), a(4), b(4)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3), a(4))), c_loc(array(b(1), a(2), a(3), a(4))), &
                                       c_loc(array(a(1), b(2), a(3), a(4))), c_loc(array(a(1), a(2), b(3), a(4))), &
                                       c_loc(array(a(1), a(2), a(3), b(4)))]
        status = placed(sim, name, MPS_FLOAT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real64_1(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_double), pointer, intent(in) :: array(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real64_1) :: view
        type(c_ptr) :: cells(2)
        integer :: extents(1), a(1), b(1)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1))), c_loc(array(b(1)))]
        status = placed(sim, name, MPS_FLOAT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real64_2(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_double), pointer, intent(in) :: array(:, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real64_2) :: view
        type(c_ptr) :: cells(3)
        integer :: extents(2), a(2), b(2)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2))), c_loc(array(b(1), a(2))), &
                                       c_loc(array(a(1), b(2)))]
        status = placed(sim, name, MPS_FLOAT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real64_3(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_double), pointer, intent(in) :: array(:, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real64_3) :: view
        type(c_ptr) :: cells(4)
        integer :: extents(3), a(3), b(3)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3))), c_loc(array(b(1), a(2), a(3))), &
                                       c_loc(array(a(1), b(2), a(3))), c_loc(array(a(1), a(2), b(3)))]
        status = placed(sim, name, MPS_FLOAT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_real64_4(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        real(c_double), pointer, intent(in) :: array(:, :, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_real64_4) :: view
        type(c_ptr) :: cells(5)
        integer :: extents(4), a(4), b(4)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3), a(4))), c_loc(array(b(1), a(2), a(3), a(4))), &
                                       c_loc(array(a(1), b(2), a(3), a(4))), c_loc(array(a(1), a(2), b(3), a(4))), &
                                       c_loc(array(a(1), a(2), a(3), b(4)))]
        status = placed(sim, name, MPS_FLOAT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int32_1(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int32_t), pointer, intent(in) :: array(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int32_1) :: view
        type(c_ptr) :: cells(2)
        integer :: extents(1), a(1), b(1)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1))), c_loc(array(b(1)))]
        status = placed(sim, name, MPS_INT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int32_2(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int32_t), pointer, intent(in) :: array(:, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int32_2) :: view
        type(c_ptr) :: cells(3)
        integer :: extents(2), a(2), b(2)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2))), c_loc(array(b(1), a(2))), &
                                       c_loc(array(a(1), b(2)))]
        status = placed(sim, name, MPS_INT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int32_3(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int32_t), pointer, intent(in) :: array(:, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int32_3) :: view
        type(c_ptr) :: cells(4)
        integer :: extents(3), a(3), b(3)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3))), c_loc(array(b(1), a(2), a(3))), &
                                       c_loc(array(a(1), b(2), a(3))), c_loc(array(a(1), a(2), b(3)))]
        status = placed(sim, name, MPS_INT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int32_4(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int32_t), pointer, intent(in) :: array(:, :, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int32_4) :: view
        type(c_ptr) :: cells(5)
        integer :: extents(4), a(4), b(4)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3), a(4))), c_loc(array(b(1), a(2), a(3), a(4))), &
                                       c_loc(array(a(1), b(2), a(3), a(4))), c_loc(array(a(1), a(2), b(3), a(4))), &
                                       c_loc(array(a(1), a(2), a(3), b(4)))]
        status = placed(sim, name, MPS_INT32, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int64_1(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int64_t), pointer, intent(in) :: array(:)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int64_1) :: view
        type(c_ptr) :: cells(2)
        integer :: extents(1), a(1), b(1)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1))), c_loc(array(b(1)))]
        status = placed(sim, name, MPS_INT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int64_2(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int64_t), pointer, intent(in) :: array(:, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int64_2) :: view
        type(c_ptr) :: cells(3)
        integer :: extents(2), a(2), b(2)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2))), c_loc(array(b(1), a(2))), &
                                       c_loc(array(a(1), b(2)))]
        status = placed(sim, name, MPS_INT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int64_3(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int64_t), pointer, intent(in) :: array(:, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int64_3) :: view
        type(c_ptr) :: cells(4)
        integer :: extents(3), a(3), b(3)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3))), c_loc(array(b(1), a(2), a(3))), &
                                       c_loc(array(a(1), b(2), a(3))), c_loc(array(a(1), a(2), b(3)))]
        status = placed(sim, name, MPS_INT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function

    integer function field_int64_4(sim, name, array, field, lo, dims, faces, at) result(status)
        type(mps_handle), intent(in) :: sim
        character(*), intent(in) :: name
        integer(c_int64_t), pointer, intent(in) :: array(:, :, :, :)
        type(mps_handle), intent(out) :: field
        integer, intent(in), optional :: lo(:), dims(:)
        logical, intent(in), optional :: faces(:)
        type(c_ptr), intent(in), optional :: at
        type(view_int64_4) :: view
        type(c_ptr) :: cells(5)
        integer :: extents(4), a(4), b(4)
        extents = 0
        if (associated(array)) extents = shape(array)
        view%a => array
        a = lbound(array)
        b = a + min(1, extents - 1)
        if (all(extents > 0)) cells = [c_loc(array(a(1), a(2), a(3), a(4))), c_loc(array(b(1), a(2), a(3), a(4))), &
                                       c_loc(array(a(1), b(2), a(3), a(4))), c_loc(array(a(1), a(2), b(3), a(4))), &
                                       c_loc(array(a(1), a(2), a(3), b(4)))]
        status = placed(sim, name, MPS_INT64, cells, extents, transfer(view, words), field, lo, dims, faces, at)
    end function
end module
