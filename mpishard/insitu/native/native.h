/* What the sources share; hidden in the libraries but for mpishard.h. The wire format: mpishard/comm/coupling/wire.py. */
#ifndef MPISHARD_NATIVE_H
#define MPISHARD_NATIVE_H

#pragma GCC visibility push(default)
#include "mpishard.h"
#pragma GCC visibility pop
#include <stddef.h>

enum { MAX_DIMS = 16, NAME_BYTES = 64, TEXT_BYTES = 1024, HEAD_BYTES = 64, ALIGNMENT = 64 };
enum { WIRE_MAGIC = 0x4D5053, WIRE_VERSION = 1, MEETING_TAG = 32101, LINK_TAGS = 8, MOST_SLOTS = 1 << 16 };
/* of two programs, and of one: MPI guarantees tags up to 32767 */
enum { MOST_LINKS = 4096, MOST_OF_PROGRAM = (1 << 14) - 1 };
enum { TAG_HELLO, TAG_PRESENCE, TAG_DATA, TAG_REQUEST, TAG_STOP, TAG_SERVE };
enum { KIND_STEP, KIND_END, KIND_GONE };
enum { KIND_OFFER, KIND_ACCEPT, KIND_WITHDRAW };

enum { OBJECT_SIM = 1, OBJECT_FIELD, OBJECT_PROGRAM, OBJECT_LINK, OBJECT_HOOK };

/* object.c */

int object_room(const char *call);              /* before the ranks agree on a call, of which a handle comes */
mps_handle object_made(int kind, void *object); /* where there is room */
void *object_of(mps_handle handle, int kind);   /* NULL: of another kind, or released */
int object_kind(mps_handle handle);
void object_dropped(mps_handle handle);

/* layout.c: pure arithmetic */

typedef struct {
    int ndim, mesh_ndim;
    int64_t shape[MAX_DIMS], mesh[MAX_DIMS];
    int shards[MAX_DIMS];     /* per mesh dim the tensor dim, -1 where it is replicated */
    int64_t *borders[MAX_DIMS]; /* per tensor dim, NULL where it is whole on every rank */
    int blocks[MAX_DIMS];
} layout_t;

typedef struct { int64_t lo[MAX_DIMS], hi[MAX_DIMS]; } box_t;
typedef struct { int peer; box_t box; } share_t; /* the box in indices of this rank's block */

typedef struct { share_t *of; int count, room; } shares_t;

box_t layout_box(const layout_t *layout, int64_t rank);
int layout_idle(const layout_t *layout, int64_t rank);
int plan_sources(const layout_t *writer, const layout_t *reader, int64_t rank, shares_t *shares);
int plan_targets(const layout_t *writer, const layout_t *reader, int64_t rank, shares_t *shares);
void layout_free(layout_t *layout);
int64_t box_cells(const box_t *box, int ndim);
/* between a strided array and dense cells in row-major order */
void cells_copy(char *array, const int64_t *strides, const box_t *box, int ndim, int64_t itemsize, char *dense, int pack);

/* meeting.c: errors, waits, decisions of a program's ranks, and how programs find each other */

int fail(int status, const char *format, ...);
int mpi_failed(int code, const char *what);
int mpi_ready(void); /* and this thread one that may call it */

/* how a text names ranks, as mpishard/errors.py does: "rank 3", "ranks 3, 7-12 and 40" */
enum { LISTED = 16 };
typedef struct { int count, ranges, ends[LISTED][2]; } ranks_t;
void ranks_add(ranks_t *ranks, int rank); /* in ascending order */
void ranks_text(const ranks_t *ranks, char *text, size_t room);

typedef struct { double start, timeout, looked; long turns; } patience_t;
patience_t patience(double timeout);
int patient(patience_t *wait); /* lets others run; whether there is time left */
int time_to_look(patience_t *wait);
extern void (*background)(void); /* what goes on in every wait */

/* One that is broken has a reduction under way, in which ranks that come late still take part: it, and what it is a part
 * of, is left to the end of the program. */
typedef struct { MPI_Comm comm; int rank, size, broken, apart; char name[NAME_BYTES]; int64_t mine[6], least[6]; char told[TEXT_BYTES + 16];
    MPI_Request request; } circle_t;
double own_limit(void); /* seconds for which ranks of a domain wait for each other: MPISHARD_TIMEOUT, as in Python */
int limit_fits(const char *call);
int circle_init(circle_t *circle, MPI_Comm comm, const char *name);
void circle_free(circle_t *circle);
void circle_start(circle_t *circle, int status, int certain, int64_t a, int64_t b, int64_t c);
/* of a call of a link: an error on all ranks where they start for other calls */
enum { CALL_PUT = 1, CALL_GET, CALL_CLOSE, CALLS };
void circle_start_in(circle_t *circle, int64_t call, int status, int certain, int64_t a, int64_t b, int64_t c);
int circle_finish(circle_t *circle, double timeout, int64_t values[3]);
int circle_agree(circle_t *circle, int status, double timeout);
/* the same, and an error where the ranks gave other arguments, or made other calls; 0 begins a digest */
int circle_same(circle_t *circle, int status, double timeout, uint64_t digest, const char *call);
uint64_t digest(uint64_t before, const void *data, size_t nbytes);
int circle_tell(circle_t *circle, char **message, int64_t *count, double timeout); /* rank 0's to all */

/* Send memory of malloc's, which is MPI's from then on: nobody need wait for the message, which may never be taken. */
void send_kept(void *memory, int nbytes, int peer, int tag, MPI_Comm comm);
void send_constant(const void *data, int nbytes, int peer, int tag, MPI_Comm comm); /* what nobody ever changes */
int sends_under_way(void);

typedef struct { int64_t machine, pid, started; } presence_t;
presence_t presence_here(void);
char presence_state(const presence_t *who); /* 'X' dead, 'T' stopped, ' ' not known */

/* An object lives as long as its handle, and those that use it: fields their domain, links and hooks their fields. */

typedef struct { char name[NAME_BYTES]; int ranks, first; MPI_Comm both; int connects; } far_t;
typedef struct { int users; char name[NAME_BYTES]; int ranks; MPI_Comm comm; circle_t circle; int others; far_t *far; int links; } program_t;
void program_left(program_t *program);

typedef struct field_s field_t;
typedef struct {
    int users, released, rank, size, ndim;
    int from; /* what its host counts dims from: 0 in C, 1 in Fortran */
    circle_t circle;
    int64_t shape[MAX_DIMS];
    int grid[MAX_DIMS], coords[MAX_DIMS], periodic[MAX_DIMS];
    int64_t *borders[MAX_DIMS];
    field_t *fields; /* not released */
    int64_t python;  /* what Python knows it by; 0: not at all */
    int64_t hooks;   /* made so far */
} sim_t;
/* the calls of mpishard.h, where something is known to be wrong before (else MPS_OK), which all ranks are told */
int sim_made(int known, int from, MPI_Comm comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes,
             const int *periodic, mps_handle *handle);
int field_made(int known, mps_handle handle, const char *name, int dtype, void *data, int ndim, const int *dims,
               const int64_t *extents, const int64_t *lo, const int64_t *strides, const int *faces, mps_handle *out);
void sim_left(sim_t *sim);

struct field_s {
    int users, released, dtype;
    char name[NAME_BYTES], *data;
    int64_t strides[MAX_DIMS], extents[MAX_DIMS], lo[MAX_DIMS], python;
    int binding, bound; /* counts of mps_rebind, and how many of them Python has heard of */
    int faces;          /* bits: dims of the domain between whose cells the values lie */
    layout_t layout;
    sim_t *sim;
    field_t *next;
};
int field_usable(const field_t *field, const char *call); /* or MPS_ERR_ORDER, MPS_ERR_ARGUMENT */
void field_left(field_t *field);

int64_t dtype_size(int dtype);
const char *dtype_name(int dtype);
int name_fits(const char *name);

/* link.c */
typedef struct link_s link_t;
void link_free(link_t *link);

/* python.c, where it is there: what Python has of an object */
extern int (*python_release)(int kind, void *object);

#endif
