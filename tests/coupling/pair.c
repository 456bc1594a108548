/* Two programs in C, "a" and "b", that misunderstand each other in every way; both are alive after each. */
#include <mpishard.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, is_a;

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "program %c, rank %d: %s; mps_error: %s\n", is_a ? 'a' : 'b', rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int told(int status, int expected, const char *text) { return status == expected && strstr(mps_error(), text) != NULL; }

static mps_handle me;

static int linked(mps_handle field, int out, mps_handle *link)
{
    return mps_connect(me, is_a ? "b" : "a", out, &field, !out, &field, MPS_DEFAULT, 0, 20, link);
}

int main(int argc, char **argv)
{
    int size, ranks, kill_b = argc > 2, policy = argc > 3 ? atoi(argv[3]) : MPS_BLOCK;
    mps_handle sim, u, v, w, link;
    MPI_Comm comm;
    is_a = argv[1][0] == 'a';
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    must(told(mps_join(argv[1], 20, rank == 1 ? NULL : &me), MPS_ERR_PEER, "no place for a handle on rank 1"), "no place on one rank");
    must(told(mps_join("one", 20, &me), MPS_ERR_PEER, "two programs of one name, 'one'"), "two programs of one name");
    must(told(mps_join("caf\xe9", 20, &me), MPS_ERR_PEER, "no name of a program"), "a name that is not UTF-8");
    if (!is_a) sleep(3);
    else must(told(mps_join(argv[1], 1, &me), MPS_ERR_PEER, "of MPI_COMM_WORLD did not come"), "a program that does not come in time");
    /* after more attempts here than there */
    must(mps_join(argv[1], 20, &me) == MPS_OK, "join");
    must(mps_ranks(me, "c", &ranks) == MPS_OK && ranks == 0, "no such program");
    must(told(mps_ranks(me, NULL, &ranks), MPS_ERR_ARGUMENT, "no name"), "no name");
    mps_comm(me, &comm);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);

    int64_t n = 6, mine = is_a ? 3 : 6;
    double x[6] = {0}, y[6] = {0};
    float z[6] = {0};
    if (rank == 0) setenv("MPISHARD_TIMEOUT", "1 min", 1);
    must(told(mps_adopt(comm, 1, &n, &size, &mine, NULL, &sim), MPS_ERR_ARGUMENT, "MPISHARD_TIMEOUT is '1 min'"), "no number, on one rank");
    setenv("MPISHARD_TIMEOUT", " 60 ", 1);
    must(mps_adopt(comm, 1, &n, &size, &mine, NULL, &sim) == MPS_OK, "adopt");
    must(mps_field(sim, "u", MPS_FLOAT64, x, 1, NULL, &mine, NULL, NULL, &u) == MPS_OK, "field");
    must(mps_field(sim, "v", MPS_FLOAT64, y, 1, NULL, &mine, NULL, NULL, &v) == MPS_OK, "field");
    must(told(mps_field(sim, "u", MPS_FLOAT64, y, 1, NULL, &mine, NULL, NULL, &w), MPS_ERR_ARGUMENT, "used twice"), "a name used twice");

    int64_t vast[3] = {mine, INT64_MAX / 2, 4}, apart[3] = {INT64_MAX, INT64_MIN, 8};
    for (int d = 1; d <= 3; d++) {
        if (d == 1) vast[0] = INT64_MAX;
        int dims[3] = {0, -1, -1};
        must(told(mps_field(sim, "w", MPS_FLOAT64, y, d, dims, vast, NULL, d == 1 ? apart + 2 : NULL, &w), MPS_ERR_ARGUMENT, "further than memory"), "vast");
        vast[0] = mine;
        must(told(mps_field(sim, "w", MPS_FLOAT64, y, d, dims, vast, NULL, apart, &w), MPS_ERR_ARGUMENT, "further than memory"), "far apart");
    }
    int64_t most = INT64_MAX;
    must(told(mps_adopt(comm, 1, &n, &size, &most, NULL, &w), MPS_ERR_ARGUMENT, "past the domain"), "more cells than there are numbers");

    /* other fields, other dtypes, both putting */
    must(told(linked(is_a ? u : v, is_a, &link), MPS_ERR_MATCH, "name other fields") && strstr(mps_error(), "'v'"), "other names");
    must(told(linked(u, 1, &link), MPS_ERR_MATCH, "name other fields"), "both put");
    if (!is_a) {
        must(mps_release(&u) == MPS_OK, "release");
        must(mps_field(sim, "u", MPS_FLOAT32, z, 1, NULL, &mine, NULL, NULL, &u) == MPS_OK, "the name is free again");
    }
    must(told(linked(u, is_a, &link), MPS_ERR_MATCH, "other dtypes") && strstr(mps_error(), "float32"), "other dtypes");
    must(link == MPS_NULL && told(mps_put(link), MPS_ERR_ORDER, "expected a link"), "there is no link");
    /* wrong on one side alone, and on one rank alone: the other side hears of it */
    mps_handle two[2] = {v, v}, none = MPS_NULL;
    if (is_a) must(told(mps_connect(me, "b", 2, two, 0, NULL, MPS_DEFAULT, 0, 20, &link), MPS_ERR_ARGUMENT, "two fields of one name"), "twice");
    else must(told(linked(v, 0, &link), MPS_ERR_PEER, "'a' gave up"), "the other side gave up");
    if (is_a) must(told(linked(rank ? none : v, 1, &link), MPS_ERR_ARGUMENT, "field 0 is none"), "no field on one rank");
    else must(told(linked(v, 0, &link), MPS_ERR_PEER, "'a' gave up"), "the other side gave up");
    if (is_a) must(told(mps_connect(me, "b", 1, rank ? NULL : &v, 0, NULL, MPS_DEFAULT, 0, 20, &link), MPS_ERR_ARGUMENT, "1 fields, and none"), "none on one rank");
    else must(told(linked(v, 0, &link), MPS_ERR_PEER, "'a' gave up"), "the other side gave up");
    if (is_a) must(told(mps_connect(me, "b", 1, &v, 0, NULL, rank, 0, 20, &link), MPS_ERR_ORDER, "different arguments"), "another policy on one rank");
    else must(told(linked(v, 0, &link), MPS_ERR_PEER, "'a' gave up"), "the other side gave up");

    /* released on one rank alone: its program is told at once, then the other */
    must(mps_field(sim, "q", MPS_FLOAT64, x, 1, NULL, &mine, NULL, NULL, &w) == MPS_OK && linked(w, is_a, &link) == MPS_OK, "connect");
    must((is_a ? mps_put(link) : mps_get(link, NULL)) == MPS_OK, "a step");
    if (is_a && rank == 0) mps_release(&w);
    if (is_a) must(told(mps_put(link), MPS_ERR_ORDER, "field 'q' was released"), "a field released on one rank");
    if (is_a) must(told(mps_put(link), MPS_ERR_ORDER, "field 'q' was released"), "and used again");
    must(!is_a || mps_close(link) == MPS_OK, "close");
    must(is_a || told(mps_get(link, NULL), MPS_ERR_PEER, "rank 0 of program 'a' left"), "who left is named");
    must(mps_release(&link) == MPS_OK && mps_release(&w) == MPS_OK, "release");

    /* other calls on one rank: they do not match, and both hear of it */
    for (int k = 0; k < 4; k++) {
        int status, policy = k < 3 ? k : MPS_BLOCK;
        mps_handle other = MPS_NULL;
        must(mps_connect(me, is_a ? "b" : "a", is_a, &v, !is_a, &v, policy, 2, 20, &link) == MPS_OK, "connect");
        if (k == 3) must(mps_connect(me, is_a ? "b" : "a", is_a, &v, !is_a, &v, policy, 2, 20, &other) == MPS_OK, "connect");
        if (is_a) {
            must(mps_put(link) == MPS_OK, "a step");
            status = rank == 0 ? mps_put(link) : k == 3 ? mps_put(other) : mps_close(link);
            must(told(status, MPS_ERR_ORDER, k == 3 ? "put of its link" : "close of its link"), "different calls");
            must(told(mps_put(rank && k == 3 ? other : link), MPS_ERR_ORDER, "different calls"), "and afterwards");
            must(mps_close(link) == MPS_OK && (k < 3 || mps_close(other) == MPS_OK), "close");
        } else {
            do status = mps_get(link, NULL);
            while (status == MPS_OK);
            must(status == MPS_ERR_PEER && mps_close(link) == MPS_OK, "the other side gave up");
        }
        must(mps_release(&link) == MPS_OK && (k < 3 || is_a || mps_release(&other) <= MPS_OK), "release");
        if (is_a && k == 3) mps_release(&other);
    }

    /* released and used */
    must(linked(v, is_a, &link) == MPS_OK, "connect");
    for (int i = 0; i < mine; i++) y[i] = is_a ? rank * 10 + i : 0;
    must((is_a ? mps_put(link) : mps_get(link, NULL)) == MPS_OK, "a step");
    must(is_a || (y[1] == 1 && y[3] == 10 && y[5] == 12), "what was put");
    must(told(is_a ? mps_get(link, NULL) : mps_put(link), MPS_ERR_ORDER, "nothing to"), "the other direction");
    mps_handle past = v;
    must(mps_release(&v) == MPS_OK && told(mps_rebind(past, x), MPS_ERR_ORDER, "expected a field"), "a handle of the past");
    must(told(is_a ? mps_put(link) : mps_get(link, NULL), MPS_ERR_ORDER, "field 'v' was released"), "a field released and used");
    must(mps_close(link) == MPS_OK && mps_close(link) == MPS_OK, "close");
    must(told(is_a ? mps_put(link) : mps_get(link, NULL), MPS_ERR_ORDER, "closed"), "after close");
    past = link;
    must(mps_release(&link) == MPS_OK && told(mps_put(past), MPS_ERR_ORDER, "expected a link"), "after release");

    /* a reader that is killed, of a writer that never waits for it: found in a fraction of a second, however few the steps */
    if (kill_b && policy != MPS_BLOCK) {
        must(mps_field(sim, "w", MPS_FLOAT64, x, 1, NULL, &mine, NULL, NULL, &w) == MPS_OK, "field");
        must(mps_connect(me, is_a ? "b" : "a", is_a, &w, !is_a, &w, policy, 2, 20, &link) == MPS_OK, "connect");
        for (int i = 0; i < 2; i++) must((is_a ? mps_put(link) : mps_get(link, NULL)) == MPS_OK, "a step");
        if (!is_a) raise(SIGKILL);
        int puts = 0, status;
        while ((status = mps_put(link)) >= 0 && ++puts < 30) usleep(100000);
        must(told(status, MPS_ERR_PEER, "put: rank 0 of program 'b' died") && puts < 30, "a reader that is killed");
        must(told(mps_put(link), MPS_ERR_PEER, "died") && mps_release(&link) == MPS_OK, "release");
        printf("ALIVE %d\n", rank);
        fflush(stdout);
        sleep(1);
        _exit(0);
    }

    /* a peer that is killed in a step; what is left of the job cannot finalise MPI */
    must(mps_field(sim, "w", MPS_FLOAT64, x, 1, NULL, &mine, NULL, NULL, &w) == MPS_OK, "field");
    must(linked(w, is_a ? 0 : 1, &link) == MPS_OK, "connect");
    must((is_a ? mps_get(link, NULL) : mps_put(link)) == MPS_OK, "a step");
    if (kill_b) {
        if (!is_a) raise(SIGKILL);
        for (int i = 0; i < 2; i++) must(told(mps_get(link, NULL), MPS_ERR_PEER, "rank 0 of program 'b' died"), "a peer that is killed");
        must(mps_release(&link) == MPS_OK, "release");
        printf("ALIVE %d\n", rank);
        fflush(stdout);
        sleep(1);
        _exit(0);
    }
    mps_handle late, last;
    must(mps_field(sim, "late", MPS_FLOAT64, y, 1, NULL, &mine, NULL, NULL, &last) == MPS_OK && linked(last, is_a, &late) == MPS_OK, "connect");
    /* the program's handle, then the link's: what it needs stays */
    must(mps_release(&me) == MPS_OK && mps_release(&sim) == MPS_OK, "release");
    must(told(is_a ? mps_get(link, NULL) : mps_put(link), MPS_ERR_ORDER, "'w' was released"), "the domain was released");
    must(mps_release(&link) == MPS_OK && mps_release(&w) == MPS_OK && mps_release(&u) == MPS_OK, "release");
    MPI_Finalize();
    /* a link that outlives MPI is of no use, and no harm */
    for (int k = 0; k < 3; k++)
        if (!told(k == 2 ? mps_close(late) : k ? mps_put(late) : mps_get(late, NULL), MPS_ERR_MPI, "MPI is finalized")) return 1;
    if (mps_release(&late) || mps_release(&last)) return 1;
    printf("ALIVE %d\n", rank);
    return 0;
}
