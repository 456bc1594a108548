/* Communicators as Fortran passes them; for mpishard.f90. */
#include "mpishard.h"

int mps_adopt_f(MPI_Fint comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
                mps_handle *sim);
int mps_comm_f(mps_handle program, MPI_Fint *comm);

int mps_adopt_f(MPI_Fint comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
                mps_handle *sim)
{
    return mps_adopt(MPI_Comm_f2c(comm), ndim, shape, grid, sizes, periodic, sim);
}

int mps_comm_f(mps_handle program, MPI_Fint *comm)
{
    MPI_Comm own = MPI_COMM_NULL;
    int status = mps_comm(program, &own);
    if (status == MPS_OK) *comm = MPI_Comm_c2f(own);
    return status;
}
