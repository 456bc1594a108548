! The call that needs libmpishard, apart from those that libmpishard_link has too.
submodule (mpishard) mpishard_hook
    implicit none

    interface
        integer(c_int) function c_hook(sim, model, n_in, in, n_out, out, every, mode, hook) bind(c, name="mps_hook")
            import
            type(mps_handle), value :: sim
            character(kind=c_char), intent(in) :: model(*)
            integer(c_int), value :: n_in, n_out, every, mode
            type(mps_handle), intent(in) :: in(*), out(*)
            type(mps_handle), intent(out) :: hook
        end function
    end interface

contains

    module procedure mps_hook
        type(mps_handle), allocatable :: reads(:), writes(:)
        integer(c_int) :: turns, mode
        allocate(reads(0), writes(0))
        turns = 0
        mode = 0
        if (present(inputs)) reads = inputs
        if (present(outputs)) writes = outputs
        if (present(every)) turns = every
        if (present(train)) mode = merge(1, 0, train)
        status = c_hook(sim, trim(model) // c_null_char, size(reads), reads, size(writes), writes, turns, mode, hook)
    end procedure
end submodule
