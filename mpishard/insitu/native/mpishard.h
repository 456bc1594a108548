/* mpishard for C: a torch model on the ranks of a simulation, or beside it in another program of its MPI job.
 *
 * Every call returns a status that is the same on all ranks of the program: MPS_OK, another one that is positive, or a
 * negative number; mps_error() then says what was wrong. No call ends the program, or changes its handlers of errors and
 * signals, its floating-point environment, or the state of MPI. Handles are opaque; give each to mps_release when it is no
 * longer used. docs/host-c.md tells the rest.
 */
#ifndef MPISHARD_H
#define MPISHARD_H

#include <mpi.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mps_object *mps_handle;
#define MPS_NULL ((mps_handle)0)

enum {
    MPS_OK = 0,
    MPS_END = 1,         /* the other side has closed the link */
    MPS_DROPPED = 2,     /* mps_put: all slots were full, and the policy is to drop */
    MPS_NO_TURN = 3,     /* mps_step, mps_start, mps_wait: not one of the calls at which the hook runs */
    MPS_ERR_ARGUMENT = -1,
    MPS_ERR_ORDER = -2,  /* a call after close or release, on a handle of another kind, or not allowed where it stands */
    MPS_ERR_PEER = -3,   /* another program did not come, went away, or died */
    MPS_ERR_MATCH = -4,  /* the two sides of a link do not fit */
    MPS_ERR_MPI = -5,    /* MPI is not initialised, or one of its calls failed */
    MPS_ERR_MEMORY = -6,
    MPS_ERR_MODEL = -7,  /* the model was not found, has raised, or its output does not fit */
    MPS_ERR_LOST = -8,   /* ranks of this program did not come to the call */
    MPS_ERR_PYTHON = -9  /* Python was not found, did not start, or has another MPI */
};

/* how mps_hook runs a model: for its output alone, or with gradients, as a function that trains needs them */
enum { MPS_INFER = 0, MPS_TRAIN = 1 };

/* what mps_put does when all slots are full; MPS_DEFAULT leaves it to the other side, else it is MPS_BLOCK */
enum { MPS_DEFAULT = -1, MPS_BLOCK = 0, MPS_DROP_NEWEST = 1, MPS_LATEST = 2 };

enum {
    MPS_BOOL, MPS_UINT8, MPS_INT8, MPS_INT16, MPS_INT32, MPS_INT64, MPS_UINT16, MPS_UINT32, MPS_UINT64,
    MPS_FLOAT16, MPS_BFLOAT16, MPS_FLOAT32, MPS_FLOAT64, MPS_COMPLEX64, MPS_COMPLEX128
};

/* The text of the last error on this rank; valid until the next call. Not collective. */
const char *mps_error(void);

/* A domain of shape[ndim] cells, in the index order of the arrays, spread over all ranks of comm. Collective.
 *   grid      ranks per dim; NULL where comm is Cartesian, of ndim dims (its ranks lie on its coordinates, else row-major)
 *   sizes     cells that this rank owns per dim; NULL for blocks as equal as can be, the larger first
 *   periodic  per dim; NULL: as that Cartesian communicator has it, with or without grid, else not
 */
int mps_adopt(MPI_Comm comm, int ndim, const int64_t *shape, const int *grid, const int64_t *sizes, const int *periodic,
              mps_handle *sim);

/* An array of the host, which keeps it. Collective over the domain's ranks.
 *   data     its first element, ghost cells included; NULL will do where this rank owns no cell, here and in mps_rebind
 *   ndim     of the array;  dims[d]: the dim of the domain that array dim d is, -1 for another (components, levels);
 *            NULL: all in order
 *   extents  of the whole array on this rank;  lo: ghost cells before the owned ones (NULL: none), of a dim that is none of
 *            the domain cells that neither a model nor another program sees
 *   strides  in bytes; NULL: C order, dense
 */
int mps_field(mps_handle sim, const char *name, int dtype, void *data, int ndim, const int *dims,
              const int64_t *extents, const int64_t *lo, const int64_t *strides, mps_handle *field);
/* The same of an array with a point more than cells (staggered grids): where faces[d] is not 0, along array dim d. A face
 * between two ranks is owned by the one above it, as its first; the last rank of a dim that is not periodic owns the last
 * face as well. What the array has beyond is ghost cells, the copy of the next rank's first face too. */
int mps_field_staggered(mps_handle sim, const char *name, int dtype, void *data, int ndim, const int *dims,
                        const int64_t *extents, const int64_t *lo, const int64_t *strides, const int *faces, mps_handle *field);
/* The same field in another array of the same extents, strides and ghosts: time levels. Collective over the domain's ranks:
 * where one gives a wrong address, all get the error, and the field stays where it was. */
int mps_rebind(mps_handle field, void *data);

/* A model on the ranks of the domain; in libmpishard alone. Collective over the domain's ranks. The first one starts the
 * Python that $MPISHARD_PYTHON names, or the one that built the library.
 *   model    "file.py:function" or "package.module:function", or an object there that can be called: with the input
 *            fields as tensors of the domain's shape; it returns the output fields' new values
 *   every    runs at every so-manieth call, the first included; 0: 1
 *   mode     MPS_INFER or MPS_TRAIN
 */
int mps_hook(mps_handle sim, const char *model, int n_in, const mps_handle *in, int n_out, const mps_handle *out, int every,
             int mode, mps_handle *hook);
/* Run the model on the fields as they are now. Collective. On an error the outputs are as they were, unless the model
 * itself writes into its inputs. */
int mps_step(mps_handle hook);
/* Run it in a thread, on copies of the inputs' owned cells, while the solver goes on; mps_wait writes the outputs.
 * Collective. MPI must have been initialised with MPI_THREAD_MULTIPLE. */
int mps_start(mps_handle hook);
int mps_wait(mps_handle hook);

/* Join the other programs of the job by name. Collective over MPI_COMM_WORLD. timeout in seconds, 0: 60. */
int mps_join(const char *name, double timeout, mps_handle *program);
/* The communicator of this program's ranks, which is never freed. Not collective. */
int mps_comm(mps_handle program, MPI_Comm *comm);
/* How many ranks a program has; 0 where there is none of that name. Not collective. */
int mps_ranks(mps_handle program, const char *name, int *ranks);

/* Link fields with those of the same names in another program. Collective over both. depth 0: the other side's, or 2. */
int mps_connect(mps_handle program, const char *other, int n_out, const mps_handle *out, int n_into,
                const mps_handle *into, int policy, int depth, double timeout, mps_handle *link);
/* Put the out fields as they are now into a slot; they may be changed at once. Collective over this program. */
int mps_put(mps_handle link);
/* Fill the into fields with the oldest step not read; its number goes to *step (may be NULL). Collective. */
int mps_get(mps_handle link, int64_t *step);
/* Steps that were put are read first, then the other side sees the end. Collective over this program. */
int mps_close(mps_handle link);

/* Give back a handle of any kind, and set it to MPS_NULL. Collective where its making was. What mps_start has started on it
 * is waited for, and its outputs are written; where no mps_wait can follow, its error is returned here, after the release. */
int mps_release(mps_handle *handle);

#ifdef __cplusplus
}
#endif
#endif
