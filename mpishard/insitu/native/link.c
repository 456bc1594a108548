/* Links between two programs; the twin of mpishard/insitu/link.py and mpishard/comm/coupling/outlet.py and inlet.py, in the same wire format. */
#include "native.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MPS_PIECE /* bytes of a message; tests have small ones */
#define MPS_PIECE (1 << 30)
#endif
enum { ENDED, FULL, FREE, PIECE = MPS_PIECE };

typedef struct { char name[NAME_BYTES], dtype[16]; layout_t layout; int ranks; int64_t *order; } offer_t;
typedef struct { int policy, depth, count[2]; offer_t *of[2]; } side_t; /* 0: out, 1: into; by ascending name */

typedef struct { int field; box_t box; int64_t at; } part_t;
typedef struct { int peer, count, over, stopped, left, told; part_t *parts; int64_t start, nbytes; presence_t where; } parcel_t;
typedef struct { char *memory; MPI_Request *requests; int count, flying, lost; int64_t step; } slot_t;

/* one direction */
typedef struct {
    int fields, count, policy, depth, slots, ended, unread_count, putting, active;
    field_t **of;
    parcel_t *parcels;
    int64_t nbytes, next, sent, asked, served;
    patience_t looks; /* of puts that never wait, whether the peers live */
    slot_t *slot, **unread;
} flow_t;

struct link_s {
    int closed, failed, tag, serial;
    program_t *program;
    far_t *far;
    double timeout;
    flow_t out, into;
    char text[TEXT_BYTES];
    struct link_s *next;
};

static link_t *open_links = NULL, unmade;

static int64_t aligned(int64_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static void head(int64_t *to, int64_t kind, int64_t value, int64_t nbytes)
{
    int64_t words[8] = {WIRE_MAGIC, WIRE_VERSION, kind, value, nbytes, 0, 0, 0};
    memcpy(to, words, sizeof words);
}

/* A head that is all of a message: always the same, so that it needs no memory of malloc's, and MPI may read it later. */
static void notify(link_t *link, int peer, int tag, int kind)
{
    static int64_t heads[TAG_STOP + 1][8];
    head(heads[kind], kind, 0, HEAD_BYTES);
    send_constant(heads[kind], HEAD_BYTES, peer, link->tag + tag, link->far->both);
}

/* what the two sides tell each other */

static int offered(const field_t *field, int size, offer_t *offer)
{
    memset(offer, 0, sizeof *offer);
    snprintf(offer->name, sizeof offer->name, "%s", field->name);
    snprintf(offer->dtype, sizeof offer->dtype, "%s", dtype_name(field->dtype));
    offer->layout = field->layout; /* borders stay the field's */
    int ranks = field->sim->size;
    if (ranks != size)
        return fail(MPS_ERR_ARGUMENT, "connect: field '%s' lies on other ranks than the program's\n  expected: a domain on its %d ranks\n"
                    "  got:      %d ranks", field->name, size, ranks);
    return MPS_OK;
}

static int64_t *layout_numbers(const offer_t *offer, int64_t *to)
{
    const layout_t *l = &offer->layout;
    for (int d = 0; d < l->ndim; d++) *to++ = l->shape[d];
    for (int m = 0; m < l->mesh_ndim; m++) *to++ = l->mesh[m];
    for (int m = 0; m < l->mesh_ndim; m++) *to++ = l->shards[m];
    for (int d = 0; d < l->ndim; d++) {
        int count = l->borders[d] ? l->blocks[d] + 1 : 0;
        *to++ = count;
        for (int i = 0; i < count; i++) *to++ = l->borders[d][i];
    }
    for (int i = 0; i < offer->ranks; i++) *to++ = offer->order[i];
    return to;
}

static char *side_packed(const side_t *side, int64_t *count)
{
    size_t room = HEAD_BYTES;
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < side->count[s]; i++) {
            const layout_t *l = &side->of[s][i].layout;
            room += 128 + 8 * (size_t)(2 * MAX_DIMS + 2 * MAX_DIMS + side->of[s][i].ranks);
            for (int d = 0; d < l->ndim; d++) room += l->borders[d] ? 8 * (size_t)(l->blocks[d] + 1) : 0;
        }
    char *data = calloc(1, room), *at = data + HEAD_BYTES;
    if (data == NULL) return NULL;
    int64_t words[8] = {WIRE_MAGIC, WIRE_VERSION, KIND_OFFER, side->policy, side->depth, side->count[0], side->count[1], 0};
    memcpy(data, words, sizeof words);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < side->count[s]; i++) {
            const offer_t *o = &side->of[s][i];
            int64_t *numbers = (int64_t *)(at + NAME_BYTES + 16) + 4, *end = layout_numbers(o, numbers);
            int64_t first[4] = {o->layout.ndim, o->layout.mesh_ndim, o->ranks, end - numbers};
            memcpy(at, o->name, NAME_BYTES);
            memcpy(at + NAME_BYTES, o->dtype, 16);
            memcpy(at + NAME_BYTES + 16, first, sizeof first);
            at = (char *)end;
        }
    *count = at - data;
    return data;
}

static int side_unpacked(const char *data, side_t *side)
{
    const int64_t *words = (const int64_t *)data;
    const char *at = data + HEAD_BYTES;
    side->policy = (int)words[3];
    side->depth = (int)words[4];
    for (int s = 0; s < 2; s++) {
        side->count[s] = (int)words[5 + s];
        side->of[s] = calloc((size_t)side->count[s] + 1, sizeof *side->of[s]);
        if (side->of[s] == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory");
        for (int i = 0; i < side->count[s]; i++) {
            offer_t *o = &side->of[s][i];
            layout_t *l = &o->layout;
            memcpy(o->name, at, NAME_BYTES);
            memcpy(o->dtype, at + NAME_BYTES, 16);
            const int64_t *n = (const int64_t *)(at + NAME_BYTES + 16);
            if (n[0] > MAX_DIMS || n[1] > MAX_DIMS)
                return fail(MPS_ERR_MATCH, "connect: field '%s' has %lld dims on a mesh of %lld\n  expected: at most %d", o->name,
                            (long long)n[0], (long long)n[1], MAX_DIMS);
            l->ndim = (int)n[0];
            l->mesh_ndim = (int)n[1];
            o->ranks = (int)n[2];
            at = (const char *)(n + 4 + n[3]);
            n += 4;
            for (int d = 0; d < l->ndim; d++) l->shape[d] = *n++;
            for (int m = 0; m < l->mesh_ndim; m++) l->mesh[m] = *n++;
            for (int m = 0; m < l->mesh_ndim; m++) l->shards[m] = (int)*n++;
            for (int d = 0; d < l->ndim; d++) {
                int64_t count = *n++;
                if (count == 0) continue;
                l->blocks[d] = (int)count - 1;
                l->borders[d] = malloc((size_t)count * sizeof(int64_t));
                if (l->borders[d] == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory");
                memcpy(l->borders[d], n, (size_t)count * sizeof(int64_t));
                n += count;
            }
            o->order = malloc(((size_t)o->ranks + 1) * sizeof(int64_t));
            if (o->order == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory");
            memcpy(o->order, n, (size_t)o->ranks * sizeof(int64_t));
        }
    }
    return MPS_OK;
}

static void side_free(side_t *side, int borrowed)
{
    for (int s = 0; s < 2; s++) {
        for (int i = 0; side->of[s] != NULL && i < side->count[s]; i++) {
            if (!borrowed) layout_free(&side->of[s][i].layout);
            free(side->of[s][i].order);
        }
        free(side->of[s]);
    }
}

static int compare_one(const char *writer, const side_t *one, const char *reader, const side_t *two)
{
    int same = one->count[0] == two->count[1];
    for (int i = 0; same && i < one->count[0]; i++) same = strcmp(one->of[0][i].name, two->of[1][i].name) == 0;
    if (!same) {
        char gives[256] = "", takes[256] = "";
        for (int i = 0; i < one->count[0]; i++) snprintf(gives + strlen(gives), sizeof gives - strlen(gives), " '%s'", one->of[0][i].name);
        for (int i = 0; i < two->count[1]; i++) snprintf(takes + strlen(takes), sizeof takes - strlen(takes), " '%s'", two->of[1][i].name);
        return fail(MPS_ERR_MATCH, "connect: '%s' and '%s' name other fields\n  expected: what '%s' gives out:%s\n  got:      what '%s' "
                    "takes in:%s", writer, reader, writer, gives, reader, takes);
    }
    for (int i = 0; i < one->count[0]; i++) {
        const offer_t *a = &one->of[0][i], *b = &two->of[1][i];
        if (a->layout.ndim != b->layout.ndim || memcmp(a->layout.shape, b->layout.shape, (size_t)a->layout.ndim * sizeof(int64_t))) {
            char text[2][256] = {"", ""};
            for (int d = 0; d < a->layout.ndim; d++) snprintf(text[0] + strlen(text[0]), 256 - strlen(text[0]), " %lld", (long long)a->layout.shape[d]);
            for (int d = 0; d < b->layout.ndim; d++) snprintf(text[1] + strlen(text[1]), 256 - strlen(text[1]), " %lld", (long long)b->layout.shape[d]);
            return fail(MPS_ERR_MATCH, "connect: '%s' and '%s' have field '%s' in other global shapes\n  expected:%s\n  got:     %s", writer,
                        reader, a->name, text[0], text[1]);
        }
        if (a->dtype[0] && b->dtype[0] && strcmp(a->dtype, b->dtype))
            return fail(MPS_ERR_MATCH, "connect: '%s' and '%s' have field '%s' in other dtypes\n  expected: %s\n  got:      %s", writer,
                        reader, a->name, a->dtype, b->dtype);
    }
    return MPS_OK;
}

static int compare(const char *own, const side_t *mine, const char *other, const side_t *theirs)
{
    int status = compare_one(own, mine, other, theirs);
    if (!status) status = compare_one(other, theirs, own, mine);
    if (!status && mine->count[0] + mine->count[1] == 0)
        status = fail(MPS_ERR_MATCH, "connect: '%s' and '%s' name no field", own, other);
    return status;
}

static void withdraw(link_t *link, const char *text)
{
    size_t n = strlen(text) < TEXT_BYTES ? strlen(text) : TEXT_BYTES;
    char *message = malloc(HEAD_BYTES + n);
    if (message == NULL) notify(link, link->far->first, TAG_HELLO, KIND_WITHDRAW);
    else {
        head((int64_t *)message, KIND_WITHDRAW, 0, 0);
        memcpy(message + HEAD_BYTES, text, n);
        send_kept(message, HEAD_BYTES + (int)n, link->far->first, link->tag + TAG_HELLO, link->far->both);
    }
    patience_t wait = patience(1.0);
    while (sends_under_way() && patient(&wait)) continue;
}

/* rank 0: the other side's message of a kind; both sides are ready, or neither has a link */
static int asked(link_t *link, int64_t kind, char **theirs, int64_t *length)
{
    int found, n;
    MPI_Message message;
    MPI_Status status;
    patience_t wait = patience(link->timeout);
    for (;;) {
        MPI_Improbe(link->far->first, link->tag + TAG_HELLO, link->far->both, &found, &message, &status);
        if (!found) {
            if (patient(&wait)) continue;
            withdraw(link, "no answer in time");
            return fail(MPS_ERR_PEER, "connect: program '%s' did not come\n  expected: its connect within %g s\n  got:      %s\n"
                        "  fix:      call connect in both programs, for several links in the same order", link->far->name, link->timeout,
                        kind == KIND_OFFER ? "nothing" : "its offer, and then nothing");
        }
        MPI_Get_count(&status, MPI_BYTE, &n);
        char *data = calloc(1, (size_t)n + 1);
        if (data == NULL) {
            int code = fail(MPS_ERR_MEMORY, "connect: no memory");
            withdraw(link, mps_error());
            return code;
        }
        MPI_Mrecv(data, n, MPI_BYTE, &message, MPI_STATUS_IGNORE);
        const int64_t *words = (const int64_t *)data;
        if (words[0] != WIRE_MAGIC || words[1] != WIRE_VERSION) {
            free(data);
            return fail(MPS_ERR_PEER, "program '%s' speaks another version of this wire format (here: %d)", link->far->name, WIRE_VERSION);
        }
        if (words[2] == KIND_WITHDRAW) {
            char *line = strchr(data + HEAD_BYTES, '\n');
            if (line) *line = 0;
            int code = fail(MPS_ERR_PEER, "connect: program '%s' gave up\n  expected: a link\n  got:      %s", link->far->name, data + HEAD_BYTES);
            free(data);
            return code;
        }
        if (words[2] == kind) {
            *theirs = data;
            *length = n;
            return MPS_OK;
        }
        free(data);
    }
}

/* plans */

static int mesh_rank(const offer_t *offer, int rank)
{
    for (int m = 0; m < offer->ranks; m++)
        if (offer->order[m] == rank) return m;
    return rank;
}

static int gets_nothing(const offer_t *into, int count, int rank)
{
    for (int i = 0; i < count; i++)
        if (!layout_idle(&into[i].layout, mesh_rank(&into[i], rank))) return 0;
    return 1;
}

static parcel_t *parcel_of(flow_t *flow, int peer)
{
    for (int i = 0; i < flow->count; i++)
        if (flow->parcels[i].peer == peer) return &flow->parcels[i];
    parcel_t *more = realloc(flow->parcels, (size_t)(flow->count + 1) * sizeof *more);
    if (more == NULL) return NULL;
    flow->parcels = more;
    memset(&more[flow->count], 0, sizeof *more);
    more[flow->count].peer = peer;
    return &more[flow->count++];
}

static int by_rank(const void *a, const void *b) { return ((const parcel_t *)a)->peer - ((const parcel_t *)b)->peer; }

static int plan(link_t *link, flow_t *flow, int writes, const offer_t *mine, const offer_t *theirs)
{
    int first = link->far->first, rank = link->program->circle.rank, status = MPS_OK;
    int own = link->program->ranks, other = link->far->ranks;
    for (int f = 0; f < flow->fields && !status; f++) {
        shares_t shares = {NULL, 0, 0};
        int at = mesh_rank(&mine[f], rank);
        status = writes ? plan_targets(&mine[f].layout, &theirs[f].layout, at, &shares)
                        : plan_sources(&theirs[f].layout, &mine[f].layout, at, &shares);
        for (int i = 0; i < shares.count && !status; i++) {
            int peer = shares.of[i].peer;
            parcel_t *parcel = parcel_of(flow, first + (theirs[f].ranks ? (int)theirs[f].order[peer] : peer));
            part_t *parts = parcel ? realloc(parcel->parts, (size_t)(parcel->count + 1) * sizeof *parts) : NULL;
            if (parts == NULL) status = fail(MPS_ERR_MEMORY, "connect: no memory");
            else {
                parcel->parts = parts;
                parts[parcel->count].field = f;
                parts[parcel->count++].box = shares.of[i].box;
            }
        }
        free(shares.of);
    }
    /* who gets no cell still hears of steps and of the end */
    if (!status && flow->fields && writes) {
        for (int64_t q = ((int64_t)rank * other + own - 1) / own; q < ((int64_t)(rank + 1) * other + own - 1) / own; q++)
            if (gets_nothing(theirs, flow->fields, (int)q) && parcel_of(flow, first + (int)q) == NULL) status = fail(MPS_ERR_MEMORY, "no memory");
    } else if (!status && flow->fields && gets_nothing(mine, flow->fields, rank) && parcel_of(flow, first + (int)((int64_t)rank * other / own)) == NULL)
        status = fail(MPS_ERR_MEMORY, "connect: no memory");
    if (flow->count) qsort(flow->parcels, (size_t)flow->count, sizeof *flow->parcels, by_rank);
    for (int i = 0; i < flow->count; i++) {
        parcel_t *parcel = &flow->parcels[i];
        parcel->start = flow->nbytes;
        parcel->nbytes = HEAD_BYTES;
        for (int k = 0; k < parcel->count; k++) {
            part_t *part = &parcel->parts[k];
            part->at = parcel->start + parcel->nbytes;
            parcel->nbytes += aligned(box_cells(&part->box, flow->of[part->field]->layout.ndim) * dtype_size(flow->of[part->field]->dtype));
        }
        flow->nbytes += parcel->nbytes;
    }
    return status;
}

static int slot_init(link_t *link, flow_t *flow, slot_t *slot, int writes)
{
    slot->count = 0;
    slot->flying = slot->lost = 0;
    slot->memory = malloc((size_t)flow->nbytes + 1);
    int pieces = 0;
    for (int i = 0; i < flow->count; i++) pieces += (int)((flow->parcels[i].nbytes + PIECE - 1) / PIECE);
    slot->requests = malloc((size_t)(pieces + 1) * sizeof *slot->requests);
    if (slot->memory == NULL || slot->requests == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory for a slot of %lld bytes", (long long)flow->nbytes);
    for (int i = 0; i < flow->count; i++) {
        parcel_t *p = &flow->parcels[i];
        for (int64_t at = 0; at < p->nbytes; at += PIECE) {
            int n = p->nbytes - at < PIECE ? (int)(p->nbytes - at) : PIECE;
            char *memory = slot->memory + p->start + at;
            if (writes) MPI_Ssend_init(memory, n, MPI_BYTE, p->peer, link->tag + TAG_DATA, link->far->both, &slot->requests[slot->count++]);
            else if (at == 0) MPI_Recv_init(memory, n, MPI_BYTE, p->peer, link->tag + TAG_DATA, link->far->both, &slot->requests[slot->count++]);
        }
    }
    return MPS_OK;
}

typedef struct { int64_t *theirs; MPI_Request *requests; parcel_t **of; } peers_t;

static int peers_init(link_t *link, peers_t *peers)
{
    size_t count = (size_t)(link->out.count + link->into.count);
    peers->theirs = calloc(count * 3 + 1, sizeof *peers->theirs);
    peers->requests = malloc((2 * count + 1) * sizeof *peers->requests);
    peers->of = malloc((count + 1) * sizeof *peers->of);
    return peers->theirs && peers->requests && peers->of ? MPS_OK : fail(MPS_ERR_MEMORY, "connect: no memory");
}

static int meet_peers(link_t *link, peers_t *peers)
{
    flow_t *flows[2] = {&link->out, &link->into};
    int count = 0, done = 0, status = MPS_OK;
    static int64_t mine[3]; /* always the same: MPI may read it later */
    int64_t *theirs = peers->theirs;
    parcel_t **of = peers->of;
    presence_t here = presence_here();
    mine[0] = here.machine, mine[1] = here.pid, mine[2] = here.started;
    for (int f = 0; f < 2; f++)
        for (int i = 0; i < flows[f]->count; i++) {
            int known = 0;
            for (int k = 0; f && k < flows[0]->count; k++) known |= flows[0]->parcels[k].peer == flows[1]->parcels[i].peer;
            if (!known) of[count++] = &flows[f]->parcels[i];
        }
    for (int i = 0; i < count; i++) {
        MPI_Irecv(theirs + 3 * i, 3, MPI_INT64_T, of[i]->peer, link->tag + TAG_PRESENCE, link->far->both, &peers->requests[2 * i]);
        MPI_Isend(mine, 3, MPI_INT64_T, of[i]->peer, link->tag + TAG_PRESENCE, link->far->both, &peers->requests[2 * i + 1]);
    }
    patience_t wait = patience(link->timeout);
    while (!status && (MPI_Testall(2 * count, peers->requests, &done, MPI_STATUSES_IGNORE), !done))
        if (!patient(&wait))
            status = fail(MPS_ERR_PEER, "connect: not all ranks of program '%s' came\n  expected: within %g s", link->far->name, link->timeout);
    for (int i = 0; i < count && !status; i++) {
        of[i]->where.machine = theirs[3 * i];
        of[i]->where.pid = theirs[3 * i + 1];
        of[i]->where.started = theirs[3 * i + 2];
    }
    for (int i = 0; i < link->into.count; i++)
        for (int k = 0; k < link->out.count; k++)
            if (link->into.parcels[i].peer == link->out.parcels[k].peer) link->into.parcels[i].where = link->out.parcels[k].where;
    if (status) peers->theirs = NULL; /* who comes later is written to it */
    return circle_agree(&link->program->circle, status, link->timeout);
}

static int by_name(const void *a, const void *b) { return strcmp((*(field_t *const *)a)->name, (*(field_t *const *)b)->name); }

static int taken(link_t *link, flow_t *flow, int count, const mps_handle *given, side_t *side, int s)
{
    if (count < 0 || (count > 0 && given == NULL))
        return fail(MPS_ERR_ARGUMENT, "connect: %d fields, and %s\n  expected: a number of fields, and as many", count, given ? "some" : "none");
    flow->of = calloc((size_t)count + 1, sizeof *flow->of);
    side->of[s] = calloc((size_t)count + 1, sizeof *side->of[s]);
    if (flow->of == NULL || side->of[s] == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory");
    for (int i = 0; i < count; i++) {
        field_t *field = object_of(given[i], OBJECT_FIELD);
        if (field == NULL)
            return fail(MPS_ERR_ARGUMENT, "connect: field %d is none\n  expected: fields, from mps_field, that were not released", i);
        flow->of[flow->fields++] = field;
        field->users++;
        int status = field_usable(field, "connect");
        if (status) return status;
    }
    qsort(flow->of, (size_t)count, sizeof *flow->of, by_name);
    side->count[s] = count;
    for (int i = 0; i < count; i++) {
        if (i && strcmp(flow->of[i - 1]->name, flow->of[i]->name) == 0)
            return fail(MPS_ERR_ARGUMENT, "connect: two fields of one name, '%s'", flow->of[i]->name);
        int status = offered(flow->of[i], link->program->ranks, &side->of[s][i]);
        if (status) return status;
    }
    return MPS_OK;
}

/* where the domain's communicator has the ranks in another order than the program's */
static int order_of(link_t *link, field_t *field, offer_t *offer)
{
    circle_t *circle = &link->program->circle;
    int rank = field->sim->rank;
    int64_t mine = rank, values[3];
    circle_start(circle, MPS_OK, 0, rank == circle->rank, 0, 0);
    int status = circle_finish(circle, link->timeout, values);
    if (status || values[0]) return status;
    int64_t *table = malloc((size_t)circle->size * sizeof *table);
    offer->order = malloc((size_t)circle->size * sizeof *table);
    if (table == NULL || offer->order == NULL) status = fail(MPS_ERR_MEMORY, "connect: no memory");
    if ((status = circle_agree(circle, status, link->timeout))) {
        free(table);
        return status;
    }
    MPI_Allgather(&mine, 1, MPI_INT64_T, table, 1, MPI_INT64_T, circle->comm);
    for (int r = 0; r < circle->size; r++) offer->order[table[r]] = r;
    offer->ranks = circle->size;
    free(table);
    return MPS_OK;
}

static void progress_all(void);
static void abandon(link_t *link);

/* MPI_Finalize begins with it: a program that ends with open links says so, and nobody waits for it until the timeout */
static int leave_all(MPI_Comm comm, int key, void *value, void *extra)
{
    (void)comm, (void)key, (void)value, (void)extra;
    background = NULL;
    for (; open_links != NULL; open_links = open_links->next) abandon(open_links);
    patience_t wait = patience(1.0);
    while (sends_under_way() && patient(&wait)) continue;
    return MPI_SUCCESS;
}

static void leave_at_finalize(void)
{
    static int key = MPI_KEYVAL_INVALID;
    if (key != MPI_KEYVAL_INVALID) return;
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, leave_all, &key, NULL) == MPI_SUCCESS) MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
}

static int chosen(int writer, int reader, int reads_only, int otherwise)
{
    if (writer == MPS_DEFAULT && reads_only) writer = reader;
    return writer == MPS_DEFAULT ? otherwise : writer;
}

/* Where ranks made different calls, each knows of its own: those of the others may be of any of the program's links. */
static void parted(program_t *program, int status)
{
    for (link_t *link = open_links; link != NULL && program->circle.apart; link = link->next)
        if (link->program == program && !link->failed) {
            link->failed = status;
            snprintf(link->text, sizeof link->text, "%s", mps_error());
        }
    program->circle.apart = 0;
}

static int kept(link_t *link, int status)
{
    if (status < 0) {
        link->failed = status;
        snprintf(link->text, sizeof link->text, "%s", mps_error());
        parted(link->program, status);
    }
    return status;
}

/* All ranks are ready, or the other side is told that they are not; and so is it. */
static int accept(link_t *link, int status)
{
    circle_t *circle = &link->program->circle;
    char *answer = NULL;
    int64_t length;
    if ((status = circle_agree(circle, status, link->timeout))) {
        if (circle->rank == 0) withdraw(link, mps_error());
        return status;
    }
    if (circle->rank == 0) {
        notify(link, link->far->first, TAG_HELLO, KIND_ACCEPT);
        status = asked(link, KIND_ACCEPT, &answer, &length);
        free(answer);
    }
    return circle_agree(circle, status, link->timeout + 1.0);
}

/* what the messages of a link need */
static int prepared(link_t *link, const side_t *mine, const side_t *other, peers_t *peers)
{
    flow_t *flows[2] = {&link->out, &link->into};
    link->out.policy = chosen(mine->policy, other->policy, other->count[0] == 0, MPS_BLOCK);
    link->out.depth = chosen(mine->depth, other->depth, other->count[0] == 0, 2);
    link->into.policy = chosen(other->policy, mine->policy, mine->count[0] == 0, MPS_BLOCK);
    for (int s = 0; s < 2; s++) {
        /* own mesh ranks, where they differ, are those of the order */
        int status = plan(link, flows[s], s == 0, mine->of[s], other->of[1 - s]);
        if (status) return status;
        /* of steps that may be taken back one more than the depth, for the one that is being read */
        int slots = s == 1 ? 1 : link->out.policy == MPS_LATEST ? link->out.depth + 1 : link->out.depth;
        flows[s]->slot = calloc((size_t)slots + 1, sizeof *flows[s]->slot);
        flows[s]->unread = calloc((size_t)slots + 1, sizeof *flows[s]->unread);
        if (flows[s]->slot == NULL || flows[s]->unread == NULL) return fail(MPS_ERR_MEMORY, "connect: no memory");
        for (int i = 0; i < slots && flows[s]->fields; i++) {
            flows[s]->slots++;
            if ((status = slot_init(link, flows[s], &flows[s]->slot[i], s == 0))) return status;
        }
    }
    return peers_init(link, peers);
}

static int make(link_t *link, side_t *mine, int status)
{
    circle_t *circle = &link->program->circle;
    char *offer = NULL, *theirs = NULL;
    int64_t count = 0, length = 0;
    side_t other = {0, 0, {0, 0}, {NULL, NULL}};
    flow_t *flows[2] = {&link->out, &link->into};
    peers_t peers = {NULL, NULL, NULL};
    uint64_t sum = digest(digest(digest(0, &mine->policy, sizeof(int)), &mine->depth, sizeof(int)), mine->count, sizeof mine->count);
    for (int s = 0; s < 2 && !status; s++)
        for (int i = 0; i < mine->count[s]; i++) sum = digest(sum, flows[s]->of[i]->name, NAME_BYTES);
    status = circle_same(circle, status, link->timeout, sum, "connect");
    for (int s = 0; s < 2 && !status; s++)
        for (int i = 0; i < mine->count[s] && !status; i++) status = order_of(link, flows[s]->of[i], &mine->of[s][i]);
    if (status) {
        if (circle->rank == 0) withdraw(link, mps_error());
        return status;
    }
    if (circle->rank == 0 && (offer = side_packed(mine, &count)) == NULL) {
        status = fail(MPS_ERR_MEMORY, "connect: no memory");
        withdraw(link, mps_error());
    } else if (circle->rank == 0) {
        /* it is MPI's from here on */
        send_kept(offer, (int)count, link->far->first, link->tag + TAG_HELLO, link->far->both);
        status = asked(link, KIND_OFFER, &theirs, &length);
    }
    if ((status = circle_agree(circle, status, link->timeout + 1.0))) {
        free(theirs);
        return status;
    }
    status = circle_tell(circle, &theirs, &length, link->timeout);
    if (!status) status = circle_agree(circle, side_unpacked(theirs, &other), link->timeout);
    /* what does not fit the other side finds, too */
    int unlike = status ? MPS_OK : compare(link->program->name, mine, link->far->name, &other);
    if (unlike) status = unlike;
    else status = accept(link, status ? status : prepared(link, mine, &other, &peers));
    if (!status) status = meet_peers(link, &peers);
    free(peers.theirs);
    free(peers.requests);
    free(peers.of);
    free(theirs);
    side_free(&other, 0);
    return status;
}

int mps_connect(mps_handle handle, const char *name, int n_out, const mps_handle *out, int n_into, const mps_handle *into, int policy,
                int depth, double timeout, mps_handle *result)
{
    program_t *program = object_of(handle, OBJECT_PROGRAM);
    side_t mine = {policy, depth > 0 ? depth : MPS_DEFAULT, {0, 0}, {NULL, NULL}};
    if (result != NULL) *result = MPS_NULL;
    if (program == NULL) return fail(MPS_ERR_ORDER, "connect: expected a program, from mps_join");
    double seconds = timeout > 0 ? timeout : 60.0;
    far_t *far = NULL;
    for (int i = 0; i < program->others; i++)
        if (name != NULL && strcmp(program->far[i].name, name) == 0) far = &program->far[i];
    /* before anything is counted: the numbers of links stay the same on all ranks */
    int status = MPS_OK;
    if (result == NULL) status = fail(MPS_ERR_ARGUMENT, "connect: no place for the link");
    else if (far == NULL)
        status = fail(MPS_ERR_PEER, "connect: no such program\n  expected: another program of the job\n  got:      '%s', in program '%s'",
                      name ? name : "", program->name);
    else if (far->connects >= MOST_LINKS || program->links >= MOST_OF_PROGRAM)
        status = fail(MPS_ERR_ORDER, "connect: no tags are left for one more link to '%s'\n  expected: %d links of two programs at most, and %d "
                      "of one, closed ones too\n  fix:      keep a link, and call mps_put and mps_get many times", name, MOST_LINKS, MOST_OF_PROGRAM);
    else status = object_room("connect");
    status = circle_same(&program->circle, status, seconds, digest(0, name ? name : "", name ? strlen(name) : 0), "connect");
    if (status) {
        parted(program, status);
        return status;
    }
    link_t *link = calloc(1, sizeof *link);
    if (link == NULL) {
        status = fail(MPS_ERR_MEMORY, "connect: no memory"); /* the others, and the other side, must hear of it */
        memset(link = &unmade, 0, sizeof unmade);
    }
    link->far = far;
    link->program = program;
    program->users++;
    link->tag = link->far->connects++ * LINK_TAGS;
    link->serial = program->links++;
    link->timeout = seconds;
    if (!status && (policy < MPS_DEFAULT || policy > MPS_LATEST)) status = fail(MPS_ERR_ARGUMENT, "connect: policy %d is none of MPS_BLOCK...", policy);
    if (!status && (depth < 0 || depth > MOST_SLOTS))
        status = fail(MPS_ERR_ARGUMENT, "connect: depth is %d\n  expected: 1 to %d slots", depth, MOST_SLOTS);
    if (!status) status = taken(link, &link->out, n_out, out, &mine, 0);
    if (!status) status = taken(link, &link->into, n_into, into, &mine, 1);
    status = make(link, &mine, status);
    side_free(&mine, 1);
    if (status) {
        char text[TEXT_BYTES];
        snprintf(text, sizeof text, "%s", mps_error());
        parted(program, status);
        link_free(link);
        return fail(status, "%s", text);
    }
    *result = object_made(OBJECT_LINK, link);
    link->next = open_links;
    open_links = link;
    background = progress_all;
    leave_at_finalize();
    return MPS_OK;
}

/* steps */

static int slot_done(slot_t *slot)
{
    if (slot->flying) {
        int done;
        MPI_Testall(slot->count, slot->requests, &done, MPI_STATUSES_IGNORE);
        if (done) slot->flying = 0;
    }
    return !slot->flying;
}

static void slot_send(flow_t *flow, slot_t *slot, int64_t step)
{
    for (int i = 0; i < flow->count; i++) head((int64_t *)(slot->memory + flow->parcels[i].start), KIND_STEP, step, flow->parcels[i].nbytes);
    slot->flying = 1;
    if (slot->count) MPI_Startall(slot->count, slot->requests);
}

static void move(flow_t *flow, char *memory, int pack)
{
    for (int i = 0; i < flow->count; i++)
        for (int k = 0; k < flow->parcels[i].count; k++) {
            part_t *part = &flow->parcels[i].parts[k];
            field_t *field = flow->of[part->field];
            char *owned = field->data;
            for (int d = 0; d < field->layout.ndim; d++) owned += field->lo[d] * field->strides[d];
            cells_copy(owned, field->strides, &part->box, field->layout.ndim, dtype_size(field->dtype), memory + part->at, pack);
        }
}

static void serve(flow_t *flow, int64_t asked)
{
    while (flow->served < asked && flow->unread_count) {
        slot_t *slot = flow->unread[0];
        memmove(flow->unread, flow->unread + 1, (size_t)--flow->unread_count * sizeof *flow->unread);
        flow->served++;
        slot_send(flow, slot, slot->step);
    }
}

static void end_to(link_t *link, parcel_t *p, int kind)
{
    if (p->over || p->left) return;
    p->over = 1;
    notify(link, p->peer, TAG_DATA, kind);
}

/* The program leaves without having closed the link, and says so. */
static void abandon(link_t *link)
{
    for (int i = 0; i < link->out.count; i++) end_to(link, &link->out.parcels[i], KIND_GONE);
    for (int i = 0; i < link->into.count; i++)
        if (!link->into.parcels[i].over) notify(link, link->into.parcels[i].peer, TAG_STOP, KIND_GONE);
}

static void progress_requests(link_t *link)
{
    flow_t *flow = &link->out;
    circle_t *circle = &link->program->circle;
    int64_t words[8];
    int found, told = 0;
    if (circle->rank == 0) {
        for (;;) {
            MPI_Iprobe(link->far->first, link->tag + TAG_REQUEST, link->far->both, &found, MPI_STATUS_IGNORE);
            if (!found) break;
            MPI_Recv(words, HEAD_BYTES, MPI_BYTE, link->far->first, link->tag + TAG_REQUEST, link->far->both, MPI_STATUS_IGNORE);
            flow->asked++;
        }
        told = !flow->putting && flow->served < flow->asked && flow->unread_count;
    } else
        for (;;) {
            int parent = circle->rank & (circle->rank - 1);
            MPI_Iprobe(parent, link->serial, circle->comm, &found, MPI_STATUS_IGNORE);
            if (!found) break;
            MPI_Recv(words, HEAD_BYTES, MPI_BYTE, parent, link->serial, circle->comm, MPI_STATUS_IGNORE);
            if (words[3] > flow->asked) flow->asked = words[3];
            told = 1;
        }
    /* where a rank waits it cannot agree: the others are told, down a tree */
    for (int step = 1; told && circle->rank + step < circle->size && !(circle->rank & step); step <<= 1) {
        head(words, TAG_SERVE, flow->asked, HEAD_BYTES);
        MPI_Send(words, HEAD_BYTES, MPI_BYTE, circle->rank + step, link->serial, circle->comm);
    }
    if (!flow->putting) serve(flow, flow->asked);
}

static int stopped(const flow_t *flow)
{
    for (int i = 0; i < flow->count; i++)
        if (flow->parcels[i].stopped) return 1;
    return 0;
}

static void progress(link_t *link)
{
    flow_t *flow = &link->out;
    int64_t words[8];
    int found;
    if (flow->fields == 0) return;
    for (;;) {
        MPI_Status status;
        MPI_Iprobe(MPI_ANY_SOURCE, link->tag + TAG_STOP, link->far->both, &found, &status);
        if (!found) break;
        MPI_Recv(words, HEAD_BYTES, MPI_BYTE, status.MPI_SOURCE, link->tag + TAG_STOP, link->far->both, MPI_STATUS_IGNORE);
        for (int i = 0; i < flow->count; i++)
            if (flow->parcels[i].peer == status.MPI_SOURCE) {
                flow->parcels[i].stopped = 1;
                flow->parcels[i].left = words[2] == KIND_GONE;
            }
    }
    for (int i = 0; i < flow->count && !flow->putting; i++)
        if (flow->parcels[i].stopped) end_to(link, &flow->parcels[i], KIND_END);
    if (flow->policy == MPS_LATEST) progress_requests(link);
}

static void progress_all(void)
{
    for (link_t *link = open_links; link != NULL; link = link->next) progress(link);
}

/* ranks of the other program in words: those whose requests are not complete, or who are in a state */
static int listed(link_t *link, flow_t *flow, slot_t *slot, char state, char *text, size_t room)
{
    int k = 0;
    ranks_t found = {0, 0, {{0}}};
    for (int i = 0; i < flow->count; i++) {
        parcel_t *p = &flow->parcels[i];
        int done = slot == NULL ? 0 : 1, writes = flow == &link->out;
        for (int64_t at = 0; slot != NULL && at < p->nbytes && (writes || at == 0); at += PIECE, k++) {
            int flag;
            MPI_Request_get_status(slot->requests[k], &flag, MPI_STATUS_IGNORE);
            done &= flag;
        }
        if (!done && (state == 0 || presence_state(&p->where) == state)) ranks_add(&found, p->peer - link->far->first);
    }
    ranks_text(&found, text, room);
    return found.count;
}

static int dead(link_t *link, flow_t *flow, slot_t *slot, const char *call)
{
    char text[512];
    if (listed(link, flow, slot, 'X', text, sizeof text) == 0) return MPS_OK;
    return fail(MPS_ERR_PEER, "%s: %s of program '%s' died\n  expected: a living peer\n  got:      its process is gone", call, text, link->far->name);
}

static int late(link_t *link, flow_t *flow, slot_t *slot, const char *call, int *certain)
{
    char text[512], halted[512];
    listed(link, flow, slot, 0, text, sizeof text);
    *certain = listed(link, flow, slot, 'T', halted, sizeof halted) > 0;
    return fail(MPS_ERR_PEER, "%s: %s of program '%s' did not answer\n  expected: the other side of the link within %g s\n"
                "  got:      nothing%s%s", call, text, link->far->name, link->timeout,
                *certain ? "; stopped by a signal: " : "", *certain ? halted : "");
}

/* a reader that takes nothing that is on its way */
static int deserted(link_t *link, const char *call)
{
    char text[512];
    ranks_t found = {0, 0, {{0}}};
    for (int i = 0; i < link->out.count; i++)
        if (link->out.parcels[i].left) ranks_add(&found, link->out.parcels[i].peer - link->far->first);
    if (found.count == 0) return MPS_OK;
    ranks_text(&found, text, sizeof text);
    return fail(MPS_ERR_PEER, "%s: %s of program '%s' left\n  expected: a reader, until it closes the link\n  got:      the end of its process, "
                "or of its link by an error", call, text, link->far->name);
}

static int room_for(link_t *link, slot_t *slot, int *status, int *certain)
{
    flow_t *flow = &link->out;
    patience_t wait = patience(link->timeout);
    while (!stopped(flow)) {
        /* a policy that never waits must still find out that nobody reads any more */
        if (flow->policy != MPS_BLOCK && time_to_look(&flow->looks) && (*status = dead(link, flow, NULL, "put"))) *certain = 1;
        if (flow->policy == MPS_LATEST || slot_done(slot)) return FREE;
        if (flow->policy == MPS_DROP_NEWEST) return FULL;
        if (time_to_look(&wait) && (*status = dead(link, flow, slot, "put"))) {
            *certain = 1;
            return FULL;
        }
        if (!patient(&wait)) {
            *status = late(link, flow, slot, "put", certain);
            return FULL;
        }
    }
    *status = deserted(link, "put");
    return *status ? FULL : ENDED;
}

static slot_t *emptied(link_t *link)
{
    flow_t *flow = &link->out;
    if (flow->unread_count == flow->depth) {
        slot_t *slot = flow->unread[0];
        memmove(flow->unread, flow->unread + 1, (size_t)--flow->unread_count * sizeof *flow->unread);
        return slot;
    }
    for (int i = 0;; i = (i + 1) % flow->slots) {
        int waits = 0;
        for (int k = 0; k < flow->unread_count; k++) waits |= flow->unread[k] == &flow->slot[i];
        if (!waits && slot_done(&flow->slot[i])) return &flow->slot[i];
    }
}

/* What is the same on all ranks, as calls are; whether the fields may be used, the ranks agree on. */
static link_t *usable(mps_handle handle, const char *call, int *status)
{
    link_t *link = object_of(handle, OBJECT_LINK);
    *status = MPS_OK;
    if (link == NULL) *status = fail(MPS_ERR_ORDER, "%s: expected a link, from mps_connect, that was not released", call);
    else if (link->failed) *status = fail(link->failed, "%s", link->text);
    else if (link->closed) *status = fail(MPS_ERR_ORDER, "%s: the link is closed\n  expected: an open link\n  got:      mps_close before", call);
    else *status = mpi_ready();
    return *status ? NULL : link;
}

static int fields_usable(link_t *link, const char *call)
{
    flow_t *flows[2] = {&link->out, &link->into};
    int status = MPS_OK;
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < flows[s]->fields && !status; i++) status = field_usable(flows[s]->of[i], call);
    return status;
}

static int64_t call_of(const link_t *link, int which) { return which + CALLS * (int64_t)link->serial; }

int mps_put(mps_handle handle)
{
    int status, certain = 0;
    int64_t values[3] = {0, 0, 0};
    link_t *link = usable(handle, "put", &status);
    if (link == NULL) return status;
    flow_t *flow = &link->out;
    circle_t *circle = &link->program->circle;
    if (flow->fields == 0) return fail(MPS_ERR_ORDER, "put: nothing to put\n  expected: out fields in mps_connect");
    progress(link);
    flow->putting = 1;
    slot_t *slot = &flow->slot[flow->sent % flow->depth];
    int unfit = status = fields_usable(link, "put");
    int room = unfit ? FULL : room_for(link, slot, &status, &certain);
    circle_start_in(circle, call_of(link, CALL_PUT), status, certain, status < 0 ? status : room, -flow->asked, unfit != 0);
    if (room == FREE && !status && flow->policy != MPS_LATEST) {
        move(flow, slot->memory, 1);
        if (flow->policy == MPS_BLOCK) slot_send(flow, slot, flow->next);
    }
    status = circle_finish(circle, link->timeout, values);
    if (!status && values[0] == ENDED) {
        flow->ended = 1;
        status = MPS_END;
    } else if (!status && flow->policy == MPS_LATEST) {
        /* not what rank 0 has heard since: the others do not know of it */
        if (-values[1] > flow->asked) flow->asked = -values[1];
        serve(flow, -values[1]);
        slot = emptied(link);
        move(flow, slot->memory, 1);
        slot->step = flow->next++;
        flow->unread[flow->unread_count++] = slot;
        serve(flow, -values[1]);
    } else if (!status) {
        int64_t step = flow->next++;
        if (values[0] == FREE) {
            flow->sent++;
            if (flow->policy != MPS_BLOCK) slot_send(flow, slot, step);
        } else
            status = MPS_DROPPED;
    }
    flow->putting = 0;
    if (stopped(flow)) progress(link);
    /* fields that no rank may use: nothing was sent, and the link goes on */
    return status < 0 && unfit && values[2] && !circle->apart ? status : kept(link, status);
}

/* the rest of a message longer than a piece, which is given up where its writer died, or is silent */
static int rest_of(link_t *link, parcel_t *p, char *memory, int *certain)
{
    for (int64_t at = PIECE; at < p->nbytes; at += PIECE) {
        MPI_Request request;
        int done, n = p->nbytes - at < PIECE ? (int)(p->nbytes - at) : PIECE;
        patience_t wait = patience(link->timeout);
        MPI_Irecv(memory + at, n, MPI_BYTE, p->peer, link->tag + TAG_DATA, link->far->both, &request);
        while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done) {
            *certain = time_to_look(&wait) && presence_state(&p->where) == 'X';
            if (!*certain && patient(&wait)) continue;
            link->into.slot->lost = 1;
            return fail(MPS_ERR_PEER, "get: rank %d of program '%s' %s in the middle of a message\n  expected: all of its %lld bytes\n"
                        "  got:      the first %lld", p->peer - link->far->first, link->far->name, *certain ? "died" : "did not go on",
                        (long long)p->nbytes, (long long)at);
        }
    }
    return MPS_OK;
}

/* what came from one rank: its kind and step */
static int checked(link_t *link, parcel_t *p, int64_t *kind, int64_t *step, int *certain)
{
    char *memory = link->into.slot->memory + p->start;
    int64_t words[8];
    memcpy(words, memory, sizeof words);
    int rank = p->peer - link->far->first;
    *kind = words[2];
    *step = words[3];
    if (words[0] != WIRE_MAGIC || words[1] != WIRE_VERSION)
        return fail(MPS_ERR_PEER, "program '%s' speaks another version of this wire format (here: %d)", link->far->name, WIRE_VERSION);
    if (*kind == KIND_GONE) {
        p->over = 1;
        return fail(MPS_ERR_PEER, "get: rank %d of program '%s' left\n  expected: more steps, or close\n  got:      the end of its process",
                    rank, link->far->name);
    }
    if (*kind == KIND_END) {
        p->over = 1;
        *step = 0;
        return MPS_OK;
    }
    if (words[4] != p->nbytes)
        return fail(MPS_ERR_PEER, "get: a message of rank %d of program '%s' of another size\n  expected: %lld bytes\n  got:      %lld bytes",
                    rank, link->far->name, (long long)p->nbytes, (long long)words[4]);
    return rest_of(link, p, memory, certain);
}

static int receive(link_t *link, int64_t *kind, int64_t *step, int *certain)
{
    flow_t *flow = &link->into;
    slot_t *slot = flow->slot;
    int done = 0, status;
    if (flow->policy == MPS_LATEST && link->program->circle.rank == 0) notify(link, link->far->first, TAG_REQUEST, TAG_REQUEST);
    MPI_Startall(slot->count, slot->requests);
    slot->flying = 1;
    patience_t wait = patience(link->timeout);
    while (MPI_Testall(slot->count, slot->requests, &done, MPI_STATUSES_IGNORE), !done) {
        if (time_to_look(&wait) && (status = dead(link, flow, slot, "get"))) {
            *certain = 1;
            return status;
        }
        if (!patient(&wait)) return late(link, flow, slot, "get", certain);
    }
    slot->flying = 0;
    for (int i = 0; i < flow->count; i++) {
        int64_t k, s;
        if ((status = checked(link, &flow->parcels[i], &k, &s, certain))) return status;
        if (i && (k != *kind || s != *step))
            return fail(MPS_ERR_PEER, "get: the writers sent different steps\n  expected: one step\n  got:      %lld and %lld", (long long)*step,
                        (long long)s);
        *kind = k;
        *step = s;
    }
    return MPS_OK;
}

int mps_get(mps_handle handle, int64_t *number)
{
    int status, certain = 0;
    int64_t kind = KIND_STEP, step = 0, values[3] = {0, 0, 0};
    link_t *link = usable(handle, "get", &status);
    if (link == NULL) return status;
    flow_t *flow = &link->into;
    if (flow->fields == 0) return fail(MPS_ERR_ORDER, "get: nothing to get\n  expected: into fields in mps_connect");
    if (flow->ended) return MPS_END;
    int unfit = status = fields_usable(link, "get");
    if (!status) status = receive(link, &kind, &step, &certain);
    circle_start_in(&link->program->circle, call_of(link, CALL_GET), status, certain, status < 0 ? status : step, -step, unfit ? 1 : -kind);
    if (!status && kind == KIND_STEP) move(flow, flow->slot->memory, 0);
    status = circle_finish(&link->program->circle, link->timeout, values);
    if (!status && values[2]) {
        flow->ended = 1;
        return MPS_END;
    }
    if (!status && values[0] != -values[1]) status = fail(MPS_ERR_PEER, "get: the ranks got different steps");
    if (!status && number != NULL) *number = step;
    return status < 0 && unfit && values[2] == 1 && !link->program->circle.apart ? status : kept(link, status);
}

static int flushed(link_t *link)
{
    flow_t *flow = &link->out;
    int done = 1;
    progress(link);
    for (int i = 0; i < flow->slots; i++) done &= slot_done(&flow->slot[i]);
    for (int i = 0; i < flow->count && flow->unread_count; i++) done &= !flow->parcels[i].left;
    /* to whom nothing goes, nobody says that it has stopped */
    if (!done || (flow->unread_count && flow->count && !stopped(flow))) return 0;
    for (int i = 0; i < flow->count; i++) end_to(link, &flow->parcels[i], KIND_END);
    return 1;
}

static int drained(link_t *link)
{
    flow_t *flow = &link->into;
    int all = 1;
    for (int i = 0; i < flow->count; i++) {
        parcel_t *p = &flow->parcels[i];
        while (!p->over) {
            int done, certain = 0;
            int64_t kind, step;
            if (!p->told) MPI_Start(&flow->slot->requests[i]);
            p->told = 1;
            MPI_Test(&flow->slot->requests[i], &done, MPI_STATUS_IGNORE);
            if (!done) {
                all = 0;
                break;
            }
            p->told = 0;
            if (checked(link, p, &kind, &step, &certain)) p->over = 1;
        }
    }
    return all;
}

static void leave(link_t *link)
{
    link_t **at = &open_links;
    while (*at != NULL && *at != link) at = &(*at)->next;
    if (*at == link) *at = link->next;
}

int mps_close(mps_handle handle)
{
    link_t *link = object_of(handle, OBJECT_LINK);
    int status = MPS_OK, certain = 0;
    if (link == NULL) return fail(MPS_ERR_ORDER, "close: expected a link, from mps_connect");
    if (link->closed) return MPS_OK;
    if ((status = mpi_ready())) return status;
    link->closed = 1;
    if (link->failed) {
        abandon(link);
        leave(link);
        return MPS_OK;
    }
    circle_t *circle = &link->program->circle;
    int64_t call = call_of(link, CALL_CLOSE);
    if (link->out.fields && link->out.policy == MPS_LATEST) {
        /* a rank that puts instead serves nobody until it knows: what is drained here would wait for it */
        circle_start_in(circle, call, MPS_OK, 0, 0, 0, 0);
        if ((status = circle_finish(circle, link->timeout, NULL))) {
            abandon(link);
            leave(link);
            return kept(link, status);
        }
    }
    for (int i = 0; i < link->into.count && !link->into.ended; i++) notify(link, link->into.parcels[i].peer, TAG_STOP, TAG_STOP);
    patience_t wait = patience(link->timeout);
    for (;;) {
        int in = drained(link), out = flushed(link);
        if ((!out && (status = deserted(link, "close"))) || (in && out)) break;
        flow_t *flow = out ? &link->into : &link->out;
        if (time_to_look(&wait) && (status = dead(link, flow, NULL, "close"))) {
            certain = 1;
            break;
        }
        if (!patient(&wait)) {
            status = late(link, flow, NULL, "close", &certain);
            break;
        }
    }
    if (status) abandon(link);
    leave(link);
    circle_start_in(circle, call, status, certain, status < 0 ? status : 0, 0, 0);
    return kept(link, circle_finish(circle, link->timeout, NULL));
}

void link_free(link_t *link)
{
    flow_t *flows[2] = {&link->out, &link->into};
    int over = 0;
    MPI_Finalized(&over);
    leave(link);
    for (int s = 0; s < 2; s++) {
        flow_t *flow = flows[s];
        for (int i = 0; i < flow->slots; i++) {
            slot_t *slot = &flow->slot[i];
            int idle = !slot->lost; /* MPI may still write into it */
            for (int k = 0; k < slot->count && !over; k++) {
                int done;
                MPI_Request_get_status(slot->requests[k], &done, MPI_STATUS_IGNORE);
                if (!done && s) {
                    MPI_Cancel(&slot->requests[k]);
                    MPI_Wait(&slot->requests[k], MPI_STATUS_IGNORE);
                } else if (!done)
                    idle = 0; /* MPI may still read it: it is left to the end of the program */
                if (done || s) MPI_Request_free(&slot->requests[k]);
            }
            if (idle) free(slot->memory);
            free(slot->requests);
        }
        for (int i = 0; i < flow->count; i++) free(flow->parcels[i].parts);
        for (int i = 0; i < flow->fields; i++) field_left(flow->of[i]);
        free(flow->parcels);
        free(flow->slot);
        free(flow->unread);
        free(flow->of);
    }
    program_left(link->program);
    if (link != &unmade) free(link);
}
