/* A host that is alone in mps_adopt or mps_join, or whose MPI makes no more communicators: no call ends it, or hangs. */
#define _GNU_SOURCE
#include <mpishard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, size;

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: %s; mps_error: %s\n", rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int adopt(MPI_Comm comm, mps_handle *sim)
{
    int grid[1] = {size};
    int64_t shape[1] = {4 * size};
    return mps_adopt(comm, 1, shape, grid, NULL, NULL, sim);
}

/* one rank comes when the others have given up: it is told, too, and all may do it again */
static void late(MPI_Comm comm)
{
    mps_handle sim;
    if (rank == 0) sleep(4);
    must(adopt(comm, &sim) == MPS_ERR_LOST && strstr(mps_error(), "not all of its own ranks came"), "alone in adopt");
    must(sim == MPS_NULL, "there is no domain");
    MPI_Barrier(MPI_COMM_WORLD);
    must(adopt(comm, &sim) == MPS_OK && mps_release(&sim) == MPS_OK, "together");
}

static void no_more(MPI_Comm comm)
{
    enum { MOST = 5000 };
    static MPI_Comm made[MOST];
    mps_handle sim = MPS_NULL, me = MPS_NULL, u, hook;
    double cells[4] = {0};
    int64_t four[1] = {4};
    int count = 0;
    must(adopt(comm, &sim) == MPS_OK && mps_field(sim, "u", MPS_FLOAT64, cells, 1, NULL, four, NULL, NULL, &u) == MPS_OK, "adopt");
    MPI_Comm plain;
    MPI_Comm_dup(MPI_COMM_WORLD, &plain);
    MPI_Comm_set_errhandler(plain, MPI_ERRORS_RETURN);
    while (count < MOST && MPI_Comm_dup(plain, &made[count]) == MPI_SUCCESS) count++;
    for (int left = 0; left < 4; left++) {
        mps_handle other = MPS_NULL;
        int status = adopt(comm, &other);
        must(left ? status == MPS_OK : status == MPS_ERR_MPI && other == MPS_NULL, "adopt");
        status = mps_join("solver", 20, &me);
        must(left < 2 ? status == MPS_ERR_MPI && me == MPS_NULL : status == MPS_OK || status == MPS_ERR_MPI, "join");
        status = mps_hook(sim, "math:sin", 1, &u, 0, NULL, 1, MPS_INFER, &hook);
        must(status < 0 && hook == MPS_NULL, "hook");
        must(mps_release(&other) == MPS_OK, "release");
        MPI_Comm_free(&made[--count]);
    }
    must(mps_release(&sim) == MPS_OK && mps_release(&u) == MPS_OK, "release");
}

int main(int argc, char **argv)
{
    MPI_Comm comm;
    MPI_Errhandler on_error;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    if (strcmp(argv[1], "late") == 0) late(comm);
    else no_more(comm);
    MPI_Comm_get_errhandler(comm, &on_error);
    must(on_error == MPI_ERRORS_ARE_FATAL, "the host's handler of errors");
    if (rank == 0) printf("ALIVE\n");
    MPI_Finalize();
    return 0;
}
