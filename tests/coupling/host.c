/* A host in C that couples in every way: "solver" puts u and gets tau, then what goes wrong. */
#include <mpishard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank;

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: %s; mps_error: %s\n", rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* 7 x 5 cells; this rank owns rows, with one ghost row before, two after, two padding columns and one ghost column */
enum { NX = 7, NY = 5, WIDTH = NY + 3 };

int main(int argc, char **argv)
{
    mps_handle program, sim, u, tau, link, other, none = MPS_NULL;
    MPI_Comm comm;
    must(mps_join("solver", 30, &program) == MPS_ERR_MPI && strstr(mps_error(), "not initialised"), "MPI is not initialised");
    MPI_Init(&argc, &argv);
    /* before there is anything to call them with, on all ranks and without one message */
    int64_t four = 4;
    double cells[4];
    must(mps_comm(none, &comm) == MPS_ERR_ORDER, "comm before join");
    must(mps_connect(none, "model", 0, NULL, 0, NULL, MPS_DEFAULT, 0, 5, &link) == MPS_ERR_ORDER, "connect before join");
    must(mps_field(none, "u", MPS_FLOAT64, cells, 1, NULL, &four, NULL, NULL, &u) == MPS_ERR_ORDER, "field before adopt");
    must(mps_rebind(none, cells) == MPS_ERR_ORDER, "rebind before field");
    must(mps_put(none) == MPS_ERR_ORDER && mps_get(none, NULL) == MPS_ERR_ORDER && mps_close(none) == MPS_ERR_ORDER, "no link");
    must(strstr(mps_error(), "expected") != NULL && mps_release(&none) == MPS_OK, "the text says what is missing");
    must(mps_join("", 30, &program) == MPS_ERR_PEER && strstr(mps_error(), "no name"), "a name that is none");
    must(mps_join("solver", 30, &program) == MPS_OK, "join");
    must(mps_comm(program, &comm) == MPS_OK, "comm");
    int size, ranks;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    must(mps_ranks(program, "model", &ranks) == MPS_OK && ranks == 2, "ranks");
    const char *order = argc > 1 ? argv[1] : "C";
    int64_t shape[2] = {NX, NY}, rows = rank == 0 ? NX - (size - 1) : 1, sizes[2] = {rows, NY};
    int grid[2] = {size, 1};

    sizes[0]++;
    must(mps_adopt(comm, 2, shape, grid, sizes, NULL, &sim) == MPS_ERR_ARGUMENT && strstr(mps_error(), "overlap"), "overlap");
    sizes[0] -= 2;
    must(mps_adopt(comm, 2, shape, grid, sizes, NULL, &sim) == MPS_ERR_ARGUMENT && strstr(mps_error(), "gap"), "gap");
    sizes[0]++;
    must(mps_adopt(comm, 2, shape, NULL, sizes, NULL, &sim) == MPS_ERR_ARGUMENT, "no grid");
    /* wrong on one rank alone, all are told at once */
    int across[2] = {1, size};
    must(mps_adopt(comm, 2, shape, rank ? grid : across, sizes, NULL, &sim) == MPS_ERR_ORDER && strstr(mps_error(), "different arguments"), "another grid on one rank");
    must(mps_adopt(comm, 2, rank ? shape : NULL, grid, sizes, NULL, &sim) == MPS_ERR_ARGUMENT && strstr(mps_error(), "no shape"), "no shape on one rank");
    must(mps_adopt(comm, 2, shape, grid, sizes, NULL, rank ? &sim : NULL) == MPS_ERR_ARGUMENT && strstr(mps_error(), "no place"), "no place on one rank");
    must(mps_adopt(comm, 2, shape, grid, sizes, NULL, &sim) == MPS_OK, "adopt");

    int64_t extents[2] = {rows + 3, WIDTH}, lo[2] = {1, 1}, strides[2] = {WIDTH * 8, 8}, few[2] = {rows, NY};
    if (order[0] == 'F') strides[0] = 8, strides[1] = (rows + 3) * 8;
    int64_t floats[2] = {strides[0] / 2, strides[1] / 2};
    double *a = calloc((size_t)((rows + 3) * WIDTH), sizeof *a);
    float *b = calloc((size_t)((rows + 3) * WIDTH), sizeof *b);
    must(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, rank ? extents : few, lo, strides, &u) == MPS_ERR_ARGUMENT, "a short array on one rank");
    must(mps_field(sim, "u", 99, a, 2, NULL, extents, lo, strides, &u) == MPS_ERR_ARGUMENT, "dtype");
    must(mps_field(sim, rank ? "u" : "w", MPS_FLOAT64, a, 2, NULL, extents, lo, strides, &u) == MPS_ERR_ORDER, "another name on one rank");
    must(mps_field(sim, "u", rank ? MPS_FLOAT64 : MPS_INT64, a, 2, NULL, extents, lo, strides, &u) == MPS_ERR_ORDER, "another dtype on one rank");
    must(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, extents, lo, strides, rank ? &u : NULL) == MPS_ERR_ARGUMENT, "no place on one rank");
    must(mps_field(sim, rank ? "u" : NULL, MPS_FLOAT64, a, 2, NULL, extents, lo, strides, &u) == MPS_ERR_ARGUMENT, "no name on one rank");
    must(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, extents, lo, strides, &u) == MPS_OK, "field");
    must(mps_rebind(u, rank ? a : NULL) == MPS_ERR_ARGUMENT && strstr(mps_error(), "null"), "null on one rank");
    must(mps_field(sim, "tau", MPS_FLOAT32, b, 2, NULL, extents, lo, floats, &tau) == MPS_OK, "field");

    must(mps_put(sim) == MPS_ERR_ORDER, "a handle of another kind");
    must(mps_connect(program, "nobody", 1, &u, 0, NULL, MPS_DEFAULT, 0, 5, &link) == MPS_ERR_PEER, "no such program");
    must(mps_connect(program, rank ? "model" : "nobody", 1, &u, 0, NULL, MPS_DEFAULT, 0, 5, &link) == MPS_ERR_PEER, "no such program on one rank");
    must(mps_connect(program, "model", 1, &u, 0, NULL, MPS_DEFAULT, 0, 5, rank ? &link : NULL) == MPS_ERR_ARGUMENT, "no place on one rank");
    must(mps_connect(program, "model", 1, &none, 0, NULL, MPS_DEFAULT, 0, 5, &link) == MPS_ERR_ARGUMENT, "no field");
    must(mps_connect(program, "model", 1, &u, 1, &tau, MPS_DEFAULT, 0, 20, &link) == MPS_ERR_MATCH, "other shapes");
    must(strstr(mps_error(), "'tau'") != NULL, "the field is named");
    must(mps_connect(program, "model", 1, &u, 1, &tau, MPS_BLOCK, 2, 20, &link) == MPS_OK, "connect");
    int64_t row = strides[0] / 8, column = strides[1] / 8, first = rank == 0 ? 0 : NX - (size - 1) + rank - 1, step;
    for (int k = 0; k < 5; k++) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < NY; j++) a[(i + 1) * row + (j + 1) * column] = (double)((first + i) * 100 + j + k);
        must(mps_put(link) == MPS_OK, "put");
        must(mps_get(link, &step) == MPS_OK && step == k, "get");
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < NY; j++)
                must(b[(i + 1) * row + (j + 1) * column] == (float)(2 * ((first + i) * 100 + j + k)), "tau");
    }
    must(b[0] == 0 && b[row] == 0, "ghost cells are left alone");
    must(mps_close(link) == MPS_OK, "close");
    must(mps_put(link) == MPS_ERR_ORDER && strstr(mps_error(), "closed"), "put after close");
    must(mps_release(&link) == MPS_OK && link == MPS_NULL, "release");

    /* the model's stream ends; ours drops */
    must(mps_connect(program, "model", 1, &u, 0, NULL, MPS_LATEST, 2, 20, &link) == MPS_OK, "connect");
    must(mps_connect(program, "model", 0, NULL, 1, &tau, MPS_DEFAULT, 0, 20, &other) == MPS_OK, "connect");
    for (int k = 0; k < 6; k++) {
        for (int64_t i = 0; i < (rows + 3) * WIDTH; i++) a[i] = k;
        must(mps_put(link) == MPS_OK, "put latest");
    }
    MPI_Barrier(MPI_COMM_WORLD); /* only then the model reads */
    must(mps_close(link) == MPS_OK, "close");
    for (int k = 0; k < 3; k++) must(mps_get(other, &step) == MPS_OK && step == k, "get");
    must(mps_get(other, &step) == MPS_END && mps_get(other, &step) == MPS_END, "end");
    must(mps_close(other) == MPS_OK, "close");
    mps_release(&link);
    mps_release(&other);

    /* a model that stops reading */
    must(mps_connect(program, "model", 1, &u, 0, NULL, MPS_DROP_NEWEST, 1, 20, &link) == MPS_OK, "connect");
    int status, dropped = 0;
    while ((status = mps_put(link)) != MPS_END) {
        must(status == MPS_OK || status == MPS_DROPPED, "put");
        dropped += status == MPS_DROPPED;
        MPI_Barrier(dropped == 1 && status == MPS_DROPPED ? MPI_COMM_WORLD : comm);
    }
    must(dropped > 0, "a slow reader makes it drop");
    must(mps_close(link) == MPS_OK, "close");
    mps_release(&link);

    mps_release(&u);
    mps_release(&tau);
    mps_release(&sim);
    mps_release(&program);
    free(a);
    free(b);
    if (rank == 0) printf("C IS RIGHT\n");
    MPI_Finalize();
    return 0;
}
