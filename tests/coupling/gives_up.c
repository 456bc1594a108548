/* A program that joins twice, of which the last rank waits for a moment alone. */
#include <mpishard.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    int rank, size;
    mps_handle me;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int k = 0; k < 2; k++)
        if (mps_join("others", k == 0 && rank == size - 1 ? 0.1 : 60, &me)) fprintf(stderr, "rank %d: %s\n", rank, mps_error());
        else printf("rank %d JOINED\n", rank);
    MPI_Finalize();
    return 0;
}
