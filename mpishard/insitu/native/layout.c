/* Which boxes travel between a rank of one program and the ranks of another; the twin of mpishard/layout/coupling.py. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

static void coords_of(const int64_t *shape, int n, int64_t rank, int64_t *coords)
{
    for (int i = n - 1; i >= 0; i--) {
        coords[i] = rank % shape[i];
        rank /= shape[i];
    }
}

static int64_t rank_of(const layout_t *layout, const int64_t *coords)
{
    int64_t rank = 0;
    for (int m = 0; m < layout->mesh_ndim; m++) rank = rank * layout->mesh[m] + coords[m];
    return rank;
}

box_t layout_box(const layout_t *layout, int64_t rank)
{
    int64_t coords[MAX_DIMS];
    box_t box;
    coords_of(layout->mesh, layout->mesh_ndim, rank, coords);
    for (int d = 0; d < layout->ndim; d++) {
        box.lo[d] = 0;
        box.hi[d] = layout->shape[d];
        if (layout->borders[d] == NULL) continue;
        int64_t block = 0;
        for (int m = 0; m < layout->mesh_ndim; m++)
            if (layout->shards[m] == d) block = block * layout->mesh[m] + coords[m];
        box.lo[d] = layout->borders[d][block];
        box.hi[d] = layout->borders[d][block + 1];
    }
    return box;
}

int64_t box_cells(const box_t *box, int ndim)
{
    int64_t cells = 1;
    for (int d = 0; d < ndim; d++) cells *= box->hi[d] > box->lo[d] ? box->hi[d] - box->lo[d] : 0;
    return cells;
}

int layout_idle(const layout_t *layout, int64_t rank)
{
    box_t box = layout_box(layout, rank);
    return box_cells(&box, layout->ndim) == 0;
}

static int add(shares_t *shares, int64_t peer, const box_t *box, const box_t *origin, int ndim)
{
    if (shares->count == shares->room) {
        int room = shares->room ? 2 * shares->room : 8;
        share_t *more = realloc(shares->of, (size_t)room * sizeof *more);
        if (more == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory");
        shares->of = more;
        shares->room = room;
    }
    share_t *share = &shares->of[shares->count++];
    share->peer = (int)peer;
    for (int d = 0; d < ndim; d++) {
        share->box.lo[d] = box->lo[d] - origin->lo[d];
        share->box.hi[d] = box->hi[d] - origin->lo[d];
    }
    return MPS_OK;
}

static int64_t replicas_of(const layout_t *layout)
{
    int64_t count = 1;
    for (int m = 0; m < layout->mesh_ndim; m++)
        if (layout->shards[m] < 0) count *= layout->mesh[m];
    return count;
}

static void set_replica(const layout_t *layout, int64_t replica, int64_t *coords)
{
    for (int m = layout->mesh_ndim - 1; m >= 0; m--)
        if (layout->shards[m] < 0) {
            coords[m] = replica % layout->mesh[m];
            replica /= layout->mesh[m];
        }
}

static int64_t replica_of(const layout_t *layout, const int64_t *coords)
{
    int64_t replica = 0;
    for (int m = 0; m < layout->mesh_ndim; m++)
        if (layout->shards[m] < 0) replica = replica * layout->mesh[m] + coords[m];
    return replica;
}

static void set_block(const layout_t *layout, int d, int64_t block, int64_t *coords)
{
    for (int m = layout->mesh_ndim - 1; m >= 0; m--)
        if (layout->shards[m] == d) {
            coords[m] = block % layout->mesh[m];
            block /= layout->mesh[m];
        }
}

/* the last border that is at most a cell: bisection */
static int64_t block_at(const int64_t *borders, int blocks, int64_t cell)
{
    int64_t low = 0, high = blocks + 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (borders[middle] <= cell) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static int by_peer(const void *a, const void *b) { return ((const share_t *)a)->peer - ((const share_t *)b)->peer; }

/* Every block of a layout that meets a box, with replica `only`, or with those which modulo `replicas` it serves. */
static int meeting(const layout_t *layout, const box_t *mine, int64_t only, int64_t replicas, int64_t own, shares_t *shares)
{
    int64_t at[MAX_DIMS], first[MAX_DIMS], last[MAX_DIMS], coords[MAX_DIMS] = {0};
    if (box_cells(mine, layout->ndim) == 0) return MPS_OK;
    for (int d = 0; d < layout->ndim; d++) {
        first[d] = last[d] = -1;
        if (layout->borders[d] != NULL) {
            first[d] = block_at(layout->borders[d], layout->blocks[d], mine->lo[d]);
            last[d] = block_at(layout->borders[d], layout->blocks[d], mine->hi[d] - 1);
        }
        at[d] = first[d];
    }
    for (;;) {
        box_t box = *mine;
        for (int d = 0; d < layout->ndim; d++) {
            if (layout->borders[d] == NULL) continue;
            int64_t lo = layout->borders[d][at[d]], hi = layout->borders[d][at[d] + 1];
            if (lo > box.lo[d]) box.lo[d] = lo;
            if (hi < box.hi[d]) box.hi[d] = hi;
            set_block(layout, d, at[d], coords);
        }
        if (box_cells(&box, layout->ndim)) {
            int64_t from = only >= 0 ? only : 0, to = only >= 0 ? only + 1 : replicas_of(layout);
            for (int64_t replica = from; replica < to; replica++) {
                set_replica(layout, replica, coords);
                int64_t peer = rank_of(layout, coords);
                if (only < 0 && peer % replicas != own) continue;
                int status = add(shares, peer, &box, mine, layout->ndim);
                if (status) return status;
            }
        }
        int d = layout->ndim - 1;
        while (d >= 0 && at[d] == last[d]) at[d] = first[d], d--;
        if (d < 0) break;
        at[d]++;
    }
    qsort(shares->of, (size_t)shares->count, sizeof *shares->of, by_peer);
    return MPS_OK;
}

int plan_sources(const layout_t *writer, const layout_t *reader, int64_t rank, shares_t *shares)
{
    box_t mine = layout_box(reader, rank);
    return meeting(writer, &mine, rank % replicas_of(writer), 0, 0, shares);
}

int plan_targets(const layout_t *writer, const layout_t *reader, int64_t rank, shares_t *shares)
{
    int64_t coords[MAX_DIMS];
    box_t mine = layout_box(writer, rank);
    coords_of(writer->mesh, writer->mesh_ndim, rank, coords);
    return meeting(reader, &mine, -1, replicas_of(writer), replica_of(writer, coords), shares);
}

void layout_free(layout_t *layout)
{
    for (int d = 0; d < MAX_DIMS; d++) {
        free(layout->borders[d]);
        layout->borders[d] = NULL;
    }
}

static void row_copy(char *array, int64_t stride, int64_t n, int64_t itemsize, char *dense, int pack)
{
    if (stride == itemsize) {
        if (pack) memcpy(dense, array, (size_t)(n * itemsize));
        else memcpy(array, dense, (size_t)(n * itemsize));
        return;
    }
    /* not by assignment of such a type: the host's cells need not be aligned as its are */
#define ROW(N)                                                    \
    for (int64_t i = 0; i < n; i++) {                             \
        if (pack) memcpy(dense + i * N, array + i * stride, N);   \
        else memcpy(array + i * stride, dense + i * N, N);        \
    }                                                             \
    return;
    switch (itemsize) {
    case 1: ROW(1)
    case 2: ROW(2)
    case 4: ROW(4)
    case 8: ROW(8)
    }
#undef ROW
    for (int64_t i = 0; i < n; i++) {
        if (pack) memcpy(dense + i * itemsize, array + i * stride, (size_t)itemsize);
        else memcpy(array + i * stride, dense + i * itemsize, (size_t)itemsize);
    }
}

void cells_copy(char *array, const int64_t *strides, const box_t *box, int ndim, int64_t itemsize, char *dense, int pack)
{
    int64_t at[MAX_DIMS];
    int64_t n = ndim ? box->hi[ndim - 1] - box->lo[ndim - 1] : 1, stride = ndim ? strides[ndim - 1] : itemsize;
    if (box_cells(box, ndim) == 0) return;
    for (int d = 0; d < ndim; d++) at[d] = box->lo[d];
    for (;;) {
        char *row = array;
        for (int d = 0; d < ndim; d++) row += at[d] * strides[d];
        row_copy(row, stride, n, itemsize, dense, pack);
        dense += n * itemsize;
        int d = ndim - 2;
        while (d >= 0 && ++at[d] == box->hi[d]) at[d] = box->lo[d], d--;
        if (d < 0) return;
    }
}
