/* Communicators as Fortran passes them; for mpishard.f90. */
#include "mpishard.h"

int mps_adopt_f(MPI_Fint comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
                mps_handle *sim);
int mps_comm_f(mps_handle program, MPI_Fint *comm);

int mps_adopt_f(MPI_Fint comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
                mps_handle *sim)
{
    int begun = 0, over = 0;
    MPI_Initialized(&begun);
    MPI_Finalized(&over);
    /* without MPI the handle cannot be converted, and mps_adopt says why */
    return mps_adopt(begun && !over ? MPI_Comm_f2c(comm) : MPI_COMM_NULL, ndim, shape, grid, sizes, periodic, sim);
}

int mps_comm_f(mps_handle program, MPI_Fint *comm)
{
    MPI_Comm own = MPI_COMM_NULL;
    int status = mps_comm(program, &own);
    if (status == MPS_OK) *comm = MPI_Comm_c2f(own);
    return status;
}
