/* Two programs in C, "a" and "b", whose messages are longer than a piece; of its last step "b" sends the first pieces only. */
#include <mpishard.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { N = 500 };
static int withheld;

/* MPI's own, but for what is withheld */
int MPI_Startall(int count, MPI_Request requests[]) { return PMPI_Startall(withheld && count > 1 ? 1 : count, requests); }

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "%s; mps_error: %s\n", what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv)
{
    int is_a = argv[1][0] == 'a', grid = 1;
    int64_t n = N, step;
    double x[N];
    mps_handle me, sim, u, link;
    MPI_Comm comm;
    MPI_Init(&argc, &argv);
    must(mps_join(argv[1], 20, &me) == MPS_OK, "join");
    mps_comm(me, &comm);
    must(mps_adopt(comm, 1, &n, &grid, &n, NULL, &sim) == MPS_OK, "adopt");
    must(mps_field(sim, "u", MPS_FLOAT64, x, 1, NULL, &n, NULL, NULL, &u) == MPS_OK, "field");
    must(mps_connect(me, is_a ? "b" : "a", !is_a, &u, is_a, &u, MPS_BLOCK, 2, 2, &link) == MPS_OK, "connect");
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < N; i++) x[i] = is_a ? -1 : k + 0.5 * i;
        must((is_a ? mps_get(link, &step) : mps_put(link)) == MPS_OK, "a step in pieces");
        for (int i = 0; i < N; i++) must(x[i] == k + 0.5 * i, "other values");
    }
    withheld = !is_a;
    if (is_a) {
        must(mps_get(link, &step) == MPS_ERR_PEER && strstr(mps_error(), "did not go on in the middle of a message") != NULL, "half a step");
        must(x[1] == 2.5, "a field that has half of a step");
        must(mps_get(link, &step) != MPS_OK, "a link that has failed");
    } else {
        must(mps_put(link) == MPS_OK, "put");
        sleep(4);
    }
    mps_close(link);
    mps_release(&link);
    puts("ALIVE");
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
