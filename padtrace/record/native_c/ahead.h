/* Makes the pages that a ring is about to be written to writable, ahead of the writer.
 *
 * The kernel writes dirty pages back now and then and write-protects them again; the next store
 * into one waits for a page fault, and with it maybe for the journal of a file system. A thread of
 * our own meets those faults instead. It never holds the GIL and never changes a byte.
 */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#define AHEAD_BYTES (1 << 20)
#define AHEAD_AT_ONCE (64 << 12) /* the address space is locked for this long */
#define AHEAD_SLOTS (AHEAD_BYTES / SLOT_BYTES)
#define AHEAD_PAUSE_NS 20000000
#define AHEAD_PATIENCE 250 /* pauses: well before the kernel writes back what is ahead */

/* What the thread needs; it outlives the ring's object until the thread is joined. */
typedef struct {
    pthread_t thread;
    pid_t process;
    int stop;
    const long long *next; /* the ring's next slot */
    uint8_t *slots;
    long long slot_count;
} Ahead;

/* 0 where this kernel cannot do it, or the file lost its pages. */
static int ahead_populate(uint8_t *from, uint8_t *to)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)from & ~(page - 1);
    const uintptr_t end = ((uintptr_t)to + page - 1) & ~(page - 1);
    for (; at < end; at += AHEAD_AT_ONCE) {
        const uintptr_t left = end - at;
        if (madvise((void *)at, left < AHEAD_AT_ONCE ? left : AHEAD_AT_ONCE, MADV_POPULATE_WRITE) &&
            errno != EAGAIN && errno != EINTR && errno != EBUSY)
            return 0;
    }
    return 1;
}

/* The slots from the next one on, also those where the ring starts over. */
static int ahead_meet(const Ahead *self, long long next)
{
    const long long window = AHEAD_SLOTS;
    const long long first = next % self->slot_count, left = self->slot_count - first;
    const long long here = window < left ? window : left;
    const long long again = window - here < first ? window - here : first;
    return ahead_populate(self->slots + first * SLOT_BYTES,
                          self->slots + (first + here) * SLOT_BYTES) &&
           ahead_populate(self->slots, self->slots + again * SLOT_BYTES);
}

static void *ahead_run(void *given)
{
    Ahead *self = given;
    const struct timespec pause = {0, AHEAD_PAUSE_NS};
    long long met = -1; /* the next slot when pages were last met */
    int pauses = 0;
    while (!__atomic_load_n(&self->stop, __ATOMIC_RELAXED)) {
        const long long next = __atomic_load_n(self->next, __ATOMIC_RELAXED);
        /* An idle server's pages are left to be written back once. */
        if (next != met && next >= 0 &&
            (met < 0 || next - met > AHEAD_SLOTS / 4 || pauses >= AHEAD_PATIENCE)) {
            if (!ahead_meet(self, next))
                break;
            met = next;
            pauses = 0;
        }
        pauses++;
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* Start the thread; NULL where that is not possible. It takes no signal of the server's. */
static Ahead *ahead_start(const long long *next, uint8_t *slots, long long slot_count)
{
    Ahead *self = calloc(1, sizeof(Ahead));
    sigset_t all, before;
    int failed;
    if (self == NULL)
        return NULL;
    self->process = getpid();
    self->next = next;
    self->slots = slots;
    self->slot_count = slot_count;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&self->thread, NULL, ahead_run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(self);
        return NULL;
    }
    return self;
}

/* End the thread, in one pause at most. A child made by fork has none. */
static void ahead_end(Ahead *self)
{
    if (self == NULL)
        return;
    if (self->process == getpid()) {
        __atomic_store_n(&self->stop, 1, __ATOMIC_RELAXED);
        pthread_join(self->thread, NULL);
    }
    free(self);
}
