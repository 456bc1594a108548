/* Two programs in C, of which "a" puts a step and ends with its link open, or "b" gets one and does. */
#include <mpishard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "%s; mps_error: %s\n", what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv)
{
    int puts = argc > 1 && argv[1][0] == 'a', policy = argc > 2 ? atoi(argv[2]) : MPS_BLOCK, reader_leaves = argc > 3, size;
    double cells[4] = {puts, puts, puts, puts};
    mps_handle me, sim, u, link;
    MPI_Comm comm;
    MPI_Init(&argc, &argv);
    must(mps_join(puts ? "a" : "b", 60, &me) == MPS_OK && mps_comm(me, &comm) == MPS_OK, "join");
    MPI_Comm_size(comm, &size);
    int64_t shape = 4, mine = 4 / size;
    must(mps_adopt(comm, 1, &shape, &size, NULL, NULL, &sim) == MPS_OK, "adopt");
    must(mps_field(sim, "u", MPS_FLOAT64, cells, 1, NULL, &mine, NULL, NULL, &u) == MPS_OK, "field");
    must(mps_connect(me, puts ? "b" : "a", puts, &u, !puts, &u, puts ? policy : MPS_DEFAULT, 2, 60, &link) == MPS_OK, "connect");
    double begin = MPI_Wtime();
    if (reader_leaves && puts) {
        int status;
        while ((status = mps_put(link)) >= 0 && MPI_Wtime() - begin < 30) usleep(10000);
        must(status == MPS_ERR_PEER && strstr(mps_error(), "of program 'b' left") && MPI_Wtime() - begin < 30, "a reader that left");
        must(mps_release(&link) == MPS_OK, "release");
        printf("TOLD\n");
    } else if (reader_leaves) must(mps_get(link, NULL) == MPS_OK, "get");
    else if (puts) must(mps_put(link) == MPS_OK, "put");
    else {
        must(mps_get(link, NULL) == MPS_OK && cells[0] == 1, "get");
        must(mps_get(link, NULL) == MPS_ERR_PEER && strstr(mps_error(), "of program 'a' left"), "a writer that left");
        must(MPI_Wtime() - begin < 30, "which is told at once");
        must(mps_release(&link) == MPS_OK, "release");
        printf("TOLD\n");
    }
    MPI_Finalize();
    return 0;
}
