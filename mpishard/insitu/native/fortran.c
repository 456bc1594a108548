/* What Fortran passes otherwise than C: communicators, and arrays whose lengths are known; for mpishard.f90. */
#include "native.h"

#pragma GCC visibility push(default)
int mps_adopt_f(MPI_Fint comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
                const int *lengths, mps_handle *sim);
int mps_field_f(mps_handle sim, const char *name, int dtype, void *data, int ndim, const int *dims, const int64_t *extents,
                const int64_t *lo, const int64_t *strides, const int *faces, const int *lengths, mps_handle *field);
int mps_comm_f(mps_handle program, MPI_Fint *comm);
#pragma GCC visibility pop

/* Arguments with an entry per dim; what is wrong on one rank is for all to hear, in the call itself. */
static int lengths_fit(const char *call, const char *const *names, int count, const int *lengths, int ndim)
{
    for (int i = 0; i < count; i++)
        if (lengths[i] != ndim)
            return fail(MPS_ERR_ARGUMENT, "%s: %s has another length\n  expected: %d, an entry per dim\n  got:      %d", call, names[i], ndim,
                        lengths[i]);
    return MPS_OK;
}

int mps_adopt_f(MPI_Fint comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
                const int *lengths, mps_handle *sim)
{
    static const char *const names[] = {"grid", "sizes", "periodic"};
    int status = mpi_ready(); /* without MPI the handle cannot be converted */
    if (status) return status;
    status = lengths_fit("adopt", names, 3, lengths, ndim);
    return sim_made(status, 1, MPI_Comm_f2c(comm), ndim, shape, grid, sizes, periodic, sim);
}

int mps_field_f(mps_handle sim, const char *name, int dtype, void *data, int ndim, const int *dims, const int64_t *extents,
                const int64_t *lo, const int64_t *strides, const int *faces, const int *lengths, mps_handle *field)
{
    static const char *const names[] = {"lo", "dims", "faces"};
    int status = lengths_fit("field", names, 3, lengths, ndim);
    if (!status && lengths[3])
        status = fail(MPS_ERR_ARGUMENT, "field '%s': a part of structures, of which this compiler hands on a wrong address\n"
                      "  expected: at=, where its first cell is, ghost cells included\n"
                      "  fix:      at=c_loc(cells(1, 1)%%part) for cells%%part, whose first indices are 1", name);
    return field_made(status, sim, name, dtype, data, ndim, dims, extents, lo, strides, faces, field);
}

int mps_comm_f(mps_handle program, MPI_Fint *comm)
{
    MPI_Comm own = MPI_COMM_NULL;
    int status = mps_comm(program, &own);
    if (status == MPS_OK) *comm = MPI_Comm_c2f(own);
    return status;
}
