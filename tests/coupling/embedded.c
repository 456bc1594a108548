/* A host in C with a model on its own ranks: what goes right, and what goes wrong; it is alive after each. */
#define _GNU_SOURCE
#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <mpishard.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* which glibc sets by itself */
enum { SA_RESTORER = 0x04000000 };

static int rank, size;

static void must(int right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: %s; mps_error: %s\n", rank, what, mps_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int told(int status, int expected, const char *text) { return status == expected && strstr(mps_error(), text) != NULL; }

/* a name of ours: not the library's */
int fail(int a, int b);
int fail(int a, int b) { return a * b; }

/* what is the host's */
static struct sigaction handlers[64];
static MPI_Errhandler on_error;
static void noted(int check)
{
    for (int s = 1; s < 32; s++) {
        struct sigaction now;
        if (s == SIGKILL || s == SIGSTOP) continue;
        sigaction(s, NULL, &now);
        must(!check || (now.sa_handler == handlers[s].sa_handler && ((now.sa_flags ^ handlers[s].sa_flags) & ~SA_RESTORER) == 0), strsignal(s));
        handlers[s] = now;
    }
    MPI_Errhandler now;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &now);
    must(!check || now == on_error, "MPI_COMM_WORLD's error handler is another one");
    on_error = now;
    must(fegetexcept() == (FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW), "the traps are others");
    must(fegetround() == FE_UPWARD, "the rounding is another one");
    must(strcmp(setlocale(LC_ALL, NULL), "C") == 0, "the locale is another one");
    int over;
    MPI_Finalized(&over);
    must(!over, "MPI is finalised");
}

/* NX x NY cells, cut along the first dim; two ghost rows before, one after, one ghost column and three of padding */
enum { NX = 7, NY = 5, WIDTH = NY + 4 };
static int64_t rows, first;

static double value(int64_t i, int64_t j, int k) { return (double)(i * 10 + j + k); }

static void fill(double *a, int k)
{
    for (int64_t i = 0; i < (rows + 3) * WIDTH; i++) a[i] = -1000;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < NY; j++) a[(i + 2) * WIDTH + j + 1] = value(first + i, j, k);
}

static int is_box(const float *b, int k, double factor)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < NY; j++) {
            double sum = 0;
            for (int64_t x = first + i - 1; x <= first + i + 1; x++)
                for (int64_t y = j - 1; y <= j + 1; y++)
                    if (x >= 0 && x < NX && y >= 0 && y < NY) sum += value(x, y, k);
            if (fabs(b[j * rows + i] - factor * sum) > 1e-4 * fabs(sum)) return 0;
        }
    return 1;
}

static char models[4096];
static const char *named(const char *name)
{
    static char text[8192];
    snprintf(text, sizeof text, "%s:%s", models, name);
    return text;
}

static void wrong_python(const char *text)
{
    int64_t shape[1] = {4};
    mps_handle sim, u, hook;
    double a[4] = {0};
    int grid[1] = {1};
    must(mps_adopt(MPI_COMM_SELF, 1, shape, grid, NULL, NULL, &sim) == MPS_OK, "adopt");
    must(mps_field(sim, "u", MPS_FLOAT64, a, 1, NULL, shape, NULL, NULL, &u) == MPS_OK, "field");
    for (int i = 0; i < 2; i++)
        must(told(mps_hook(sim, named("box"), 1, &u, 0, NULL, 1, MPS_INFER, &hook), MPS_ERR_PYTHON, text), text);
    must(told(mps_step(hook), MPS_ERR_ORDER, "expected a hook"), "there is no hook");
    must(mps_release(&sim) == MPS_OK, "release");
    noted(1);
    printf("THE PYTHON IS REFUSED\n");
}

static void beside(mps_handle sim, mps_handle u, mps_handle tau, double *a, float *b)
{
    mps_handle hook, train;
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 2, MPS_INFER, &hook) == MPS_OK, "hook");
    must(mps_hook(sim, named("learn"), 1, &u, 0, NULL, 1, MPS_TRAIN, &train) == MPS_OK, "hook");
    for (int k = 0; k < 4; k++) {
        fill(a, k);
        must(mps_start(hook) == (k % 2 ? MPS_NO_TURN : MPS_OK), "start");
        must(told(mps_start(hook), MPS_ERR_ORDER, "not waited for"), "started twice");
        must(told(mps_step(hook), MPS_ERR_ORDER, "not waited for"), "step between start and wait");
        must(mps_rebind(u, a) == MPS_OK, "rebind between start and wait");
        if (k % 2 == 0) {
            mps_handle idle, other, late;
            must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, &idle) == MPS_OK, "hook between start and wait");
            must(told(mps_step(idle), MPS_ERR_ORDER, "not waited for") && mps_release(&idle) == MPS_OK, "step of another hook");
            /* the model may ask the ranks something now */
            must(mps_field(sim, "late", MPS_FLOAT32, b, 2, NULL, (int64_t[]){rows, NY}, NULL, (int64_t[]){4, rows * 4}, &late) == MPS_OK, "field");
            must(told(mps_hook(sim, named("box"), 1, &late, 1, &tau, 1, MPS_INFER, &other), MPS_ERR_ORDER, "not waited for"), "hook of a new field");
            must(mps_release(&late) == MPS_OK, "release");
        }
        fill(a, 100);
        must(mps_wait(hook) == (k % 2 ? MPS_NO_TURN : MPS_OK), "wait");
        must(is_box(b, k - k % 2, 1), "what was there at the start counts");
    }
    must(told(mps_start(train), MPS_ERR_ORDER, "infers"), "a hook that trains cannot run beside");
    must(mps_start(hook) == MPS_OK && mps_release(&hook) == MPS_OK, "release of one that runs");

    /* what else is released while a model runs leaves it alone; of its own, its end is told once */
    for (int raises = 0; raises < 2; raises++)
        for (int what = 0; what < 5; what++) {
            int64_t sizes[2] = {rows, NY}, shape[2] = {NX, NY}, columns[2] = {8, rows * 8};
            int grid[2] = {size, 1};
            double *in = calloc((size_t)(rows * NY), 2 * sizeof *in), *to = in + rows * NY;
            mps_handle self, x, y, z, idle;
            for (int64_t i = 0; i < rows * NY; i++) in[i] = 1;
            must(mps_adopt(MPI_COMM_WORLD, 2, shape, grid, sizes, NULL, &self) == MPS_OK, "adopt");
            must(mps_field(self, "x", MPS_FLOAT64, in, 2, NULL, sizes, NULL, columns, &x) == MPS_OK, "field");
            must(mps_field(self, "y", MPS_FLOAT64, to, 2, NULL, sizes, NULL, columns, &y) == MPS_OK, "field");
            must(mps_field(self, "z", MPS_FLOAT64, in, 2, NULL, sizes, NULL, columns, &z) == MPS_OK, "field");
            must(mps_hook(self, named("box"), 1, &z, 1, &z, 1, MPS_INFER, &idle) == MPS_OK, "hook");
            must(mps_hook(self, named(raises ? "raises_late" : "slow_box"), 1, &x, 1, &y, 1, MPS_INFER, &hook) == MPS_OK, "hook");
            must(mps_start(hook) == MPS_OK, "start");
            mps_handle *released[] = {&idle, &z, &y, &hook, &self};
            int status = mps_release(released[what]);
            if (what >= 3) must(raises ? told(status, MPS_ERR_MODEL, "no such regime") : status == MPS_OK, "release of what runs");
            else must(status == MPS_OK, "release");
            if (what < 2) must(to[0] == 0, "outputs before the wait");
            if (what < 3) {
                status = mps_wait(hook);
                must(raises ? told(status, MPS_ERR_MODEL, "no such regime") : status == MPS_OK, "what came of it");
                must(told(mps_wait(hook), MPS_ERR_ORDER, "nothing was started"), "waited for once");
            }
            must((to[0] != 0) == !raises, "outputs");
            must(hook == MPS_NULL || mps_release(&hook) == MPS_OK, "release");
            must(self == MPS_NULL || mps_release(&self) == MPS_OK, "release");
            mps_release(&x), mps_release(&y), mps_release(&z), mps_release(&idle);
            free(in);
        }
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 2, MPS_INFER, &hook) == MPS_OK && mps_release(&hook) == MPS_OK, "the domain goes on");

    /* a rank that does not come: no hang, and the others know */
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "hook");
    if (rank == 0) {
        setenv("MPISHARD_TIMEOUT", "1", 1);
        must(told(mps_rebind(u, a), MPS_ERR_LOST, "2 ranks within 2 s"), "alone in a call");
        must(told(mps_step(hook), MPS_ERR_LOST, "lost each other"), "and afterwards");
        /* nor does one that comes later yet end a host that has let go of all */
        must(mps_release(&hook) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&sim) == MPS_OK, "release");
    } else {
        sleep(4);
        must(mps_rebind(u, a) == MPS_OK, "the last one");
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

/* ghost levels: before the owned ones, along an array dim that is no dim of the domain, where a model neither reads nor writes */
static void levels(mps_handle sim)
{
    enum { DEEP = 5, SKIP = 2 };
    for (int last = 0; last < 2; last++) {
        int dims[3] = {last ? 0 : -1, last ? 1 : 0, last ? -1 : 1};
        int64_t extents[3] = {last ? rows : DEEP, last ? NY : rows, last ? DEEP : NY}, lo[3] = {last ? 0 : SKIP, 0, last ? SKIP : 0};
        int64_t cells = DEEP * rows * NY, step = last ? 1 : rows * NY, next = last ? DEEP : 1;
        double *in = malloc((size_t)(3 * cells) * sizeof *in), *again = in + cells, *out = again + cells;
        mps_handle u, v, hook;
        must(mps_field(sim, "deep", MPS_FLOAT64, in, 3, dims, extents, lo, NULL, &u) == MPS_OK, "field with ghost levels");
        must(mps_field(sim, "sums", MPS_FLOAT64, out, 3, dims, extents, lo, NULL, &v) == MPS_OK, "field with ghost levels");
        must(mps_hook(sim, named(last ? "summed_last" : "summed"), 1, &u, 1, &v, 1, MPS_INFER, &hook) == MPS_OK, "hook");
        for (int k = 0; k < 2; k++) {
            double *now = k ? again : in;
            for (int64_t i = 0; i < rows * NY; i++)
                for (int n = 0; n < DEEP; n++) now[i * next + n * step] = n < SKIP ? -1000 : i + n + k, out[i * next + n * step] = -7;
            if (k) must(mps_rebind(u, now) == MPS_OK, "rebind");
            must(mps_step(hook) == MPS_OK, "step");
            for (int64_t i = 0; i < rows * NY; i++)
                for (int n = 0; n < DEEP; n++)
                    must(out[i * next + n * step] == (n < SKIP ? -7 : (double)(3 * (i + k) + 2 + 3 + 4)), "the owned levels alone");
        }
        must(mps_release(&hook) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&v) == MPS_OK, "release");
        free(in);
    }
}

/* ranks without cells, and without arrays */
static void idle(void)
{
    int grid[2] = {size, 1}, status;
    int64_t shape[2] = {3, 3}, sizes[2] = {rank ? 0 : 3, 3}, extents[2] = {sizes[0] + 2, 5}, lo[2] = {1, 1};
    double cells[3][25] = {{0}}, *none = NULL;
    mps_handle sim, u, v, hook;
    must(mps_adopt(MPI_COMM_WORLD, 2, shape, grid, sizes, NULL, &sim) == MPS_OK, "adopt");
    must(mps_field(sim, "u", MPS_FLOAT64, rank ? none : cells[0], 2, NULL, extents, lo, NULL, &u) == MPS_OK, "field");
    must(mps_field(sim, "v", MPS_FLOAT64, rank ? none : cells[1], 2, NULL, extents, lo, NULL, &v) == MPS_OK, "field");
    must(mps_hook(sim, named("box"), 1, &u, 1, &v, 1, MPS_INFER, &hook) == MPS_OK, "hook");
    for (int k = 0; k < 4; k++) {
        double *now = cells[k % 2 ? 2 : 0];
        for (int i = 0; i < 9; i++) now[(1 + i / 3) * 5 + 1 + i % 3] = k + 1;
        /* an array that comes or goes is one of those that are swapped */
        must(mps_rebind(u, rank && k != 1 ? none : now) == MPS_OK && mps_step(hook) == MPS_OK, "step");
        must(rank || (cells[1][12] == 9 * (k + 1) && cells[1][6] == 4 * (k + 1)), "box");
    }
    /* one rank has no memory for as many ghost cells */
    extents[0] = rank ? (int64_t)1 << 50 : 5;
    mps_handle vast, lost;
    must(mps_field(sim, "vast", MPS_FLOAT64, rank ? none : cells[0], 2, NULL, extents, lo, NULL, &vast) == MPS_OK, "vast");
    status = mps_hook(sim, named("box"), 1, &vast, 1, &v, 1, MPS_INFER, &lost);
    must(size == 1 ? status == MPS_OK && mps_release(&lost) == MPS_OK : told(status, MPS_ERR_ARGUMENT, "field 'vast': the memory as described"), "vast");
    must(mps_step(hook) == MPS_OK && mps_release(&vast) == MPS_OK, "the others go on");
    must(mps_release(&hook) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&sim) == MPS_OK && mps_release(&v) == MPS_OK, "release");
}

/* a Cartesian communicator is asked for its topology, whether or not the grid is given too */
static void around(void)
{
    int grid[2] = {size, 1}, other[2] = {1, size}, both[2] = {1, 1}, none[2] = {0, 0};
    int64_t shape[2] = {3 * size, 3}, extents[2] = {5, 5}, lo[2] = {1, 1};
    MPI_Comm ring, deep;
    mps_handle sim, u, v, hook;
    MPI_Cart_create(MPI_COMM_WORLD, 2, grid, both, 0, &ring);
    for (int way = 0; way < 4; way++) {
        double in[25] = {0}, out[25] = {0};
        for (int i = 0; i < 9; i++) in[(1 + i / 3) * 5 + 1 + i % 3] = 1;
        must(mps_adopt(ring, 2, shape, way % 2 ? grid : NULL, NULL, way < 2 ? NULL : none, &sim) == MPS_OK, "adopt");
        must(mps_field(sim, "u", MPS_FLOAT64, in, 2, NULL, extents, lo, NULL, &u) == MPS_OK, "field");
        must(mps_field(sim, "v", MPS_FLOAT64, out, 2, NULL, extents, lo, NULL, &v) == MPS_OK, "field");
        must(mps_hook(sim, named("ring"), 1, &u, 1, &v, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "ring");
        for (int i = 0; i < 9; i++) must(out[(1 + i / 3) * 5 + 1 + i % 3] == (way < 2), "periodic as the communicator");
        must(mps_release(&hook) == MPS_OK && mps_release(&sim) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&v) == MPS_OK, "release");
    }
    if (size > 1) {
        must(told(mps_adopt(ring, 2, shape, other, NULL, NULL, &sim), MPS_ERR_ARGUMENT, "contradicts the communicator's topology"), "another grid");
        must(told(mps_adopt(ring, 2, shape, rank ? grid : other, NULL, NULL, &sim), MPS_ERR_ARGUMENT, "contradicts"), "another grid on one rank");
    }
    /* of other dims than the domain's */
    int three[3] = {size, 1, 1}, all[3] = {1, 1, 1};
    MPI_Cart_create(MPI_COMM_WORLD, 3, three, all, 0, &deep);
    must(told(mps_adopt(deep, 2, shape, NULL, NULL, NULL, &sim), MPS_ERR_ARGUMENT, "no grid of ranks"), "a communicator of other dims");
    must(mps_adopt(deep, 2, shape, grid, NULL, NULL, &sim) == MPS_OK && mps_release(&sim) == MPS_OK, "adopt");
    MPI_Comm_free(&ring);
    MPI_Comm_free(&deep);
}

int main(int argc, char **argv)
{
    int level;
    mps_handle sim, self, u, v, tau, hook, kept, none = MPS_NULL;
    int64_t shape[2] = {NX, NY};
    must(told(mps_adopt(MPI_COMM_WORLD, 2, shape, NULL, NULL, NULL, &sim), MPS_ERR_MPI, "not initialised"), "before MPI_Init");
    const char *part = argv[1];
    snprintf(models, sizeof models, "%s/closure_of_host.py", argv[2]);
    if (strcmp(part, "threads") == 0) MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    else MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW);
    fesetround(FE_UPWARD);
    noted(0);
    if (strncmp(part, "wrong ", 6) == 0) {
        wrong_python(part + 6);
        MPI_Finalize();
        return 0;
    }

    MPI_Comm cart;
    int grid[2] = {size, 1}, periods[2] = {0, 0};
    rows = rank ? 1 : NX - (size - 1);
    first = rank ? NX - size + rank : 0;
    int64_t sizes[2] = {rows, NY};
    MPI_Cart_create(MPI_COMM_WORLD, 2, grid, periods, 0, &cart);
    must(mps_adopt(cart, 2, shape, NULL, sizes, NULL, &sim) == MPS_OK, "adopt");
    MPI_Comm_free(&cart); /* it was duplicated */
    int64_t extents[2] = {rows + 3, WIDTH}, lo[2] = {2, 1}, few[2] = {rows + 1, NY}, cells[2] = {WIDTH, 1};
    int64_t padded[2] = {rows + 3, NY + 1}, bytes[2] = {WIDTH * 8, 8}, columns[2] = {4, rows * 4};
    double *a = calloc((size_t)((rows + 3) * WIDTH), sizeof *a), *other = calloc((size_t)((rows + 3) * WIDTH), sizeof *a);
    float *b = calloc((size_t)(rows * NY), sizeof *b);
    must(told(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, rank ? extents : few, lo, bytes, &u), MPS_ERR_ARGUMENT, "too short"), "size");
    must(told(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, extents, lo, rank ? bytes : cells, &u), MPS_ERR_ARGUMENT, "share memory"), "strides");
    must(told(mps_field(sim, "u", 77, a, 2, NULL, extents, lo, bytes, &u), MPS_ERR_ARGUMENT, "dtype 77"), "dtype");
    must(told(mps_field(sim, "u", MPS_FLOAT64, rank ? a : NULL, 2, NULL, extents, lo, bytes, &u), MPS_ERR_ARGUMENT, "null"), "null");
    must(told(mps_field(sim, "u", MPS_FLOAT64, (char *)a + (rank ? 0 : 4), 2, NULL, extents, lo, bytes, &u), MPS_ERR_ARGUMENT, "a multiple of 8"), "unaligned");
    for (int wrong = 0; wrong < 3; wrong++) {
        /* levels that are fewer than what lies before the first owned one, or less than none */
        int along[3] = {0, 1, -1};
        int64_t levels[3] = {rows + 3, WIDTH, wrong ? 3 : -3}, before[3] = {2, 1, wrong == 1 ? 5 : wrong ? INT64_MAX : 0};
        must(told(mps_field(sim, "u", MPS_FLOAT64, a, 3, along, levels, before, NULL, &u), MPS_ERR_ARGUMENT, "array dim 2 is too short"), "levels");
    }
    /* every second cell of rows of an odd length: the next row begins between the last one's cells and their double */
    int64_t seconds[2] = {rows + 3, NY}, after[2] = {2, 0}, odd[2] = {(2 * NY - 1) * 8, 16};
    must(mps_field(sim, "odd", MPS_FLOAT64, a, 2, NULL, seconds, after, odd, &u) == MPS_OK, "field of every second cell");
    must(mps_release(&u) == MPS_OK, "release");
    odd[0] -= 16;
    must(told(mps_field(sim, "odd", MPS_FLOAT64, a, 2, NULL, seconds, after, odd, &u), MPS_ERR_ARGUMENT, "share memory"), "rows that meet");
    must(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, padded, lo, bytes, &u) == MPS_OK, "field in long rows");
    must(told(mps_rebind(u, NULL), MPS_ERR_ARGUMENT, "null") && told(mps_rebind(u, (char *)a + 1), MPS_ERR_ARGUMENT, "a multiple of 8"), "rebind");
    must(mps_rebind(u, a) == MPS_OK, "rebind");
    must(told(mps_field(sim, "u", MPS_FLOAT64, a, 2, NULL, padded, lo, bytes, &v), MPS_ERR_ARGUMENT, "used twice"), "a name used twice");
    must(mps_field(sim, "tau", MPS_FLOAT32, b, 2, NULL, sizes, NULL, columns, &tau) == MPS_OK, "field in Fortran's order");
    must(told(mps_step(none), MPS_ERR_ORDER, "expected a hook") && told(mps_step(u), MPS_ERR_ORDER, "expected a hook"), "not a hook");

    setenv("MPISHARD_PYTHON", "/no where/python", 1);
    must(told(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_PYTHON, "/no where/python"), "no Python");
    unsetenv("MPISHARD_PYTHON");
    /* of which Python complains before it says where it is */
    setenv("PYTHONWARNINGS", "ignore::no_such.module.Warning", 1);
    if (strcmp(part, "threads") == 0) {
        beside(sim, u, tau, a, b);
        noted(1);
        if (rank == 0) printf("THE SOLVER GOES ON\n");
        MPI_Finalize();
        return 0;
    }
    /* bytes that are no text of Python's */
    must(mps_field(sim, "\xe9", MPS_FLOAT64, other, 2, NULL, padded, lo, bytes, &v) == MPS_OK, "field");
    must(mps_hook(sim, named("box"), 1, &v, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "a name that is no text");
    must(mps_release(&hook) == MPS_OK && mps_release(&v) == MPS_OK, "release");
    must(told(mps_hook(sim, "\xe9.py:box", 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "no file"), "no file");
    must(told(mps_hook(sim, "nowhere.py:box", 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "no file"), "no file");
    must(told(mps_hook(sim, "no_such_module:box", 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "no_such_module"), "no module");
    must(told(mps_hook(sim, "box", 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "no ':'"), "no function");
    must(told(mps_hook(sim, named("absent"), 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "'raises_on_one'"), "no such function");
    must(told(mps_hook(sim, named("not_callable"), 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "of type int"), "not a function");
    must(told(mps_hook(sim, named("box"), 1, &none, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_ARGUMENT, "field 0 is none"), "no field");
    must(told(mps_hook(sim, named("box"), 1, &sim, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_ARGUMENT, "field 0 is none"), "not a field");
    must(told(mps_hook(sim, named("box"), 1, &u, 1, &tau, -1, MPS_INFER, &hook), MPS_ERR_ARGUMENT, "every"), "every");
    char broken[4096];
    snprintf(broken, sizeof broken, "%s/broken_closure.py:model", argv[2]);
    must(told(mps_hook(sim, broken, 1, &u, 1, &tau, 1, MPS_INFER, &hook), MPS_ERR_MODEL, "no weights here\n  at: "), "a file that one rank cannot import");

    /* right */
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 2, MPS_INFER, &hook) == MPS_OK, "hook");
    for (int k = 0; k < 4; k++) {
        fill(a, k);
        must(mps_step(hook) == (k % 2 ? MPS_NO_TURN : MPS_OK), "step");
        must(is_box(b, k - k % 2, 1), "box");
    }
    noted(1);
    fill(a, 2);
    must(mps_hook(sim, named("handles"), 1, &u, 1, &tau, 1, MPS_INFER, &kept) == MPS_OK && mps_step(kept) == MPS_OK, "a model that handles signals");
    noted(1);
    must(mps_release(&kept) == MPS_OK, "release");
    must(told(mps_wait(hook), MPS_ERR_ORDER, "nothing was started"), "wait alone");
    if (size > 1) must(told(mps_start(hook), MPS_ERR_ORDER, "MPI_THREAD_MULTIPLE"), "the thread level");
    must(mps_release(&hook) == MPS_OK && hook == MPS_NULL, "release");

    levels(sim);
    around();
    idle();

    /* models that are not right: nothing is written */
    static const struct { const char *name, *text; } wrong[] = {
        {"raises_on_one", "ValueError: no such regime\n  at: "}, {"raises_late", "no such regime"}, {"leaves", "SystemExit: 3"},
        {"raises_long", "closure_of_host.py:"}, {"raises_untold", "Untold: (no text"}, {"raises_in_torch", ", in raises_in_torch"},
        {"refused", ", in refused"},
        {"misshapen", "does not fit"}, {"two", "does not fit"}, {"plain", "does not fit"},
    };
    fill(a, 7);
    for (int i = 0; i < 10; i++) {
        must(mps_hook(sim, named(wrong[i].name), 1, &u, 1, &tau, 0, MPS_INFER, &hook) == MPS_OK, "hook");
        for (int n = 0; n < 2; n++) must(told(mps_step(hook), MPS_ERR_MODEL, wrong[i].text), wrong[i].name);
        must(is_box(b, 2, 1), "the output is as it was");
        mps_release(&hook);
    }
    must(mps_hook(sim, named("not_numbers"), 1, &u, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "the host's traps are not Python's");
    must(isnan(b[0]), "NaN");
    mps_release(&hook);

    /* several outputs, by name; training */
    mps_handle inout[2] = {u, tau}, train;
    const char *home[] = {"closure_of_host.py:", ", in __call__", "at: math:sqrt"};
    for (int i = 0; i < 3; i++) {
        must(mps_hook(sim, i == 2 ? "math:sqrt" : named(i ? "instance" : "box"), 2, inout, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK, "hook");
        must(told(mps_step(hook), MPS_ERR_MODEL, "TypeError: ") && strstr(mps_error(), home[i]) != NULL, "arguments that do not fit");
        mps_release(&hook);
    }
    memset(b, 0, (size_t)(rows * NY) * sizeof *b);
    must(mps_hook(sim, named("both"), 2, inout, 2, inout, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "two fields");
    must(is_box(b, 7, 1) && a[2 * WIDTH + 1] == value(first, 0, 8) && a[0] == -1000, "two outputs");
    mps_release(&hook);
    must(mps_hook(sim, named("learn"), 1, &u, 0, NULL, 1, MPS_TRAIN, &train) == MPS_OK, "hook");
    must(mps_hook(sim, named("learned"), 1, &u, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK, "hook");
    for (int k = 0; k < 3; k++) must(mps_step(train) == MPS_OK, "training");
    must(mps_step(hook) == MPS_OK && is_box(b, 8, 1 - 0.512), "what was learned");
    mps_release(&train);
    mps_release(&hook);

    /* time levels, and ranks that do not go together */
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK, "hook");
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, &kept) == MPS_OK, "hook");
    for (int k = 0; k < 4; k++) {
        double *now = k % 2 ? a : other;
        fill(now, 20 + k);
        must(mps_rebind(u, now) == MPS_OK && mps_step(hook) == MPS_OK && is_box(b, 20 + k, 1), "rebind");
    }
    if (size > 1) {
        must(told(mps_step(rank ? hook : kept), MPS_ERR_ORDER, "different calls"), "another hook on one rank");
        must(told(rank ? mps_rebind(u, other) : mps_step(hook), MPS_ERR_ORDER, "different calls"), "rebind on one rank");
        must(told(mps_rebind(rank ? u : tau, rank ? (void *)other : (void *)b), MPS_ERR_ORDER, "different"), "another field on one rank");
        must(told(mps_hook(sim, named(rank ? "box" : "both"), 1, &u, 1, &tau, 1, MPS_INFER, &train), MPS_ERR_ORDER, "different arguments"), "another model on one rank");
    }
    must(told(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, rank ? &train : NULL), MPS_ERR_ARGUMENT, "no place"), "no place on one rank");
    must(told(mps_rebind(u, rank ? other : NULL), MPS_ERR_ARGUMENT, "null"), "null on one rank");
    fill(a, 25);
    must(mps_step(hook) == MPS_OK && is_box(b, 25, 1), "the field is where it was");
    must(mps_rebind(u, other) == MPS_OK, "rebind");
    fill(other, 30);
    must(mps_step(hook) == MPS_OK && is_box(b, 30, 1), "the ranks are together again");

    /* a domain of one rank, and a field of another domain */
    int one[2] = {1, 1};
    int64_t small[2] = {3, 3};
    double nine[9] = {0}, more[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    must(mps_adopt(MPI_COMM_SELF, 2, small, one, NULL, NULL, &self) == MPS_OK, "adopt");
    must(mps_field(self, "u", MPS_FLOAT64, more, 2, NULL, small, NULL, NULL, &v) == MPS_OK, "field");
    must(told(mps_hook(sim, named("box"), 1, &v, 1, &tau, 1, MPS_INFER, &train), MPS_ERR_ARGUMENT, "another domain"), "another domain");
    mps_handle w;
    must(mps_field(self, "w", MPS_FLOAT64, nine, 2, NULL, small, NULL, NULL, &w) == MPS_OK, "field");
    must(mps_hook(self, named("box"), 1, &v, 1, &w, 1, MPS_INFER, &train) == MPS_OK && mps_step(train) == MPS_OK && nine[4] == 9, "one rank");
    must(mps_release(&self) == MPS_OK && told(mps_step(train), MPS_ERR_ORDER, "was released"), "the domain was released");
    must(mps_release(&v) == MPS_OK && mps_release(&train) == MPS_OK && mps_release(&w) == MPS_OK, "release after the domain");

    /* what was released */
    mps_handle copy = tau;
    must(mps_release(&tau) == MPS_OK, "release");
    must(told(mps_step(hook), MPS_ERR_ORDER, "field 'tau' was released"), "a field released and used");
    must(told(mps_rebind(copy, b), MPS_ERR_ORDER, "expected a field") && told(mps_release(&copy), MPS_ERR_ORDER, "released"), "a handle of the past");
    must(mps_field(sim, "tau", MPS_FLOAT32, b, 2, NULL, sizes, NULL, columns, &tau) == MPS_OK, "the name is free again");
    must(told(mps_rebind(copy, b), MPS_ERR_ORDER, "expected a field"), "a handle of the past is not the new one's");
    mps_release(&hook);
    must(mps_hook(sim, named("box"), 1, &u, 1, &tau, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "hook");
    copy = sim;
    must(mps_release(&sim) == MPS_OK && told(mps_step(hook), MPS_ERR_ORDER, "was released"), "the domain was released");
    must(told(mps_field(copy, "x", MPS_FLOAT32, b, 2, NULL, sizes, NULL, columns, &v), MPS_ERR_ORDER, "not released"), "field of a domain of the past");
    must(mps_release(&hook) == MPS_OK && mps_release(&kept) == MPS_OK && mps_release(&u) == MPS_OK && mps_release(&tau) == MPS_OK, "release");
    noted(1);
    free(a);
    free(b);
    free(other);

    /* handles outlive MPI: their use is an error, and their release is not */
    must(mps_adopt(MPI_COMM_WORLD, 2, shape, grid, sizes, NULL, &sim) == MPS_OK, "adopt");
    double *last = calloc((size_t)(rows * NY), sizeof *last);
    must(mps_field(sim, "u", MPS_FLOAT64, last, 2, NULL, sizes, NULL, NULL, &u) == MPS_OK, "field");
    must(mps_hook(sim, named("box"), 1, &u, 1, &u, 1, MPS_INFER, &hook) == MPS_OK && mps_step(hook) == MPS_OK, "hook");
    MPI_Finalize();
    for (int k = 0; k < 6; k++) {
        int status = k == 0 ? mps_field(sim, "v", MPS_FLOAT64, last, 2, NULL, sizes, NULL, NULL, &v)
            : k == 1 ? mps_rebind(u, last) : k == 2 ? mps_hook(sim, named("box"), 1, &u, 1, &u, 1, MPS_INFER, &train)
            : k == 3 ? mps_step(hook) : k == 4 ? mps_start(hook) : mps_join("late", 1, &v);
        if (!told(status, MPS_ERR_MPI, "MPI is finalized")) return 1;
    }
    if (mps_release(&hook) || mps_release(&u) || mps_release(&sim)) return 1;
    free(last);
    if (rank == 0) printf("EMBEDDED C IS RIGHT %d\n", fail(2, 3));
    return 0;
}
