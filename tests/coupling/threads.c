/* A host whose MPI allows calls in one thread alone: those in another are told so, and the host goes on. */
#include <mpishard.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, level;
static const char *other;
static mps_handle me, sim, u, hook, link_of, no_domain, no_field, no_hook, no_program, no_link;
enum { CELLS = 12 };
static int64_t shape[1] = {CELLS}, cells[1];
static double a[CELLS], b[CELLS];

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: %s; mps_error: %s\n", rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void told(int status, const char *what)
{
    must(status == MPS_ERR_ORDER && strstr(mps_error(), "MPI allows no call in this thread"), what);
}

static int adopt(mps_handle *made)
{
    MPI_Comm comm = MPI_COMM_NULL;
    int size, grid[1];
    must(mps_comm(me, &comm) == MPS_OK, "comm");
    MPI_Comm_size(comm, &size);
    grid[0] = size;
    cells[0] = CELLS / size;
    return mps_adopt(comm, 1, shape, grid, NULL, NULL, made);
}

static void *calls(void *nothing)
{
    int count = 0;
    mps_handle of_field = u, of_hook = hook, of_link = link_of, of_domain = sim;
    told(mps_join("again", 5, &no_program), "join");
    told(adopt(&no_domain), "adopt");
    told(mps_field(sim, "v", MPS_FLOAT64, b, 1, NULL, cells, NULL, NULL, &no_field), "field");
    told(mps_rebind(u, b), "rebind");
    told(mps_hook(sim, "math:sin", 1, &u, 0, NULL, 1, MPS_INFER, &no_hook), "hook");
    told(mps_connect(me, other, 1, &u, 0, NULL, MPS_BLOCK, 2, 5, &no_link), "connect");
    if (hook != MPS_NULL) {
        told(mps_step(hook), "step");
        told(mps_start(hook), "start");
        told(mps_wait(hook), "wait");
        told(mps_release(&of_hook), "release of a hook");
    }
    told(*other == 'b' ? mps_put(link_of) : mps_get(link_of, NULL), "put, get");
    told(mps_close(link_of), "close");
    told(mps_release(&of_link), "release of a link");
    told(mps_release(&of_field), "release of a field");
    told(mps_release(&of_domain), "release of a domain");
    must(of_link == link_of && of_field == u && of_domain == sim, "what was not released is there");
    must(mps_ranks(me, other, &count) == MPS_OK && count > 0, "a local call");
    return nothing;
}

/* argv: name, that of the other, level of threads, a model or none */
int main(int argc, char **argv)
{
    pthread_t thread;
    int64_t step = -1;
    if (argc < 4) return 1;
    other = argv[2];
    MPI_Init_thread(&argc, &argv, *argv[3] == 's' ? MPI_THREAD_SINGLE : MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    must(level < MPI_THREAD_SERIALIZED, "the level of threads");
    must(mps_join(argv[1], 60, &me) == MPS_OK && adopt(&sim) == MPS_OK, "join");
    must(mps_field(sim, "u", MPS_FLOAT64, a, 1, NULL, cells, NULL, NULL, &u) == MPS_OK, "field");
    if (argc > 4) must(mps_hook(sim, argv[4], 1, &u, 0, NULL, 1, MPS_INFER, &hook) == MPS_OK, "hook");
    int writes = *other == 'b';
    must(mps_connect(me, other, writes, &u, !writes, &u, MPS_BLOCK, 2, 60, &link_of) == MPS_OK, "connect");
    pthread_create(&thread, NULL, calls, NULL);
    pthread_join(thread, NULL);
    for (int i = 0; i < CELLS; i++) a[i] = writes ? 7 : 0;
    must((writes ? mps_put(link_of) : mps_get(link_of, &step)) == MPS_OK && a[cells[0] - 1] == 7, "the host goes on");
    if (hook != MPS_NULL) must(mps_step(hook) == MPS_OK && mps_release(&hook) == MPS_OK, "step");
    must(mps_release(&link_of) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&sim) == MPS_OK && mps_release(&me) == MPS_OK, "release");
    printf("TOLD\n");
    MPI_Finalize();
    return 0;
}
