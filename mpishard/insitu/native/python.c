/* A model on the host's ranks: Python in the host's process, found and started at the first hook.
 *
 * No header and no library of Python's is needed to build this: what starts it is looked up in the library that it names.
 * Everything else goes through one door, which start.py opens: a function that takes the number of an operation, numbers
 * and a text, and is made by ctypes. Its other side is mpishard/insitu/host.py. */
#define _GNU_SOURCE
#include "native.h"

#include <dlfcn.h>
#include <fenv.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

enum { DOOR_VERSION = 2, PATH_BYTES = 4096 };
enum { ADOPT, FIELD, REBIND, HOOK, STEP, START, WAIT, RELEASE };

static struct {
    int64_t version, embedded;
    int64_t (*call)(int op, const int64_t *numbers, const char *text);
    char text[TEXT_BYTES]; /* which MPI the host has; once open, the last error */
} door = {DOOR_VERSION, 0, NULL, ""};

typedef struct { sim_t *sim; int64_t python, serial; int count, flying, ran; field_t **fields; } hook_t;

/* What is the host's while Python runs. Floating point: a host that traps on a NaN would end in torch, one that rounds
 * otherwise would get other results. Handlers of signals: modules set some when they are imported, as Python's signal does, and
 * what is first used, as torch's DataLoader; to look for them at every step would take longer than a step. */
typedef struct { fenv_t floats; int imports; struct sigaction handlers[NSIG]; } host_t;

static void host_leaves(host_t *host, int imports)
{
    fegetenv(&host->floats);
    fesetenv(FE_DFL_ENV);
    host->imports = imports;
    for (int s = 1; imports && s < NSIG; s++) sigaction(s, NULL, &host->handlers[s]);
}

static void host_returns(const host_t *host)
{
    fesetenv(&host->floats);
    for (int s = 1; host->imports && s < NSIG; s++) {
        struct sigaction now;
        if (sigaction(s, NULL, &now) == 0 && now.sa_handler != host->handlers[s].sa_handler) sigaction(s, &host->handlers[s], NULL);
    }
}

/* what Python's side returns, or its negative status with its text */
static int64_t call_importing(int op, int imports, const int64_t *numbers, const char *text)
{
    host_t host;
    host_leaves(&host, imports);
    int64_t result = door.call(op, numbers, text);
    host_returns(&host);
    return result < 0 ? fail((int)result, "%s", door.text) : result;
}

static int64_t call(int op, const int64_t *numbers, const char *text) { return call_importing(op, op == HOOK, numbers, text); }

/* finding and starting Python */

static const char ask[] =
    "exec \"${MPISHARD_PYTHON:-" MPS_PYTHON "}\" -c '\n"
    "import os, sys, sysconfig\n"
    "name, at = sysconfig.get_config_var(\"INSTSONAME\") or \"\", sysconfig.get_config_var(\"LIBDIR\") or \"\"\n"
    "files = [os.path.join(d, name) for d in (at, os.path.join(sys.base_prefix, \"lib\"))]\n"
    "print(\"mpishard\", sys.executable, next((f for f in files if \".so\" in name and os.path.isfile(f)), \"\"), sep=\"\\n\")\n"
    "' 2>&1 </dev/null";

/* The executable and the library, a line each. Asked once, by one rank. */
static int find(char **answer)
{
    const char *named = getenv("MPISHARD_PYTHON");
    FILE *pipe = popen(ask, "r");
    if ((*answer = calloc(1, PATH_BYTES)) == NULL) return fail(MPS_ERR_MEMORY, "hook: no memory");
    size_t n = pipe ? fread(*answer, 1, PATH_BYTES - 1, pipe) : 0;
    if (pipe) pclose(pipe);
    for (char *line = *answer; n && line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, "mpishard\n", 9)) continue;
        memmove(*answer, line, strlen(line) + 1); /* behind what Python, or a module that it loads, warns of */
        return MPS_OK;
    }
    return fail(MPS_ERR_PYTHON, "hook: Python was not found\n  expected: a Python that has mpishard, named by MPISHARD_PYTHON\n"
                "  got:      '%s': %.400s", named && *named ? named : MPS_PYTHON, *answer);
}

static const char boot[] =
    "def _mps(door, text, room):\n"
    "    try:\n"
    "        import importlib.util, os, runpy, sys\n"
    "        spec = importlib.util.find_spec('mpishard')\n"
    "        if spec is None or spec.origin is None:\n"
    "            raise ImportError('no package mpishard in ' + sys.executable + '\\n  fix:      name a Python that has it in MPISHARD_PYTHON, '\n"
    "                              'or install it there')\n"
    "        file = os.path.join(os.path.dirname(spec.origin), 'insitu', 'native', 'start.py')\n"
    "        runpy.run_path(file, {'DOOR': door})\n"
    "    except BaseException as error:\n"
    "        import ctypes\n"
    "        told = f'hook: Python did not start\\n{type(error).__name__}: {error}'.encode()[:room - 1] + b'\\0'\n"
    "        ctypes.memmove(text, told, len(told))\n"
    "_mps(%llu, %llu, %d)\n"
    "del _mps\n";

static int refused(const char *what, const char *got)
{
    return fail(MPS_ERR_PYTHON, "hook: %s\n  expected: Python 3.10 to 3.14 with a shared library, named by MPISHARD_PYTHON\n"
                "  got:      %s", what, got);
}

/* Start Python; the lock of its threads is free afterwards. */
static int start_python(char *answer, void **library)
{
    char *executable = strchr(answer, '\n') + 1, *path = strchr(executable, '\n'), locale[256];
    *path++ = 0;
    path[strcspn(path, "\n")] = 0;
    if (*path == 0) return refused("this Python has no shared library", executable);
    *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (*library == NULL) return refused("the library of Python cannot be loaded", dlerror());
    void (*set_name)(const wchar_t *) = (void (*)(const wchar_t *))dlsym(*library, "Py_SetProgramName");
    wchar_t *(*decode)(const char *, size_t *) = (wchar_t * (*)(const char *, size_t *)) dlsym(*library, "Py_DecodeLocale");
    void (*initialize)(int) = (void (*)(int))dlsym(*library, "Py_InitializeEx");
    void *(*save)(void) = (void *(*)(void))dlsym(*library, "PyEval_SaveThread");
    if (set_name == NULL || decode == NULL || initialize == NULL || save == NULL) return refused("another Python than expected", path);
    set_name(decode(executable, NULL)); /* by which it finds its environment */
    snprintf(locale, sizeof locale, "%s", setlocale(LC_CTYPE, NULL));
    initialize(0); /* no handlers of signals; but it sets the locale of characters */
    setlocale(LC_CTYPE, locale);
    save();
    return MPS_OK;
}

/* Open the door: in the Python that runs here (the host's own, or that of an earlier call), or in one that is started. */
static int begin(char *answer)
{
    char text[sizeof boot + 128], version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length, (*running)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    void *library = RTLD_DEFAULT;
    if (running == NULL || !running()) {
        int status = answer != NULL ? start_python(answer, &library) : refused("Python runs on other ranks only", "none here");
        if (status) return status;
        door.embedded = 1;
    }
    int (*run)(const char *, void *) = (int (*)(const char *, void *))dlsym(library, "PyRun_SimpleStringFlags");
    int (*ensure)(void) = (int (*)(void))dlsym(library, "PyGILState_Ensure");
    void (*leave)(int) = (void (*)(int))dlsym(library, "PyGILState_Release");
    if (run == NULL || ensure == NULL || leave == NULL) return refused("another Python than expected", "one without PyGILState_Ensure");
    MPI_Get_library_version(version, &length);
    snprintf(door.text, sizeof door.text, "%s", version);
    snprintf(text, sizeof text, boot, (unsigned long long)(uintptr_t)&door, (unsigned long long)(uintptr_t)door.text, (int)sizeof door.text);
    int state = ensure();
    run(text, NULL);
    leave(state);
    return door.call != NULL ? MPS_OK : fail(MPS_ERR_PYTHON, "%s", door.text);
}

static int release(int kind, void *object);

/* Collective */
static int opened(circle_t *circle)
{
    int (*running)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    int64_t here = running != NULL && running(), length = PATH_BYTES, values[3];
    char *answer = NULL;
    circle_start(circle, MPS_OK, 0, door.call != NULL, here, 0);
    int status = circle_finish(circle, own_limit(), values);
    if (status || values[0]) return status;
    if (!values[1]) {
        status = circle->rank == 0 ? find(&answer) : MPS_OK;
        status = circle_agree(circle, status, own_limit());
        if (!status) status = circle_tell(circle, &answer, &length, own_limit());
    }
    if (!status) {
        host_t host;
        host_leaves(&host, 1);
        status = door.call != NULL ? MPS_OK : begin(answer);
        host_returns(&host);
        status = circle_agree(circle, status, own_limit());
    }
    free(answer);
    if (!status) python_release = release;
    return status;
}

/* what Python knows */

static int adopt(sim_t *sim)
{
    int64_t numbers[2 + 5 * MAX_DIMS], *at = numbers;
    MPI_Comm plain; /* the grid is told; the host's topology may be another one */
    if (sim->python) return MPS_OK;
    int status = mpi_failed(MPI_Comm_split(sim->circle.comm, 0, sim->rank, &plain), "hook");
    if (status) return status;
    *at++ = MPI_Comm_c2f(plain);
    *at++ = sim->ndim;
    for (int d = 0; d < sim->ndim; d++) {
        *at++ = sim->shape[d];
        *at++ = sim->grid[d];
        *at++ = sim->coords[d];
        *at++ = sim->borders[d][sim->coords[d] + 1] - sim->borders[d][sim->coords[d]];
        *at++ = sim->periodic[d];
    }
    int64_t made = call(ADOPT, numbers, NULL);
    MPI_Comm_free(&plain);
    if (made > 0) sim->python = made;
    return made > 0 ? MPS_OK : (int)made;
}

/* The first cell that Python is shown, which knows of ghost cells along dims of the domain alone. */
static int64_t shown(const field_t *field)
{
    int64_t at = (int64_t)(intptr_t)field->data;
    for (int d = 0; d < field->layout.ndim && field->data != NULL; d++)
        if (field->layout.borders[d] == NULL) at += field->lo[d] * field->strides[d];
    return at;
}

static int known(field_t *field)
{
    sim_t *sim = field->sim;
    int64_t numbers[5 + 5 * MAX_DIMS], *at = numbers;
    if (field->python) return MPS_OK;
    *at++ = sim->python;
    *at++ = field->dtype;
    *at++ = shown(field);
    *at++ = field->layout.ndim;
    *at++ = field->faces;
    for (int d = 0; d < field->layout.ndim; d++) {
        int m = sim->ndim - 1;
        while (m >= 0 && field->layout.shards[m] != d) m--;
        const int64_t *borders = field->layout.borders[d];
        int64_t owned = m < 0 ? field->layout.shape[d] : borders[sim->coords[m] + 1] - borders[sim->coords[m]];
        int64_t lo = m < 0 ? 0 : field->lo[d], extent = m < 0 ? owned : field->extents[d];
        *at++ = m;
        *at++ = extent;
        *at++ = lo;
        *at++ = extent - lo - owned;
        *at++ = field->strides[d];
    }
    int64_t made = call(FIELD, numbers, field->name);
    if (made > 0) field->python = made;
    field->bound = field->binding;
    return made > 0 ? MPS_OK : (int)made;
}

static int rebound(field_t *field)
{
    int64_t numbers[2] = {field->python, shown(field)};
    if (field->bound == field->binding || field->released) return MPS_OK;
    int status = (int)call(REBIND, numbers, NULL);
    if (!status) field->bound = field->binding;
    return status;
}

/* the calls */

static void hook_free(hook_t *hook)
{
    for (int i = 0; i < hook->count; i++)
        if (hook->fields[i] != NULL) field_left(hook->fields[i]);
    sim_left(hook->sim);
    free(hook->fields);
    free(hook);
}

static int taken(hook_t *hook, int count, const mps_handle *given)
{
    for (int i = 0; i < count; i++) {
        field_t *field = hook->fields[hook->count++] = given != NULL ? object_of(given[i], OBJECT_FIELD) : NULL;
        if (field == NULL)
            return fail(MPS_ERR_ARGUMENT, "hook: field %d is none\n  expected: fields, from mps_field, that were not released", i);
        field->users++;
        if (field->sim != hook->sim) return fail(MPS_ERR_ARGUMENT, "hook: field '%s' is of another domain", field->name);
    }
    return MPS_OK;
}

int mps_hook(mps_handle handle, const char *model, int n_in, const mps_handle *in, int n_out, const mps_handle *out, int every,
             int mode, mps_handle *result)
{
    sim_t *sim = object_of(handle, OBJECT_SIM);
    if (result != NULL) *result = MPS_NULL;
    if (sim == NULL) return fail(MPS_ERR_ORDER, "hook: expected a domain, from mps_adopt, that was not released");
    hook_t *hook = calloc(1, sizeof *hook);
    int room = (n_in > 0 ? n_in : 0) + (n_out > 0 ? n_out : 0), status = MPS_OK;
    int64_t *numbers = calloc((size_t)room + 5, sizeof *numbers);
    if (hook != NULL) hook->fields = calloc((size_t)room + 1, sizeof *hook->fields);
    if (hook == NULL || numbers == NULL || hook->fields == NULL) {
        if (hook != NULL) free(hook->fields);
        free(hook);
        free(numbers);
        return circle_agree(&sim->circle, fail(MPS_ERR_MEMORY, "hook: no memory"), own_limit());
    }
    hook->sim = sim;
    sim->users++;
    if (result == NULL) status = fail(MPS_ERR_ARGUMENT, "hook: no place for the hook");
    else if (model == NULL || n_in < 0 || n_out < 0 || every < 0 || mode < MPS_INFER || mode > MPS_TRAIN)
        status = fail(MPS_ERR_ARGUMENT, "hook: arguments that fit none\n  expected: a model, counts and every of 0 or more, MPS_INFER or "
                      "MPS_TRAIN\n  got:      '%s', %d, %d, %d, %d", model ? model : "", n_in, n_out, every, mode);
    if (!status) status = taken(hook, n_in, in);
    if (!status) status = taken(hook, n_out, out);
    if (!status) status = object_room("hook");
    int counts[4] = {n_in, n_out, every, mode};
    uint64_t sum = digest(digest(0, counts, sizeof counts), model ? model : "", model ? strlen(model) : 0);
    for (int i = 0; i < hook->count && !status; i++) sum = digest(sum, hook->fields[i]->name, NAME_BYTES);
    status = circle_same(&sim->circle, status, own_limit(), sum, "hook");
    if (!status) status = opened(&sim->circle);
    /* one status after each, as the ranks go on together */
    if (!status) status = circle_agree(&sim->circle, adopt(sim), own_limit());
    for (int i = 0; i < hook->count && !status; i++) status = circle_agree(&sim->circle, known(hook->fields[i]), own_limit());
    for (int i = 0; i < hook->count && !status; i++) status = rebound(hook->fields[i]);
    if (!status) {
        int64_t first[5] = {sim->python, every ? every : 1, mode, n_in, n_out};
        memcpy(numbers, first, sizeof first);
        for (int i = 0; i < hook->count; i++) numbers[5 + i] = hook->fields[i]->python;
        int64_t made = call(HOOK, numbers, model);
        status = circle_agree(&sim->circle, made > 0 ? MPS_OK : (int)made, own_limit());
        hook->python = made;
    }
    free(numbers);
    if (status) {
        hook_free(hook);
        return status;
    }
    hook->serial = ++sim->hooks;
    *result = object_made(OBJECT_HOOK, hook);
    return MPS_OK;
}

static int run(mps_handle handle, int op, const char *name)
{
    hook_t *hook = object_of(handle, OBJECT_HOOK);
    int status = MPS_OK;
    int64_t call_of_all = op, values[3];
    if (hook == NULL) return fail(MPS_ERR_ORDER, "%s: expected a hook, from mps_hook, that was not released", name);
    if (hook->sim->released) return fail(MPS_ERR_ORDER, "%s: the domain was released", name);
    for (int i = 0; i < hook->count && !status; i++) {
        /* a field that was released since the start: Python keeps what came of it */
        if (op != WAIT || !hook->fields[i]->released) status = field_usable(hook->fields[i], name);
        call_of_all += 8 * (int64_t)hook->fields[i]->binding;
    }
    if (!status && hook->flying != (op == WAIT))
        status = hook->flying ? fail(MPS_ERR_ORDER, "%s: the last mps_start was not waited for\n  expected: mps_wait first", name)
                              : fail(MPS_ERR_ORDER, "%s: nothing was started\n  expected: mps_start first", name);
    /* the ranks are here, in the same call, before Python waits for them */
    call_of_all += hook->serial << 40;
    circle_start(&hook->sim->circle, status, 0, status ? status : call_of_all, -call_of_all, 0);
    status = circle_finish(&hook->sim->circle, own_limit(), values);
    if (!status && values[0] != -values[1])
        status = fail(MPS_ERR_ORDER, "%s: the ranks of the domain made different calls\n  expected: the same call for the same hook on all of "
                      "them, after the same calls of mps_rebind", name);
    for (int i = 0; i < hook->count && !status; i++) status = rebound(hook->fields[i]);
    if (status) return status;
    status = (int)call_importing(op, op == STEP && !hook->ran, &hook->python, NULL);
    if (op == STEP) hook->ran = 1;
    if (op == WAIT) hook->flying = 0;
    else if (op == START) hook->flying = status >= 0;
    return status;
}

int mps_step(mps_handle hook) { return run(hook, STEP, "step"); }
int mps_start(mps_handle hook) { return run(hook, START, "start"); }
int mps_wait(mps_handle hook) { return run(hook, WAIT, "wait"); }

static int release(int kind, void *object)
{
    int64_t id = 0;
    int status = MPS_OK;
    if (kind == OBJECT_SIM) id = ((sim_t *)object)->python;
    else if (kind == OBJECT_FIELD) id = ((field_t *)object)->sim->released ? 0 : ((field_t *)object)->python;
    else if (kind == OBJECT_HOOK) id = ((hook_t *)object)->sim->released ? 0 : ((hook_t *)object)->python;
    if (id) status = (int)call(RELEASE, &id, NULL);
    if (kind == OBJECT_HOOK) hook_free(object);
    return status;
}
