/* A staggered grid of a host in C: faces along a dim with walls and along a periodic one, ranks without cells, and a link. */
#include <mpishard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NX = 7, NY = 6, GHOSTS = 2 };

static int rank, size;
static int64_t first[2], own[2];

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: %s; mps_error: %s\n", rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int told(int status, int expected, const char *text) { return status == expected && strstr(mps_error(), text) != NULL; }

typedef struct { int64_t extents[2]; int faces[2]; double *cells; } array_t;

/* with ghost cells on both sides, and a point more along x, y or both */
static array_t array(int along_x, int along_y)
{
    array_t a = {{own[0] + 2 * GHOSTS + along_x, own[1] + 2 * GHOSTS + along_y}, {along_x, along_y}, NULL};
    a.cells = malloc((size_t)(a.extents[0] * a.extents[1]) * sizeof(double));
    for (int64_t i = 0; i < a.extents[0] * a.extents[1]; i++) a.cells[i] = -1000;
    return a;
}

static double *at(array_t *a, int64_t i, int64_t j) { return &a->cells[(i - first[0] + GHOSTS) * a->extents[1] + j - first[1] + GHOSTS]; }

static double value(int64_t i, int64_t j) { return (double)(i * i + 3 * i * (j * j)); }

int main(int argc, char **argv)
{
    int grid[2] = {0, 0}, periods[2] = {0, 1}, coords[2], last;
    const int64_t lo[2] = {GHOSTS, GHOSTS}, shape[2] = {NX, NY};
    const char *folder = argc > 1 ? argv[1] : ".";
    char model[4096];
    MPI_Comm comm, cart;
    mps_handle me, sim, h, u, v, node, hook, link;
    MPI_Init(&argc, &argv);
    must(mps_join("solver", 0, &me) == MPS_OK && mps_comm(me, &comm) == MPS_OK, "join");
    MPI_Comm_size(comm, &size);
    MPI_Dims_create(size, 2, grid);
    MPI_Cart_create(comm, 2, grid, periods, 0, &cart);
    MPI_Comm_rank(cart, &rank);
    MPI_Cart_coords(cart, rank, 2, coords);
    last = coords[0] == grid[0] - 1;
    /* along x the last ranks own no cell, if there are others, and the wall alone */
    int before = grid[0] > 1 ? grid[0] - 1 : 1;
    first[0] = coords[0] < before ? NX * coords[0] / before : NX;
    own[0] = coords[0] < before ? NX * (coords[0] + 1) / before - first[0] : 0;
    first[1] = NY * coords[1] / grid[1];
    own[1] = NY * (coords[1] + 1) / grid[1] - first[1];
    must(mps_adopt(cart, 2, shape, NULL, own, NULL, &sim) == MPS_OK, "adopt");

    array_t cells = array(0, 0), walls = array(1, 0), around = array(0, 1), corners = array(1, 1);
    array_t *all[] = {&cells, &walls, &around, &corners};
    mps_handle *fields[] = {&h, &u, &v, &node};
    static const char *const names[] = {"h", "u", "v", "node"};
    for (int k = 0; k < 4; k++) {
        must(mps_field_staggered(sim, names[k], MPS_FLOAT64, all[k]->cells, 2, NULL, all[k]->extents, lo, NULL, all[k]->faces, fields[k]) == MPS_OK, names[k]);
        for (int64_t i = first[0]; i < first[0] + own[0] + (last && all[k]->faces[0]); i++)
            for (int64_t j = first[1]; j < first[1] + own[1]; j++) *at(all[k], i, j) = value(i, j);
    }
    /* what is wrong on one rank is told to all */
    mps_handle none;
    int faces[3] = {1, 0, 1}, levels[3] = {0, 1, -1};
    int64_t deep[3] = {own[0] + 1, own[1], 2}, short_of[2] = {own[0], own[1]};
    must(told(mps_field_staggered(sim, "deep", MPS_FLOAT64, walls.cells, 3, levels, deep, NULL, NULL, faces, &none), MPS_ERR_ARGUMENT, "faces[2] is 1"), "levels have no faces");
    must(told(mps_field_staggered(sim, "short", MPS_FLOAT64, walls.cells, 2, NULL, short_of, NULL, NULL, faces, &none), MPS_ERR_ARGUMENT, "too short"), "no room for the last");
    if (size > 1) {
        faces[1] = rank == 0;
        must(told(mps_field_staggered(sim, "other", MPS_FLOAT64, corners.cells, 2, NULL, corners.extents, lo, NULL, faces, &none), MPS_ERR_ORDER, "different arguments"), "other faces on one rank");
    }

    /* side by side: the other program sees the walls */
    must(mps_connect(me, "model", 4, (mps_handle[]){h, u, v, node}, 0, NULL, MPS_BLOCK, 2, 30, &link) == MPS_OK, "connect");
    must(mps_put(link) == MPS_OK && mps_release(&link) == MPS_OK, "put");

    snprintf(model, sizeof model, "%s/closure_of_host.py:staggered", folder);
    must(mps_hook(sim, model, 4, (mps_handle[]){h, u, v, node}, 4, (mps_handle[]){h, u, v, node}, 1, MPS_INFER, &hook) == MPS_OK, "hook");
    must(mps_step(hook) == MPS_OK, "step");
    for (int64_t i = first[0]; i < first[0] + own[0] + last; i++)
        for (int64_t j = first[1]; j < first[1] + own[1]; j++) {
            double sum = 0, low = i > 0 ? value(i - 1, j) : 0, high = i < NX ? value(i, j) : 0;
            for (int64_t x = i - 1; x <= i + 1; x++)
                for (int64_t y = j - 1; y <= j + 1; y++)
                    if (x >= 0 && x <= NX && y >= 0 && y < NY) sum += value(x, y);
            must(*at(&walls, i, j) == high - low, "gradient, on faces with walls");
            must(*at(&corners, i, j) == sum, "sums of neighbours, at nodes");
            if (i == NX) continue;
            must(*at(&cells, i, j) == value(i + 1, j) - value(i, j), "divergence, in cells");
            must(*at(&around, i, j) == value(i, (j + 1) % NY), "faces of a periodic dim");
        }
    must(mps_release(&hook) == MPS_OK && mps_release(&sim) == MPS_OK, "release");
    for (int k = 0; k < 4; k++) must(mps_release(fields[k]) == MPS_OK, "release"), free(all[k]->cells);
    must(mps_release(&me) == MPS_OK, "release");
    if (rank == 0) printf("STAGGERED C IS RIGHT\n");
    MPI_Finalize();
    return 0;
}
