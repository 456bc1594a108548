/* Errors, waits that end, ranks that decide together, and how the programs of a job find each other by name. */
#define _GNU_SOURCE
#include "native.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char error_text[TEXT_BYTES];

const char *mps_error(void) { return error_text; }

int fail(int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

int mpi_failed(int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int length;
    if (code == MPI_SUCCESS) return MPS_OK;
    MPI_Error_string(code, text, &length);
    return fail(MPS_ERR_MPI, "%s: MPI says: %s", what, text);
}

int mpi_ready(void)
{
    int begun = 0, over = 0;
    MPI_Initialized(&begun);
    MPI_Finalized(&over);
    if (!begun || over)
        return fail(MPS_ERR_MPI, "MPI is %s\n  expected: MPI_Init before, MPI_Finalize after all calls of mpishard",
                    over ? "finalized" : "not initialised");
    int level, main = 1;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED) MPI_Is_thread_main(&main);
    if (main) return MPS_OK;
    return fail(MPS_ERR_ORDER, "MPI allows no call in this thread\n  expected: the thread that initialised MPI\n  got:      another one, with %s\n"
                "  fix:      call from that thread, or initialise MPI by MPI_Init_thread with MPI_THREAD_SERIALIZED or more",
                level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED");
}

void ranks_add(ranks_t *ranks, int rank)
{
    int *last = ranks->ranges ? ranks->ends[ranks->ranges - 1] : NULL;
    ranks->count++;
    if (last != NULL && last[1] == rank - 1) last[1] = rank;
    else if (ranks->ranges < LISTED) {
        ranks->ends[ranks->ranges][0] = ranks->ends[ranks->ranges][1] = rank;
        ranks->ranges++;
    }
}

void ranks_text(const ranks_t *ranks, char *text, size_t room)
{
    char words[2 * LISTED + 1][32];
    int n = 0, known = 0;
    for (int i = 0; i < ranks->ranges; i++) {
        int first = ranks->ends[i][0], last = ranks->ends[i][1];
        known += last - first + 1;
        snprintf(words[n++], sizeof *words, last > first + 1 ? "%d-%d" : "%d", first, last);
        if (last == first + 1) snprintf(words[n++], sizeof *words, "%d", last);
    }
    if (ranks->count > known) snprintf(words[n++], sizeof *words, "others");
    snprintf(text, room, "rank%s%s", ranks->count > 1 ? "s" : "", n ? "" : " none");
    for (int i = 0; i < n; i++)
        snprintf(text + strlen(text), room - strlen(text), "%s%s", i == 0 ? " " : i == n - 1 ? " and " : ", ", words[i]);
    if (ranks->count > 8) snprintf(text + strlen(text), room - strlen(text), " (%d ranks)", ranks->count);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void (*background)(void) = NULL;

patience_t patience(double timeout)
{
    patience_t wait = {now(), timeout, 0, 0};
    wait.looked = wait.start;
    return wait;
}

int patient(patience_t *wait)
{
    double passed = now() - wait->start;
    if ((++wait->turns % 8 == 0 || passed >= 3e-4) && background != NULL) background();
    if (passed < 3e-4) {
        sched_yield();
        return 1;
    }
    double pause = passed / 16 < 4e-3 ? passed / 16 : 4e-3;
    struct timespec t = {0, (long)(1e9 * pause)};
    nanosleep(&t, NULL);
    return passed < wait->timeout;
}

int time_to_look(patience_t *wait)
{
    double t = now();
    if (t - wait->looked < 0.2) return 0;
    wait->looked = t;
    return 1;
}

/* decisions of all ranks of a program */

/* what a variable says that is no such number: below 0 */
static double limit_given(void)
{
    const char *text = getenv("MPISHARD_TIMEOUT");
    if (text == NULL || !*text) return 300;
    char *end;
    double seconds = strtod(text, &end);
    return end != text && end[strspn(end, " \t\n")] == 0 && seconds >= 0 ? seconds : -1;
}

int limit_fits(const char *call)
{
    if (limit_given() >= 0) return MPS_OK;
    return fail(MPS_ERR_ARGUMENT, "%s: MPISHARD_TIMEOUT is '%.80s'\n  expected: seconds >= 0, 0 to wait for ever", call, getenv("MPISHARD_TIMEOUT"));
}

double own_limit(void)
{
    double seconds = limit_given();
    /* where it is none the ranks agree on that, once */
    return seconds > 0 ? seconds : seconds < 0 ? 300 : 1e9;
}

void circle_free(circle_t *circle)
{
    if (!circle->broken) MPI_Comm_free(&circle->comm);
}

static int complete(circle_t *circle, MPI_Request *request, double timeout)
{
    /* ranks whose own wait ran out come this much later */
    patience_t wait = patience(timeout + (timeout < 5 ? timeout : 5));
    int done = 0;
    for (;;) {
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) return mpi_failed(code, circle->name);
        if (done) return MPS_OK;
        if (patient(&wait)) continue;
        circle->broken = 1;
        return fail(MPS_ERR_LOST, "program '%s': not all of its own ranks came to the call\n  expected: %d ranks within "
                    "%.0f s\n  got:      rank %d, and not all others", circle->name, circle->size, wait.timeout, circle->rank);
    }
}

/* MPI writes to the circle when ranks come that were waited for in vain: it must outlive that. */
int circle_init(circle_t *circle, MPI_Comm comm, const char *name)
{
    MPI_Errhandler before;
    MPI_Request request;
    memset(circle, 0, sizeof *circle);
    MPI_Comm_rank(comm, &circle->rank);
    MPI_Comm_size(comm, &circle->size);
    snprintf(circle->name, sizeof circle->name, "%s", name);
    circle->request = MPI_REQUEST_NULL;
    /* errors of MPI come back here, such as that it makes no more communicators; the host's handler is as before */
    MPI_Comm_get_errhandler(comm, &before);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    int status = mpi_failed(MPI_Comm_idup(comm, &circle->comm, &request), name);
    if (!status) status = complete(circle, &request, own_limit());
    MPI_Comm_set_errhandler(comm, before);
    if (before != MPI_ERRORS_ARE_FATAL && before != MPI_ERRORS_RETURN) MPI_Errhandler_free(&before);
    if (!status) MPI_Comm_set_errhandler(circle->comm, MPI_ERRORS_RETURN);
    return status;
}

void circle_start(circle_t *circle, int status, int certain, int64_t a, int64_t b, int64_t c)
{
    circle_start_in(circle, 0, status, certain, a, b, c);
}

void circle_start_in(circle_t *circle, int64_t call, int status, int certain, int64_t a, int64_t b, int64_t c)
{
    if (circle->broken) return; /* what is under way reads these numbers */
    int64_t failed = status < 0 ? circle->rank - (certain ? 2 : 1) * (int64_t)circle->size : 0;
    circle->mine[0] = failed;
    circle->mine[1] = a;
    circle->mine[2] = b;
    circle->mine[3] = c;
    circle->mine[4] = call;
    circle->mine[5] = -call;
    circle->request = MPI_REQUEST_NULL;
    memcpy(circle->least, circle->mine, sizeof circle->least);
    if (circle->size > 1 && mpi_ready() == MPS_OK)
        MPI_Iallreduce(circle->mine, circle->least, 6, MPI_INT64_T, MPI_MIN, circle->comm, &circle->request);
}

/* the least of every value; where a rank failed, all get its status and text */
int circle_finish(circle_t *circle, double timeout, int64_t values[3])
{
    if (circle->broken)
        return fail(MPS_ERR_LOST, "program '%s': its ranks have lost each other in an earlier call", circle->name);
    /* handles outlive MPI, and MPI ends a program that calls it then */
    int status = mpi_ready();
    if (!status) status = complete(circle, &circle->request, timeout);
    if (status) return status;
    if (values != NULL) memcpy(values, circle->least + 1, 3 * sizeof *values);
    if (circle->least[4] != -circle->least[5]) {
        /* first: an error of a rank that waited alone comes of it */
        static const char *const names[CALLS] = {"another call", "put", "get", "close"};
        int64_t one = circle->least[4], other = -circle->least[5];
        circle->apart = 1;
        return fail(MPS_ERR_ORDER, "ranks of program '%s' made different calls\n  expected: the same call of the same link on every rank\n"
                    "  got:      %s of its link %lld and %s of its link %lld, in the order of mps_connect from 0", circle->name, names[one % CALLS],
                    (long long)(one / CALLS), names[other % CALLS], (long long)(other / CALLS));
    }
    if (circle->least[0] == 0) return MPS_OK;
    int root = (int)((circle->least[0] + 2 * (int64_t)circle->size) % circle->size);
    char *told = circle->told;
    memset(told, 0, sizeof circle->told);
    if (root == circle->rank) snprintf(told, sizeof circle->told, "%d|%s", (int)circle->mine[1] < 0 ? (int)circle->mine[1] : MPS_ERR_PEER, error_text);
    if (circle->size > 1) {
        MPI_Request request;
        MPI_Ibcast(told, (int)sizeof circle->told, MPI_BYTE, root, circle->comm, &request);
        status = complete(circle, &request, timeout);
        if (status) return status;
    }
    char *text = strchr(told, '|');
    return fail(atoi(told), "%s", text ? text + 1 : told);
}

int circle_agree(circle_t *circle, int status, double timeout)
{
    circle_start(circle, status, 0, status < 0 ? status : 0, 0, 0);
    return circle_finish(circle, timeout, NULL);
}

uint64_t digest(uint64_t before, const void *data, size_t nbytes)
{
    uint64_t sum = before ^ 0xCBF29CE484222325u;
    for (size_t i = 0; i < nbytes; i++) sum = (sum ^ ((const unsigned char *)data)[i]) * 0x100000001B3u;
    return sum;
}

int circle_same(circle_t *circle, int status, double timeout, uint64_t sum, const char *call)
{
    int64_t values[3], mark = (int64_t)(sum >> 24); /* of 40 bits, as those of hooks */
    circle_start(circle, status, 0, status < 0 ? status : mark, -mark, 0);
    status = circle_finish(circle, timeout, values);
    if (status || values[0] == -values[1]) return status;
    return fail(MPS_ERR_ORDER, "%s: the ranks gave different arguments, or made different calls\n  expected: the same on all of them", call);
}

int circle_tell(circle_t *circle, char **message, int64_t *count, double timeout)
{
    MPI_Request request;
    if (circle->size == 1) return MPS_OK;
    int64_t values[3];
    /* no count is below 0: the least is rank 0's */
    circle_start(circle, MPS_OK, 0, circle->rank ? INT64_MAX : *count, 0, 0);
    int status = circle_finish(circle, timeout, values);
    if (status) return status;
    *count = values[0];
    if (circle->rank && (*message = malloc((size_t)*count + 1)) == NULL) status = fail(MPS_ERR_MEMORY, "no memory for %lld bytes", (long long)*count);
    if ((status = circle_agree(circle, status, timeout))) return status;
    MPI_Ibcast(*message, (int)*count, MPI_BYTE, 0, circle->comm, &request);
    status = complete(circle, &request, timeout);
    if (status) *message = NULL; /* it is left to MPI, which may still use it */
    return status;
}

/* messages that nobody waits for */

static struct { MPI_Request request; void *memory; } *going = NULL;
static int going_count = 0, going_room = 0;

int sends_under_way(void)
{
    int left = 0;
    for (int i = 0; i < going_count; i++) {
        int done;
        MPI_Test(&going[i].request, &done, MPI_STATUS_IGNORE);
        if (done) free(going[i].memory);
        else going[left++] = going[i];
    }
    return going_count = left;
}

static void send(const void *data, void *memory, int nbytes, int peer, int tag, MPI_Comm comm)
{
    if (sends_under_way() == going_room) {
        void *more = realloc(going, (size_t)(2 * going_room + 16) * sizeof *going);
        if (more == NULL) {
            MPI_Request request; /* its memory is never given back */
            MPI_Isend(data, nbytes, MPI_BYTE, peer, tag, comm, &request);
            MPI_Request_free(&request);
            return;
        }
        going = more;
        going_room = 2 * going_room + 16;
    }
    MPI_Isend(data, nbytes, MPI_BYTE, peer, tag, comm, &going[going_count].request);
    going[going_count++].memory = memory;
}

void send_kept(void *memory, int nbytes, int peer, int tag, MPI_Comm comm) { send(memory, memory, nbytes, peer, tag, comm); }
void send_constant(const void *data, int nbytes, int peer, int tag, MPI_Comm comm) { send(data, NULL, nbytes, peer, tag, comm); }

/* where a process is, and whether it lives */

static uint32_t crc32_of(const char *text, size_t n)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < n; i++) {
        crc ^= (unsigned char)text[i];
        for (int k = 0; k < 8; k++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
    }
    return ~crc;
}

static char stat_of(int64_t pid, int64_t *started)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *file = fopen(path, "r");
    *started = 0;
    if (file == NULL) return 'X';
    size_t n = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[n] = 0;
    char *field = strrchr(line, ')'), state = 'X';
    for (int i = 0; field != NULL && i < 20; i++) {
        field = strchr(field + 1, ' ');
        if (field != NULL && i == 0) state = field[1];
        if (field != NULL && i == 19) *started = atoll(field + 1);
    }
    return state;
}

presence_t presence_here(void)
{
    char text[512], host[256] = "", space[128] = "";
    presence_t here;
    gethostname(host, sizeof host - 1);
    ssize_t n = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    space[n > 0 ? n : 0] = 0;
    snprintf(text, sizeof text, "%s %s", host, space);
    here.machine = crc32_of(text, strlen(text));
    here.pid = getpid();
    stat_of(here.pid, &here.started);
    return here;
}

char presence_state(const presence_t *who)
{
    presence_t here = presence_here();
    int64_t started;
    if (who->machine != here.machine || here.started == 0) return ' ';
    char state = stat_of(who->pid, &started);
    if (started != who->started || state == 'Z' || state == 'X') return 'X';
    return state == 'T' || state == 't' ? 'T' : ' ';
}

/* UTF-8: a name passes through Python on other ranks, which knows no other bytes */
static int is_text(const char *name)
{
    const unsigned char *c = (const unsigned char *)name;
    while (*c) {
        int more = *c < 0x80 ? 0 : *c >= 0xC2 && *c < 0xE0 ? 1 : *c >= 0xE0 && *c < 0xF0 ? 2 : *c >= 0xF0 && *c < 0xF5 ? 3 : -1;
        if (more < 0 || (c[0] == 0xE0 && c[1] < 0xA0) || (c[0] == 0xED && c[1] > 0x9F) || (c[0] == 0xF0 && c[1] < 0x90) ||
            (c[0] == 0xF4 && c[1] > 0x8F))
            return 0;
        for (c++; more; more--, c++)
            if ((*c & 0xC0) != 0x80) return 0;
    }
    return 1;
}

int name_fits(const char *name) { return name != NULL && name[0] != 0 && strlen(name) < NAME_BYTES; }

/* the meeting of all programs: a tree of messages over MPI_COMM_WORLD */

typedef struct { int64_t magic, version, attempt, count, withdrawn, spare[3]; char text[TEXT_BYTES]; } roll_t;
typedef struct { char name[NAME_BYTES], file[256]; int64_t ranks, first, appnum, command, spare[4]; } entry_t;
typedef struct { roll_t head; entry_t *entries; } list_t;

static int64_t attempts = 0;
static const char unheard[] = "join: no memory on a rank for what ranks tell each other", no_memory[] = "no memory";

static int same_program(const entry_t *a, const entry_t *b)
{
    return strcmp(a->file, b->file) == 0 && (a->appnum == b->appnum || a->command == b->command);
}

static int by_first(const void *a, const void *b)
{
    int64_t d = ((const entry_t *)a)->first - ((const entry_t *)b)->first;
    return d < 0 ? -1 : d > 0;
}

static void merge(list_t *list, const list_t *other)
{
    if (list->head.text[0] == 0) memcpy(list->head.text, other->head.text, TEXT_BYTES);
    int64_t total = list->head.count + other->head.count, kept = 0;
    entry_t *all = malloc((size_t)(total ? total : 1) * sizeof *all);
    if (all == NULL) {
        snprintf(list->head.text, TEXT_BYTES, "%s", unheard);
        return;
    }
    if (list->head.count) memcpy(all, list->entries, (size_t)list->head.count * sizeof *all);
    if (other->head.count) memcpy(all + list->head.count, other->entries, (size_t)other->head.count * sizeof *all);
    qsort(all, (size_t)total, sizeof *all, by_first);
    for (int64_t i = 0; i < total; i++) {
        int64_t k = 0;
        while (k < kept && !(strcmp(all[k].name, all[i].name) == 0 && same_program(&all[k], &all[i]))) k++;
        if (k < kept) all[k].ranks += all[i].ranks;
        else all[kept++] = all[i];
    }
    free(list->entries);
    list->entries = all;
    list->head.count = kept;
}

/* a message for which there is no memory: that is what is told of it */
static int unread(list_t *list)
{
    list->entries = NULL;
    list->head.count = 0;
    snprintf(list->head.text, TEXT_BYTES, "%s", unheard);
    return 1;
}

/* Of a job of so many programs, what a rank that is told to go on needs is there before it asks. */
enum { FEW_PROGRAMS = 64, ANSWER_BYTES = sizeof(roll_t) + FEW_PROGRAMS * sizeof(entry_t) };

/* The answer to an attempt; of a rank that asks (0) whatever it says. Messages of up to ANSWER_BYTES go into `room`, where there is one. */
static int received(int peer, int64_t attempt, list_t *list, char *room)
{
    int found = 0, n;
    MPI_Status status;
    MPI_Message message;
    for (;;) {
        MPI_Improbe(peer, MEETING_TAG, MPI_COMM_WORLD, &found, &message, &status);
        if (!found) return 0;
        MPI_Get_count(&status, MPI_BYTE, &n);
        char *data = room != NULL && n <= ANSWER_BYTES ? room : malloc((size_t)n + 1);
        memset(list, 0, sizeof *list);
        if (data == NULL) /* MPI may have its first part all the same: of which attempt it is, and whether it withdraws */
            MPI_Mrecv(&list->head, (int)sizeof list->head, MPI_BYTE, &message, MPI_STATUS_IGNORE);
        else {
            MPI_Mrecv(data, n, MPI_BYTE, &message, MPI_STATUS_IGNORE);
            memcpy(&list->head, data, sizeof list->head);
        }
        int speaks = list->head.magic == WIRE_MAGIC && list->head.version == WIRE_VERSION;
        if (data != NULL && !speaks) {
            list->head.count = list->head.withdrawn = 0;
            snprintf(list->head.text, TEXT_BYTES, "a program speaks another version of this wire format (here: %d)", WIRE_VERSION);
        }
        if (data != NULL) memmove(data, data + sizeof(roll_t), (size_t)list->head.count * sizeof *list->entries);
        list->entries = (entry_t *)data;
        if (!speaks || attempt == 0 || list->head.attempt == attempt) return data != NULL ? 1 : unread(list);
        if (data != room) free(data); /* of an attempt that failed before */
    }
}

/* Tell a rank what this one knows, or that it waits no longer; in memory of malloc's where it is given and is enough. Where
 * there is none, in `without`, the peer's own: should MPI read it later, that it is what the peer was told last is no harm. */
static void tell(const list_t *list, int64_t attempt, int withdrawn, int peer, void *room, roll_t *without)
{
    size_t count = withdrawn ? 0 : (size_t)list->head.count;
    size_t nbytes = sizeof(roll_t) + count * sizeof *list->entries;
    roll_t *told = room != NULL && nbytes <= ANSWER_BYTES ? room : malloc(nbytes);
    MPI_Request request;
    int bare = told == NULL;
    if (bare) {
        told = without;
        count = 0;
    }
    memcpy(told, &list->head, sizeof *told);
    told->magic = WIRE_MAGIC;
    told->version = WIRE_VERSION;
    told->attempt = attempt;
    told->count = (int64_t)count;
    told->withdrawn = withdrawn;
    if (count) memcpy(told + 1, list->entries, count * sizeof *list->entries);
    if (!bare) {
        if (told != room) free(room);
        send_kept(told, (int)nbytes, peer, MEETING_TAG, MPI_COMM_WORLD);
        return;
    }
    if (!told->text[0]) snprintf(told->text, TEXT_BYTES, "%s", unheard);
    MPI_Isend(told, (int)sizeof *told, MPI_BYTE, peer, MEETING_TAG, MPI_COMM_WORLD, &request);
    MPI_Request_free(&request);
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static void absent(list_t *list, int *ranks, int count, int size, double timeout, const char *verb)
{
    char who[320], here[400] = "";
    ranks_t missing = {0, 0, {{0}}};
    qsort(ranks, (size_t)count, sizeof *ranks, ascending);
    for (int i = 0; i < count; i++) ranks_add(&missing, ranks[i]);
    ranks_text(&missing, who, sizeof who);
    for (int64_t i = 0; i < list->head.count; i++)
        snprintf(here + strlen(here), sizeof here - strlen(here), "%s'%s' (%lld)", i ? ", " : "", list->entries[i].name,
                 (long long)list->entries[i].ranks);
    if (list->head.text[0] == 0)
        snprintf(list->head.text, TEXT_BYTES, "join: %s of MPI_COMM_WORLD %s\n  expected: all %d ranks of the "
                 "job within %g s\n  got:      so far, programs with ranks: %s\n  fix:      call join in every program of the job, "
                 "on all of its ranks", who, verb, size, timeout, here);
}

static void one_name(list_t *list)
{
    for (int64_t i = 0; i < list->head.count && list->head.text[0] == 0; i++)
        for (int64_t k = 0; k < i; k++)
            if (strcmp(list->entries[k].name, list->entries[i].name) == 0)
                snprintf(list->head.text, TEXT_BYTES, "join: two programs of one name, '%s'\n  expected: another name for every "
                         "program of the job\n  got:      from rank %lld on %s, from rank %lld on %s\n  fix:      name one of "
                         "them otherwise", list->entries[i].name, (long long)list->entries[k].first, list->entries[k].file,
                         (long long)list->entries[i].first, list->entries[i].file);
}

static void describe(entry_t *entry, const char *name, int rank)
{
    char command[4096];
    memset(entry, 0, sizeof *entry);
    snprintf(entry->name, sizeof entry->name, "%s", name);
    ssize_t n = readlink("/proc/self/exe", entry->file, sizeof entry->file - 1);
    if (n <= 0) snprintf(entry->file, sizeof entry->file, "?");
    FILE *file = fopen("/proc/self/cmdline", "rb");
    size_t length = file ? fread(command, 1, sizeof command, file) : 0;
    if (file) fclose(file);
    entry->command = crc32_of(command, length);
    entry->ranks = 1;
    entry->first = rank;
    int *appnum, known = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &appnum, &known);
    entry->appnum = known ? *appnum : -1;
}

/* Which of the ranks below have come, by the last that each said: one may have given up, and come again. */
static int hear(const int *children, int count, list_t *here, int *waits)
{
    int all = 0;
    list_t told;
    for (int i = 0; i < count; i++) {
        while (received(children[i], 0, &told, NULL)) {
            if (waits[i]) free(here[i].entries);
            here[i] = told;
            if (told.head.withdrawn) free(told.entries);
            waits[i] = !told.head.withdrawn;
        }
        all += waits[i];
    }
    return all;
}

/* Everybody's entries, merged, or a text that says what is wrong: the same on all ranks. The twin of meeting.py. */
static int call_roll(const char *name, const char *wrong, double timeout, list_t *list)
{
    enum { MOST = 32, LOOKS = 32 }; /* MPI shows one message of several at a time, and not at every look: the last one counts */
    static roll_t without[MOST + 1];
    int rank, size, children[MOST], missing[MOST], waits[MOST] = {0}, count = 0, left = 0;
    int64_t known[MOST]; /* which attempt of each is in what this rank tells; 0: none */
    list_t here[MOST];
    void *answers[MOST];
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    memset(list, 0, sizeof *list);
    int64_t attempt = ++attempts;
    list->entries = malloc(sizeof *list->entries);
    char *room = rank ? malloc(ANSWER_BYTES) : NULL;
    for (int step = 1; rank + step < size && !(rank & step); step <<= 1) children[count++] = rank + step;
    for (int i = 0; i < count; i++)
        if ((answers[i] = malloc(ANSWER_BYTES)) == NULL) wrong = no_memory;
    if (list->entries == NULL || (rank && room == NULL)) wrong = no_memory;
    if (wrong == NULL) {
        describe(list->entries, name, rank);
        list->head.count = 1;
    } else if (wrong == no_memory)
        snprintf(list->head.text, TEXT_BYTES, "join: no memory on rank %d", rank);
    else
        snprintf(list->head.text, TEXT_BYTES, "join: %s on rank %d\n  expected: a text of 1 to %d bytes, in UTF-8, and a pointer for the handle", wrong,
                 rank, NAME_BYTES - 1);
    patience_t wait = patience(timeout + 0.2 * count);
    for (int looks = 0; looks < LOOKS;) {
        looks = hear(children, count, here, waits) == count ? looks + 1 : 0;
        if (!looks && !patient(&wait)) break;
    }
    for (int i = 0; i < count; i++) {
        known[i] = waits[i] ? here[i].head.attempt : 0;
        if (waits[i]) merge(list, &here[i]);
        else missing[left++] = children[i];
    }
    if (left) absent(list, missing, left, size, timeout, "did not come");
    if (rank) {
        int parent = rank & (rank - 1), levels = 1, depth = 0, came = 0, gone = 0, in_time = 1;
        list_t answer;
        while (size >> levels) levels++;
        for (int rest = rank; rest; rest &= rest - 1) depth++;
        tell(list, attempt, 0, parent, NULL, &without[MOST]);
        wait = patience(timeout + 1.0 + 0.2 * (levels + 1));
        while (!came && in_time && !gone) {
            in_time = patient(&wait);
            came = received(parent, attempt, &answer, room);
            hear(children, count, here, waits);
            for (int i = 0; i < count; i++)
                if (known[i] && !(waits[i] && here[i].head.attempt == known[i])) missing[gone++] = children[i];
        }
        if (!came) {
            /* who comes later must not take this rank for one that is here, and wait for it in what follows; who did so a moment
             * before has answered, and that counts: also with those below, who listen for longer */
            tell(list, attempt, 1, parent, NULL, &without[MOST]);
            wait = patience(0.2 * depth);
            while (!came && patient(&wait)) came = received(parent, attempt, &answer, room);
        }
        if (!came || (char *)answer.entries != room) free(room);
        if (came) {
            free(list->entries);
            *list = answer;
        } else {
            list->head.text[0] = 0;
            if (gone) absent(list, missing, gone, size, timeout, "gave up");
            else absent(list, &parent, 1, size, timeout, "did not come");
        }
    } else
        one_name(list);
    for (int i = 0; i < count; i++) {
        if (waits[i] || known[i]) tell(list, waits[i] ? here[i].head.attempt : known[i], 0, children[i], answers[i], &without[i]);
        else free(answers[i]);
        if (waits[i]) free(here[i].entries);
    }
    wait = patience(1.0);
    while (sends_under_way() && patient(&wait)) continue; /* what a rank that is gone keeps stays its own */
    if (list->head.text[0] == 0) return MPS_OK;
    return fail(strncmp(list->head.text, "join: no memory", 15) ? MPS_ERR_PEER : MPS_ERR_MEMORY, "%s", list->head.text);
}

static int meet(const char *name, const char *wrong, double timeout, program_t *program)
{
    list_t list;
    int rank, size, mine = 0, at = 0;
    int status = call_roll(name, wrong, timeout, &list);
    if (status) {
        free(list.entries);
        return status;
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    qsort(list.entries, (size_t)list.head.count, sizeof *list.entries, by_first);
    int count = (int)list.head.count;
    while (mine + 1 < count && strcmp(list.entries[mine].name, name) != 0) mine++;
    program->others = count - 1;
    program->ranks = (int)list.entries[mine].ranks;
    status = mpi_failed(MPI_Comm_split(MPI_COMM_WORLD, mine, rank, &program->comm), "join");
    if (!status) status = circle_init(&program->circle, program->comm, name);
    if (!status) MPI_Comm_set_errhandler(program->comm, MPI_ERRORS_RETURN);
    far_t *far = count > FEW_PROGRAMS ? realloc(program->far, (size_t)count * sizeof *far) : program->far;
    int ready = far != NULL ? MPS_OK : fail(MPS_ERR_MEMORY, "join: no memory");
    if (far != NULL) program->far = far;
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) {
            MPI_Comm both;
            int code = MPI_Comm_split(MPI_COMM_WORLD, mine == i || mine == j ? 0 : MPI_UNDEFINED, rank + (mine == j ? size : 0), &both);
            if (!ready) ready = mpi_failed(code, "join");
            if ((mine != i && mine != j) || ready) continue;
            far = &program->far[at++];
            const entry_t *other = &list.entries[mine == i ? j : i];
            snprintf(far->name, sizeof far->name, "%s", other->name);
            far->ranks = (int)other->ranks;
            far->first = mine == i ? (int)list.entries[i].ranks : 0;
            far->both = both;
            MPI_Comm_set_errhandler(both, MPI_ERRORS_RETURN);
        }
    free(list.entries);
    return status ? status : circle_agree(&program->circle, ready, timeout);
}

int mps_join(const char *name, double timeout, mps_handle *handle)
{
    int status = mpi_ready();
    if (status) return status;
    program_t *program = calloc(1, sizeof *program);
    const char *wrong = NULL; /* the others must hear of it */
    if (program != NULL) program->far = calloc(FEW_PROGRAMS, sizeof *program->far);
    if (program == NULL || program->far == NULL || object_room("join")) wrong = no_memory;
    if (handle != NULL) *handle = MPS_NULL;
    else wrong = "no place for a handle";
    if (!name_fits(name) || !is_text(name)) wrong = "no name of a program";
    if (program != NULL) program->users = 1;
    if (program != NULL && !wrong) snprintf(program->name, sizeof program->name, "%s", name);
    /* errors of MPI come back here, and the host's handler is as before */
    MPI_Errhandler before;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    status = meet(name, wrong, timeout > 0 ? timeout : 60.0, program);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, before);
    if (before != MPI_ERRORS_ARE_FATAL && before != MPI_ERRORS_RETURN) MPI_Errhandler_free(&before);
    if (!status) *handle = object_made(OBJECT_PROGRAM, program);
    else if (program != NULL) program_left(program);
    return status;
}

/* Its communicators are left to MPI_Finalize: a notice that crossed another may lie in them, and MPICH ends the program
 * where such a communicator is freed. */
void program_left(program_t *program)
{
    if (--program->users || program->circle.broken) return;
    free(program->far);
    free(program);
}

int mps_comm(mps_handle handle, MPI_Comm *comm)
{
    program_t *program = object_of(handle, OBJECT_PROGRAM);
    if (program == NULL || comm == NULL) return fail(MPS_ERR_ORDER, "comm: expected a program, from mps_join");
    *comm = program->comm;
    return MPS_OK;
}

int mps_ranks(mps_handle handle, const char *name, int *ranks)
{
    program_t *program = object_of(handle, OBJECT_PROGRAM);
    if (program == NULL || ranks == NULL) return fail(MPS_ERR_ORDER, "ranks: expected a program, from mps_join");
    if (name == NULL) return fail(MPS_ERR_ARGUMENT, "ranks: no name of a program");
    *ranks = strcmp(program->name, name) == 0 ? program->ranks : 0;
    for (int i = 0; i < program->others; i++)
        if (strcmp(program->far[i].name, name) == 0) *ranks = program->far[i].ranks;
    return MPS_OK;
}
