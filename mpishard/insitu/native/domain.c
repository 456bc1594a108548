/* What the host owns: its domain, spread over its communicator, and its arrays. */
#include "native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct { const char *name; int64_t size; } dtypes[] = {
    {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"uint16", 2}, {"uint32", 4},
    {"uint64", 8}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}, {"complex64", 8}, {"complex128", 16},
};

int64_t dtype_size(int dtype) { return dtype >= 0 && dtype <= MPS_COMPLEX128 ? dtypes[dtype].size : 0; }
const char *dtype_name(int dtype) { return dtypes[dtype].name; }

static int topology(sim_t *sim, MPI_Comm comm, const int *grid, const int *periodic)
{
    int kind = MPI_UNDEFINED, dims = 0;
    int64_t ranks = 1;
    MPI_Topo_test(comm, &kind);
    if (kind == MPI_CART) MPI_Cartdim_get(comm, &dims);
    /* one of another number of dims tells nothing of the domain's */
    if (kind == MPI_CART && dims == sim->ndim) {
        MPI_Cart_get(comm, dims, sim->grid, sim->periodic, sim->coords);
        for (int d = 0; grid != NULL && d < dims; d++)
            if (grid[d] != sim->grid[d])
                return fail(MPS_ERR_ARGUMENT, "adopt: grid contradicts the communicator's topology\n  expected: grid[%d] of %d\n"
                            "  got:      %d\n  fix:      leave grid out, or pass a communicator without a topology", d + sim->from, sim->grid[d],
                            grid[d]);
    } else if (grid == NULL)
        return fail(MPS_ERR_ARGUMENT, "adopt: no grid of ranks\n  expected: a Cartesian communicator of %d dims, or grid\n"
                    "  got:      %s of %d dims", sim->ndim, kind == MPI_CART ? "one" : "a plain communicator", dims);
    else {
        int rest = sim->rank;
        for (int d = sim->ndim - 1; d >= 0; d--) {
            sim->grid[d] = grid[d];
            if (grid[d] < 1) return fail(MPS_ERR_ARGUMENT, "adopt: grid[%d] is %d\n  expected: 1 or more", d + sim->from, grid[d]);
            sim->coords[d] = rest % grid[d];
            rest /= grid[d];
        }
    }
    for (int d = 0; d < sim->ndim; d++) {
        if (ranks <= sim->size) ranks *= sim->grid[d];
        if (periodic != NULL) sim->periodic[d] = periodic[d] != 0;
    }
    if (ranks == sim->size) return MPS_OK;
    return fail(MPS_ERR_ARGUMENT, "adopt: the grid does not fit the communicator\n  expected: %d ranks\n  got:      a grid of %lld",
                sim->size, (long long)ranks);
}

/* The borders of the blocks along every dim, of what each rank says that it owns; nothing here grows but with the grid. */
static int borders(sim_t *sim, const int64_t *sizes)
{
    int64_t *both[MAX_DIMS] = {NULL};
    int status = MPS_OK;
    for (int d = 0; d < sim->ndim; d++) {
        sim->borders[d] = calloc((size_t)sim->grid[d] + 1, sizeof(int64_t));
        both[d] = malloc(((size_t)sim->grid[d] + 1) * sizeof(int64_t));
        if (sim->borders[d] == NULL || both[d] == NULL) status = fail(MPS_ERR_MEMORY, "adopt: no memory");
    }
    /* the reductions below wait for all ranks, and for ever */
    status = circle_agree(&sim->circle, status, own_limit());
    for (int d = 0; d < sim->ndim && !status; d++) {
        int n = sim->grid[d];
        int64_t *most = sim->borders[d], *least = both[d];
        for (int i = 0; i < n; i++) least[i] = -INT64_MAX;
        int64_t mine = sizes ? sizes[d] : sim->shape[d] / n + (sim->coords[d] < sim->shape[d] % n);
        most[sim->coords[d]] = mine;
        least[sim->coords[d]] = -mine;
        MPI_Allreduce(MPI_IN_PLACE, most, n, MPI_INT64_T, MPI_MAX, sim->circle.comm);
        MPI_Allreduce(MPI_IN_PLACE, least, n, MPI_INT64_T, MPI_MAX, sim->circle.comm);
        int64_t sum = 0;
        for (int i = 0; i < n; i++) {
            int64_t size = most[i];
            if (least[i] > 0)
                status = fail(MPS_ERR_ARGUMENT, "adopt: a rank at position %d of dim %d owns %lld cells\n  expected: 0 or more", i, d + sim->from,
                              (long long)-least[i]);
            else if (size != -least[i])
                status = fail(MPS_ERR_ARGUMENT, "adopt: the ranks at position %d of dim %d own different numbers of cells\n"
                              "  expected: one number\n  got:      %lld to %lld", i, d + sim->from, (long long)-least[i], (long long)size);
            most[i] = sum;
            sum = size > INT64_MAX - sum ? INT64_MAX : sum + size;
        }
        most[n] = sum;
        if (!status && sum != sim->shape[d])
            status = fail(MPS_ERR_ARGUMENT, "adopt: owned boxes %s along dim %d at the box [%lld:%lld)\n  expected: boxes that end at %lld",
                          sum < sim->shape[d] ? "leave a gap" : "overlap, or reach past the domain,", d + sim->from, (long long)most[n - 1],
                          (long long)sum, (long long)sim->shape[d]);
    }
    for (int d = 0; d < sim->ndim; d++) free(both[d]);
    return status;
}

int sim_made(int known, int from, MPI_Comm comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes,
             const int *periodic, mps_handle *handle)
{
    int status = mpi_ready(), inter = 0;
    if (status) return status;
    if (handle != NULL) *handle = MPS_NULL;
    if (comm == MPI_COMM_NULL) return fail(MPS_ERR_ARGUMENT, "adopt: no communicator");
    MPI_Comm_test_inter(comm, &inter);
    if (inter) return fail(MPS_ERR_ARGUMENT, "adopt: not an intra-communicator");
    static circle_t spare; /* the others must hear of it */
    sim_t *sim = calloc(1, sizeof *sim);
    circle_t *circle = sim != NULL ? &sim->circle : &spare;
    if ((status = circle_init(circle, comm, "the domain"))) {
        if (!circle->broken) free(sim);
        return status;
    }
    if (sim == NULL) {
        status = circle_agree(circle, fail(MPS_ERR_MEMORY, "adopt: no memory"), own_limit());
        circle_free(circle);
        return status;
    }
    sim->users = 1;
    sim->rank = sim->circle.rank;
    sim->size = sim->circle.size;
    sim->ndim = ndim;
    sim->from = from;
    status = handle != NULL ? known : fail(MPS_ERR_ARGUMENT, "adopt: no place for the domain");
    if (!status && (ndim < 1 || ndim > 8)) status = fail(MPS_ERR_ARGUMENT, "adopt: ndim is %d\n  expected: 1 to 8", ndim);
    if (!status && shape == NULL) status = fail(MPS_ERR_ARGUMENT, "adopt: no shape");
    for (int d = 0; !status && d < ndim; d++) {
        sim->shape[d] = shape[d];
        if (shape[d] < 0) status = fail(MPS_ERR_ARGUMENT, "adopt: shape[%d] is %lld\n  expected: 0 or more", d + from, (long long)shape[d]);
    }
    if (!status) status = topology(sim, comm, grid, periodic);
    if (!status) status = limit_fits("adopt");
    if (!status) status = object_room("adopt");
    uint64_t sum = digest(digest(0, &ndim, sizeof ndim), sim->shape, sizeof sim->shape);
    sum = digest(digest(sum, sim->grid, sizeof sim->grid), sim->periodic, sizeof sim->periodic);
    status = circle_same(&sim->circle, status, own_limit(), sum, "adopt");
    if (!status) status = circle_agree(&sim->circle, borders(sim, sizes), own_limit());
    if (!status) *handle = object_made(OBJECT_SIM, sim);
    else {
        circle_free(&sim->circle);
        sim_left(sim);
    }
    return status;
}

int mps_adopt(MPI_Comm comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
              mps_handle *sim)
{
    return sim_made(MPS_OK, 0, comm, ndim, shape, grid, sizes, periodic, sim);
}

void sim_left(sim_t *sim)
{
    if (--sim->users || sim->circle.broken) return;
    for (int d = 0; d < MAX_DIMS; d++) free(sim->borders[d]);
    free(sim);
}

/* whether no memory is as large: all that follows computes with these numbers */
static int too_large(const field_t *field)
{
    int64_t room = dtype_size(field->dtype);
    for (int d = 0; d < field->layout.ndim; d++)
        if (field->extents[d] == 0) return 0;
    for (int d = 0; d < field->layout.ndim; d++) {
        int64_t steps = field->extents[d] - 1, stride = field->strides[d];
        if (steps == 0) continue;
        if (stride < -PTRDIFF_MAX || llabs(stride) > (PTRDIFF_MAX - room) / steps) return 1;
        room += llabs(stride) * steps;
    }
    return 0;
}

/* cells of other indices in the same memory, or strides in cells instead of bytes */
static int strides_fit(const field_t *field)
{
    int64_t item = dtype_size(field->dtype), room = item;
    int used[MAX_DIMS] = {0}, ndim = field->layout.ndim;
    for (int d = 0; d < ndim; d++)
        if (field->extents[d] == 0) return 1;
    for (int k = 0; k < ndim; k++) {
        int least = -1;
        for (int d = 0; d < ndim; d++)
            if (!used[d] && field->extents[d] > 1 && (least < 0 || llabs(field->strides[d]) < llabs(field->strides[least]))) least = d;
        if (least < 0) break;
        used[least] = 1;
        if (llabs(field->strides[least]) < room) return 0;
        room += llabs(field->strides[least]) * (field->extents[least] - 1);
    }
    return 1;
}

static int described(sim_t *sim, field_t *field, int ndim, const int *dims, const int64_t *extents, const int64_t *lo,
                     const int64_t *strides, const int *faces)
{
    layout_t *layout = &field->layout;
    layout->ndim = ndim;
    layout->mesh_ndim = sim->ndim;
    if (ndim < sim->ndim || ndim > MAX_DIMS)
        return fail(MPS_ERR_ARGUMENT, "field '%s': ndim is %d\n  expected: %d to %d", field->name, ndim, sim->ndim, MAX_DIMS);
    if (extents == NULL) return fail(MPS_ERR_ARGUMENT, "field '%s': no extents", field->name);
    for (int m = 0; m < sim->ndim; m++) {
        layout->mesh[m] = sim->grid[m];
        layout->shards[m] = -1;
    }
    int64_t stride = dtype_size(field->dtype);
    for (int d = ndim - 1; d >= 0; d--) {
        int m = dims ? dims[d] : d;
        int64_t owned = 0;
        field->extents[d] = extents[d];
        field->lo[d] = lo ? lo[d] : 0;
        field->strides[d] = strides ? strides[d] : stride;
        if (m >= sim->ndim || m < -1 || (m >= 0 && layout->shards[m] >= 0))
            return fail(MPS_ERR_ARGUMENT, "field '%s': dims[%d] is %d\n  expected: every dim of the domain once, else %d", field->name,
                        d + sim->from, m + sim->from, sim->from - 1);
        if (m >= 0) {
            layout->shards[m] = d;
            layout->shape[d] = sim->shape[m];
            layout->blocks[d] = sim->grid[m];
            layout->borders[d] = malloc(((size_t)sim->grid[m] + 1) * sizeof(int64_t));
            if (layout->borders[d] == NULL) return fail(MPS_ERR_MEMORY, "field: no memory");
            memcpy(layout->borders[d], sim->borders[m], ((size_t)sim->grid[m] + 1) * sizeof(int64_t));
            if (faces != NULL && faces[d]) {
                field->faces |= 1 << m;
                /* the last face of all is nobody's first */
                if (!sim->periodic[m]) layout->shape[d] = ++layout->borders[d][sim->grid[m]];
            }
            owned = layout->borders[d][sim->coords[m] + 1] - layout->borders[d][sim->coords[m]];
        } else if (faces != NULL && faces[d])
            return fail(MPS_ERR_ARGUMENT, "field '%s': faces[%d] is %d\n  expected: 0 of an array dim that is none of the domain", field->name,
                        d + sim->from, faces[d]);
        if (field->lo[d] < 0)
            return fail(MPS_ERR_ARGUMENT, "field '%s': lo[%d] is %lld\n  expected: 0 or more ghost cells", field->name, d + sim->from,
                        (long long)field->lo[d]);
        if (extents[d] < field->lo[d] || extents[d] - field->lo[d] < owned)
            return fail(MPS_ERR_ARGUMENT, "field '%s': array dim %d is too short\n  expected: %lld ghost and %lld owned cells\n"
                        "  got:      an extent of %lld%s", field->name, d + sim->from, (long long)field->lo[d], (long long)owned, (long long)extents[d],
                        extents[d] == 0 && field->data == NULL ? ", as of an array that is not allocated" : "");
        if (m < 0) layout->shape[d] = extents[d] - field->lo[d];
        stride = extents[d] > 0 && stride > PTRDIFF_MAX / extents[d] ? PTRDIFF_MAX : stride * extents[d];
    }
    for (int m = 0; m < sim->ndim; m++)
        if (layout->shards[m] < 0)
            return fail(MPS_ERR_ARGUMENT, "field '%s': no array dim is dim %d of the domain", field->name, m + sim->from);
    if (too_large(field))
        return fail(MPS_ERR_ARGUMENT, "field '%s': its extents and strides reach further than memory does\n  expected: extents in cells, "
                    "strides in bytes", field->name);
    if (!strides_fit(field))
        return fail(MPS_ERR_ARGUMENT, "field '%s': its strides let cells share memory\n  expected: strides in bytes, of cells of %lld bytes",
                    field->name, (long long)dtype_size(field->dtype));
    return MPS_OK;
}

static int named(sim_t *sim, field_t *field, const char *name)
{
    if (!name_fits(name)) return fail(MPS_ERR_ARGUMENT, "field: no name\n  expected: a text of 1 to %d bytes", NAME_BYTES - 1);
    snprintf(field->name, sizeof field->name, "%s", name);
    for (field_t *other = sim->fields; other != NULL; other = other->next)
        if (strcmp(other->name, name) == 0)
            return fail(MPS_ERR_ARGUMENT, "field '%s': a name used twice\n  expected: a new name\n  fix:      mps_rebind swaps arrays", name);
    return MPS_OK;
}

int field_made(int known, mps_handle handle, const char *name, int dtype, void *data, int ndim, const int *dims,
               const int64_t *extents, const int64_t *lo, const int64_t *strides, const int *faces, mps_handle *out)
{
    sim_t *sim = object_of(handle, OBJECT_SIM);
    if (out != NULL) *out = MPS_NULL;
    if (sim == NULL) return fail(MPS_ERR_ORDER, "field: expected a domain, from mps_adopt, that was not released");
    field_t *field = calloc(1, sizeof *field);
    if (field == NULL) return circle_agree(&sim->circle, fail(MPS_ERR_MEMORY, "field: no memory"), own_limit());
    field->users = 1;
    field->dtype = dtype;
    field->data = data;
    field->sim = sim;
    sim->users++;
    int status = out != NULL ? known : fail(MPS_ERR_ARGUMENT, "field: no place for the field");
    if (!status) status = named(sim, field, name);
    if (!status && dtype_size(dtype) == 0) status = fail(MPS_ERR_ARGUMENT, "field '%s': dtype %d is none of MPS_BOOL...", field->name, dtype);
    if (!status) status = described(sim, field, ndim, dims, extents, lo, strides, faces);
    if (!status) status = field_usable(field, "field");
    if (!status) status = object_room("field");
    layout_t *layout = &field->layout;
    uint64_t sum = digest(digest(0, field->name, NAME_BYTES), &dtype, sizeof dtype);
    sum = digest(digest(sum, layout->shape, sizeof layout->shape), layout->shards, sizeof layout->shards);
    sum = digest(sum, &field->faces, sizeof field->faces);
    status = circle_same(&sim->circle, status, own_limit(), sum, "field");
    if (status) {
        field_left(field);
        return status;
    }
    *out = object_made(OBJECT_FIELD, field);
    field->next = sim->fields;
    sim->fields = field;
    return MPS_OK;
}

int mps_field(mps_handle sim, const char *name, int dtype, void *data, int ndim, const int *dims, const int64_t *extents,
              const int64_t *lo, const int64_t *strides, mps_handle *field)
{
    return field_made(MPS_OK, sim, name, dtype, data, ndim, dims, extents, lo, strides, NULL, field);
}

int mps_field_staggered(mps_handle sim, const char *name, int dtype, void *data, int ndim, const int *dims,
                        const int64_t *extents, const int64_t *lo, const int64_t *strides, const int *faces, mps_handle *field)
{
    return field_made(MPS_OK, sim, name, dtype, data, ndim, dims, extents, lo, strides, faces, field);
}

void field_left(field_t *field)
{
    if (--field->users) return;
    layout_free(&field->layout);
    sim_left(field->sim);
    free(field);
}

int field_usable(const field_t *field, const char *call)
{
    if (field->released || field->sim->released)
        return fail(MPS_ERR_ORDER, "%s: field '%s' was released\n  expected: use before mps_release of it and of its domain", call, field->name);
    if (layout_idle(&field->layout, field->sim->rank)) return MPS_OK;
    if (field->data == NULL)
        return fail(MPS_ERR_ARGUMENT, "%s: field '%s': data is a null pointer, and this rank owns cells", call, field->name);
    int whole = (int)dtype_size(field->dtype), part = field->dtype >= MPS_COMPLEX64 ? whole / 2 : whole;
    if ((uintptr_t)field->data % (uintptr_t)part == 0) return MPS_OK;
    return fail(MPS_ERR_ARGUMENT, "%s: field '%s': data is no address of such numbers\n  expected: a multiple of %d\n  got:      %p", call,
                field->name, part, (void *)field->data);
}

int mps_rebind(mps_handle handle, void *data)
{
    field_t *field = object_of(handle, OBJECT_FIELD);
    if (field == NULL) return fail(MPS_ERR_ORDER, "rebind: expected a field, from mps_field, that was not released");
    int status;
    char *before = field->data;
    if (field->sim->released) return field_usable(field, "rebind");
    field->data = data;
    status = field_usable(field, "rebind");
    status = circle_same(&field->sim->circle, status, own_limit(), digest(0, field->name, NAME_BYTES), "rebind");
    if (status) field->data = before;
    else field->binding++;
    return status;
}

int (*python_release)(int kind, void *object) = NULL;

int mps_release(mps_handle *handle)
{
    if (handle == NULL || *handle == MPS_NULL) return MPS_OK;
    int over = 0, status = MPS_OK, kind = object_kind(*handle);
    void *object = object_of(*handle, kind);
    if (object == NULL) return fail(MPS_ERR_ORDER, "release: not a handle of mpishard, or one that was released");
    MPI_Finalized(&over);
    if (!over && (status = mpi_ready())) return status;
    if (python_release != NULL && !over) status = python_release(kind, object);
    if (kind == OBJECT_SIM) {
        sim_t *sim = object;
        sim->released = 1;
        if (!over) circle_free(&sim->circle);
        sim_left(sim);
    } else if (kind == OBJECT_FIELD) {
        field_t *field = object, **at = &field->sim->fields;
        while (*at != NULL && *at != field) at = &(*at)->next;
        if (*at == field) *at = field->next;
        field->released = 1;
        field_left(field);
    } else if (kind == OBJECT_PROGRAM)
        program_left(object);
    else if (kind == OBJECT_LINK) {
        if (!over) status = mps_close(*handle);
        link_free(object);
    }
    object_dropped(*handle);
    *handle = MPS_NULL;
    return status;
}
