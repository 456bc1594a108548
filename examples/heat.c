/* Heat in three dimensions, u_t = laplace(u) + q, explicit, in a box with cold walls: an ordinary MPI program in C, whose
 * source q comes from a model in another program of the job.
 *
 *   cc heat.c $(mpishard config --build build --cflags --libs --link) -o heat          (cc: mpicc)
 *   mpiexec -n 4 ./heat 100 : -n 2 python heat_model.py
 *   mpiexec -n 4 ./heat 100 alone                                                without a model, q = 0
 */
#include <mpishard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 24 };

static int own[3];          /* cells of this rank */
static long long row, slab; /* strides in cells: one ghost cell on every side */
static MPI_Comm cart;

static long long at(int i, int j, int k) { return (i + 1) * slab + (j + 1) * row + k + 1; }

/* the ghost cells of one dim, from both neighbours */
static void exchange(double *u)
{
    for (int d = 0; d < 3; d++) {
        int low, high, from[3] = {0, 0, 0}, last = own[d] - 1;
        MPI_Datatype face;
        int sizes[3] = {own[0] + 2, own[1] + 2, own[2] + 2}, part[3] = {own[0], own[1], own[2]};
        part[d] = 1;
        MPI_Type_create_subarray(3, sizes, part, from, MPI_ORDER_C, MPI_DOUBLE, &face);
        MPI_Type_commit(&face);
        MPI_Cart_shift(cart, d, 1, &low, &high);
        int first[3] = {0, 0, 0}, end[3] = {0, 0, 0}, before[3] = {0, 0, 0}, after[3] = {0, 0, 0};
        end[d] = last;
        before[d] = -1;
        after[d] = last + 1;
        MPI_Sendrecv(&u[at(first[0], first[1], first[2])], 1, face, low, 0, &u[at(after[0], after[1], after[2])], 1, face, high, 0, cart,
                     MPI_STATUS_IGNORE);
        MPI_Sendrecv(&u[at(end[0], end[1], end[2])], 1, face, high, 1, &u[at(before[0], before[1], before[2])], 1, face, low, 1, cart,
                     MPI_STATUS_IGNORE);
        MPI_Type_free(&face);
    }
}

static void check(int status)
{
    if (status >= 0) return;
    fprintf(stderr, "%s\n", mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv)
{
    int steps = argc > 1 ? atoi(argv[1]) : 100, coupled = argc < 3 || strcmp(argv[2], "alone") != 0;
    int size, rank, grid[3] = {0, 0, 0}, walls[3] = {0, 0, 0}, coords[3], start[3];
    mps_handle job, domain, u_field, q_field, link;
    MPI_Comm comm = MPI_COMM_WORLD;

    MPI_Init(&argc, &argv);
    if (coupled) {
        check(mps_join("heat", 0, &job));
        check(mps_comm(job, &comm));
    }
    MPI_Comm_size(comm, &size);
    MPI_Dims_create(size, 3, grid);
    MPI_Cart_create(comm, 3, grid, walls, 0, &cart);
    MPI_Comm_rank(cart, &rank);
    MPI_Cart_coords(cart, rank, 3, coords);
    for (int d = 0; d < 3; d++) {
        own[d] = N / grid[d] + (coords[d] < N % grid[d]);
        start[d] = coords[d] * (N / grid[d]) + (coords[d] < N % grid[d] ? coords[d] : N % grid[d]);
    }
    row = own[2] + 2;
    slab = row * (own[1] + 2);
    size_t cells = (size_t)(slab * (own[0] + 2));
    double *u = calloc(cells, sizeof *u), *next = calloc(cells, sizeof *u), *q = calloc(cells, sizeof *u);
    for (int i = 0; i < own[0]; i++)
        for (int j = 0; j < own[1]; j++)
            for (int k = 0; k < own[2]; k++) u[at(i, j, k)] = (start[0] + i) * (start[1] + j) % 7 + start[2] + k;

    if (coupled) {
        int64_t shape[3] = {N, N, N}, extents[3] = {own[0] + 2, own[1] + 2, own[2] + 2}, ghosts[3] = {1, 1, 1};
        check(mps_adopt(cart, 3, shape, NULL, NULL, NULL, &domain));
        check(mps_field(domain, "u", MPS_FLOAT64, u, 3, NULL, extents, ghosts, NULL, &u_field));
        check(mps_field(domain, "q", MPS_FLOAT64, q, 3, NULL, extents, ghosts, NULL, &q_field));
        check(mps_connect(job, "model", 1, &u_field, 1, &q_field, MPS_BLOCK, 2, 60, &link));
    }
    for (int step = 0; step < steps; step++) {
        if (coupled) {
            check(mps_put(link));
            check(mps_get(link, NULL));
        }
        exchange(u);
        for (int i = 0; i < own[0]; i++)
            for (int j = 0; j < own[1]; j++)
                for (int k = 0; k < own[2]; k++) {
                    long long c = at(i, j, k);
                    double around = u[c - slab] + u[c + slab] + u[c - row] + u[c + row] + u[c - 1] + u[c + 1];
                    next[c] = u[c] + 0.1 * (around - 6 * u[c] + q[c]);
                }
        double *old = u;
        u = next;
        next = old;
        if (coupled) check(mps_rebind(u_field, u));
    }
    /* bits, not a sum: the same on every decomposition or not right */
    unsigned long long mine = 0, all;
    double sum = 0, total;
    for (int i = 0; i < own[0]; i++)
        for (int j = 0; j < own[1]; j++)
            for (int k = 0; k < own[2]; k++) {
                unsigned long long bits, place = ((unsigned long long)(start[0] + i) * N + (unsigned)(start[1] + j)) * N + (unsigned)(start[2] + k);
                memcpy(&bits, &u[at(i, j, k)], sizeof bits);
                mine ^= bits * (2 * place + 1);
                sum += u[at(i, j, k)];
            }
    MPI_Reduce(&mine, &all, 1, MPI_UNSIGNED_LONG_LONG, MPI_BXOR, 0, cart);
    MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, cart);
    if (rank == 0) printf("after %d steps: sum %.15g, mark %016llx\n", steps, total, all);
    if (coupled) {
        check(mps_release(&link));
        mps_release(&u_field);
        mps_release(&q_field);
        mps_release(&domain);
        mps_release(&job);
    }
    free(u);
    free(next);
    free(q);
    MPI_Comm_free(&cart);
    MPI_Finalize();
    return 0;
}
