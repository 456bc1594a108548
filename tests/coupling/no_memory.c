/* Compiled with the library's sources, whose allocations fail one after the other on one rank: all ranks hear of it. */
#define _GNU_SOURCE
#include <mpishard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* by these names the sources call what is below */
#undef malloc
#undef calloc
#undef realloc
void *malloc(size_t n);
void *calloc(size_t m, size_t n);
void *realloc(void *p, size_t n);

static int made, first = -1, last = -1; /* which allocations fail */
static int fails(void) { return made++ >= first && made <= last; }
void *failing_malloc(size_t n) { return fails() ? NULL : malloc(n); }
void *failing_calloc(size_t m, size_t n) { return fails() ? NULL : calloc(m, n); }
void *failing_realloc(void *p, size_t n) { return fails() ? NULL : realloc(p, n); }

static MPI_Comm comm;
static int rank, size, who;

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: %s; mps_error: %s\n", rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void fail_from(int k, int count)
{
    made = 0;
    first = rank == who ? k : -1;
    last = first < 0 ? -1 : k + count;
}

/* whether a call did what it is for, on all ranks, or was told of the memory, on all ranks */
static int done(int status, const char *call)
{
    int ends[2] = {status, -status};
    fail_from(-1, 0);
    MPI_Allreduce(MPI_IN_PLACE, ends, 2, MPI_INT, MPI_MAX, comm);
    must(ends[0] == -ends[1] && (status == MPS_OK || (status == MPS_ERR_MEMORY && strstr(mps_error(), "no memory"))), call);
    return status == MPS_OK;
}

int main(int argc, char **argv)
{
    enum { CELLS = 8 };
    int solver = argc > 1 && argv[1][0] == 's', status, k;
    mps_handle me, sim, u, link;
    double a[CELLS] = {0};
    MPI_Init(&argc, &argv);
    comm = MPI_COMM_WORLD;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    /* one that has nobody below it, the first, and one in between */
    int asked[3] = {size - 1, 0, 2};
    for (int i = 0; i < 3; i++) {
        who = asked[i];
        k = 0;
        do {
            fail_from(k++, 1);
            status = mps_join(solver ? "solver" : "model", 5, &me);
        } while (!done(status, "join"));
        must(k > 2, "a join that asks for memory");
        if (i < 2) must(mps_release(&me) == MPS_OK, "release");
    }
    must(mps_comm(me, &comm) == MPS_OK, "comm");
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    who = size - 1;
    int64_t shape[1] = {CELLS};
    k = 0;
    do fail_from(k++, 1);
    while (!done(mps_adopt(comm, 1, shape, &size, NULL, NULL, &sim), "adopt"));
    k = 0;
    do fail_from(k++, 1);
    while (!done(mps_field(sim, "u", MPS_FLOAT64, a, 1, NULL, shape, NULL, NULL, &u), "field"));
    /* the other program hears of it, too: nobody waits for the timeout */
    for (int turn = 0; turn < 2; turn++) {
        int fails_here = solver == turn;
        for (k = 0, link = MPS_NULL; link == MPS_NULL; k++) {
            if (fails_here) fail_from(k, 1);
            double begin = MPI_Wtime();
            status = mps_connect(me, solver ? "model" : "solver", solver, &u, !solver, &u, solver ? MPS_LATEST : MPS_DEFAULT, 0, 30, &link);
            must(MPI_Wtime() - begin < 20, "an answer in time");
            if (fails_here) done(status, "connect");
            else must(status == MPS_OK || strstr(mps_error(), "gave up"), "the other side's");
            MPI_Barrier(MPI_COMM_WORLD);
        }
        must(k > 9, "a connect that asks for memory");
        if (!turn) must(mps_release(&link) == MPS_OK, "release");
    }
    /* one that puts neither waits nor asks for memory, while a rank of the other is late to take its part of a step */
    int64_t step = -1;
    int late = 3;
    fail_from(0, 1 << 30);
    for (k = 0; k < 40 && solver; k++) {
        must(mps_put(link) == MPS_OK, "put");
        usleep(5000);
    }
    fail_from(-1, 0);
    if (solver && rank == 0) MPI_Send(&step, 1, MPI_INT64_T, late, 0, MPI_COMM_WORLD);
    if (!solver && rank == 1) MPI_Recv(&step, 1, MPI_INT64_T, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (!solver) must(mps_get(link, &step) == MPS_OK && step >= 0, "get");
    /* nor does the end: the other side hears of it */
    fail_from(0, 1 << 30);
    must(mps_close(link) == MPS_OK, "close");
    fail_from(-1, 0);
    must(mps_release(&link) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&sim) == MPS_OK && mps_release(&me) == MPS_OK, "release");
    if (rank == 0) printf("ALL HEARD OF IT\n");
    MPI_Finalize();
    return 0;
}
