/* The hot classes of the recorder, compiled.
 *
 * Each class here does what the class of the same name does in ring_core.py, state_core.py and
 * snapshots.py; those say what and why, and the tests run both. Everything runs under the GIL, so
 * one call is one step for every other thread and for signal handlers; a build without the GIL
 * does not use this file (see native.py). Objects are counted by the usual rules; no pointer into
 * the mapping outlives the buffer it was taken from.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* ---- what ring_format.py and recording/absent.py say; native.py compares ------------------- */

#define VERSION 1 /* of what is offered to Python: a stale build is then not used */
#define SLOT_BYTES 256
#define HEAD_BYTES 24
#define PAYLOAD (SLOT_BYTES - HEAD_BYTES)
#define COUNTERS_OFFSET 1024
#define HOOKS_OFFSET 4096
#define STATIC_OFFSET 8192
#define MAX_HOOKS 256
#define MAX_CHAIN 4096
#define MAX_SCALARS 65535
#define MAX_VALUES 16777215
#define EVENTS 1
#define UPDATES 2
#define REFUSED 3
#define FORWARDS 8
#define FORWARD_KIND 0
#define ERROR_KIND 9
#define SNAPSHOT_KIND 10
#define RECORD_EVENT 1
#define RECORD_UPDATE 2
#define NONE_CODE (INT64_MIN)
#define NO_ATTRIBUTE_CODE (INT64_MIN + 1)
#define NOT_OBSERVED_CODE (INT64_MIN + 2)
#define SHORT_MIRROR 64

static PyObject *text_dict, *text_bad_event, *text_around_error, *text_set_phase, *text_abandon;
static PyObject *text_lose, *text_shape, *text_q, *text_indices, *text_num_splits;
static PyObject *text_cache_seqlens, *text_worker, *text_number, *text_draft_step, *text_is_cpu, *text_tolist;

/* ---- checksum: that of zlib -------------------------------------------------------------- */

static uint32_t crc_table[8][256];

static void crc_fill(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[0][i] = c;
    }
    for (int i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            crc_table[t][i] =
                crc_table[0][crc_table[t - 1][i] & 0xFF] ^ (crc_table[t - 1][i] >> 8);
}

/* Of `count` int64, as they lie in a little-endian file. */
static uint32_t crc_words(const int64_t *words, Py_ssize_t count, uint32_t start)
{
    uint32_t c = ~start;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t w = (uint64_t)words[i] ^ c;
        c = crc_table[7][w & 0xFF] ^ crc_table[6][w >> 8 & 0xFF] ^ crc_table[5][w >> 16 & 0xFF] ^
            crc_table[4][w >> 24 & 0xFF] ^ crc_table[3][w >> 32 & 0xFF] ^
            crc_table[2][w >> 40 & 0xFF] ^ crc_table[1][w >> 48 & 0xFF] ^ crc_table[0][w >> 56];
    }
    return ~c;
}

static PyObject *none_or_raise(void)
{
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Forget what our own code raised; what is no Exception (KeyboardInterrupt, SystemExit of a signal
 * handler) is the server's and stays set. 1 if nothing is set any more. */
static int forgive(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return 0;
    PyErr_Clear();
    return 1;
}

/* ---- numbers ----------------------------------------------------------------------------- */

/* An int64 of an int; no code of the object runs. -1 with an exception set. */
static int64_t int64_of(PyObject *value)
{
    int overflow = 0;
    long long number;
    if (!PyLong_Check(value)) {
        PyErr_Format(PyExc_TypeError, "required argument is not an integer: %.80s",
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) {
        PyErr_SetString(PyExc_TypeError, "a number is no int64");
        return -1;
    }
    return number;
}

static int is_sequence(PyObject *value)
{
    if (PyList_Check(value) || PyTuple_Check(value))
        return 1;
    PyErr_SetString(PyExc_TypeError, "numbers come as a list or a tuple");
    return 0;
}

/* Copy the ints of a list or tuple; their number, or -1 with an exception set. */
static Py_ssize_t copy_numbers(PyObject *sequence, int64_t *into)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    PyObject **items = PySequence_Fast_ITEMS(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = int64_of(items[i]);
        if (into[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return count;
}

static PyObject *list_of(const int64_t *numbers, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

/* ---- Snapshot ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long reference;
    Py_ssize_t scalar_count, value_count;
    int64_t *record; /* the head word, the scalars, the values: as they go into the ring */
} Snapshot;

static PyTypeObject SnapshotType;

static int64_t record_head(int type, long kind, Py_ssize_t scalars, Py_ssize_t values)
{
    return (int64_t)type | (int64_t)kind << 8 | (int64_t)scalars << 16 | (int64_t)values << 32;
}

static Snapshot *snapshot_make(PyTypeObject *type, Py_ssize_t scalars, Py_ssize_t values)
{
    Snapshot *self;
    if (scalars > MAX_SCALARS || values > MAX_VALUES) {
        PyErr_SetString(PyExc_ValueError, "too many numbers for one snapshot");
        return NULL;
    }
    self = (Snapshot *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->reference = -1;
    self->scalar_count = scalars;
    self->value_count = values;
    self->record = PyMem_Malloc(sizeof(int64_t) * (size_t)(1 + scalars + values));
    if (self->record == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->record[0] = record_head(RECORD_EVENT, SNAPSHOT_KIND, scalars, values);
    return self;
}

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"scalars", "values", NULL};
    PyObject *scalars, *values;
    Snapshot *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &scalars, &values))
        return NULL;
    if (!is_sequence(scalars) || !is_sequence(values))
        return NULL;
    self = snapshot_make(type, PySequence_Fast_GET_SIZE(scalars), PySequence_Fast_GET_SIZE(values));
    if (self == NULL)
        return NULL;
    if (copy_numbers(scalars, self->record + 1) < 0 ||
        copy_numbers(values, self->record + 1 + self->scalar_count) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void snapshot_dealloc(Snapshot *self)
{
    PyMem_Free(self->record);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *snapshot_scalars(Snapshot *self, void *unused)
{
    return list_of(self->record + 1, self->scalar_count);
}

static PyObject *snapshot_values(Snapshot *self, void *unused)
{
    return list_of(self->record + 1 + self->scalar_count, self->value_count);
}

static PyObject *snapshot_scalar(Snapshot *self, PyObject *index)
{
    Py_ssize_t i = PyLong_AsSsize_t(index);
    if (i == -1 && PyErr_Occurred())
        return NULL;
    if (i < 0 || i >= self->scalar_count) {
        PyErr_SetString(PyExc_IndexError, "a snapshot has no such scalar");
        return NULL;
    }
    return PyLong_FromLongLong(self->record[1 + i]);
}

static PyGetSetDef snapshot_getters[] = {
    {"scalars", (getter)snapshot_scalars, NULL, NULL, NULL},
    {"values", (getter)snapshot_values, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMemberDef snapshot_members[] = {
    {"reference", T_LONGLONG, offsetof(Snapshot, reference), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef snapshot_methods[] = {
    {"scalar", (PyCFunction)snapshot_scalar, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject SnapshotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Snapshot",
    .tp_basicsize = sizeof(Snapshot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = snapshot_new,
    .tp_dealloc = (destructor)snapshot_dealloc,
    .tp_getset = snapshot_getters,
    .tp_members = snapshot_members,
    .tp_methods = snapshot_methods,
};

/* ---- RingCore ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    char mapped, on;
    long long next, limit, countdown;
    int64_t slots, longest, old;
    uint8_t *first_slot;
    int64_t *counters, *fired;
    int64_t *scratch;
    Py_ssize_t room;
} RingCore;

static PyTypeObject RingCoreType;

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return type->tp_alloc(type, 0);
}

static int ring_init(RingCore *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"mapping", "slots_offset", "slots", "limit", NULL};
    PyObject *mapping;
    Py_ssize_t offset;
    long long slots, limit;
    if (self->mapped) {
        PyErr_SetString(PyExc_RuntimeError, "a ring is mapped once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnLL", names, &mapping, &offset, &slots, &limit))
        return -1;
    if (PyObject_GetBuffer(mapping, &self->view, PyBUF_WRITABLE) < 0)
        return -1;
    self->mapped = 1;
    if (offset < STATIC_OFFSET || offset % 8 || slots < 1 || offset > self->view.len ||
        slots > (self->view.len - offset) / SLOT_BYTES || (uintptr_t)self->view.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "the slots do not fit the mapping");
        return -1;
    }
    self->on = 1;
    self->next = self->countdown = 0;
    self->limit = limit;
    self->slots = slots;
    self->old = slots / 4 < 1 ? 1 : slots / 4;
    self->longest = (self->old < MAX_CHAIN ? self->old : MAX_CHAIN) * PAYLOAD;
    self->first_slot = (uint8_t *)self->view.buf + offset;
    self->counters = (int64_t *)((uint8_t *)self->view.buf + COUNTERS_OFFSET);
    self->fired = (int64_t *)((uint8_t *)self->view.buf + HOOKS_OFFSET);
    return 0;
}

static void ring_dealloc(RingCore *self)
{
    if (self->mapped)
        PyBuffer_Release(&self->view);
    PyMem_Free(self->scratch);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Room for `count` numbers that nobody else holds while no Python code runs. */
static int64_t *ring_room(RingCore *self, Py_ssize_t count)
{
    if (count > self->room) {
        int64_t *grown = PyMem_Realloc(self->scratch, sizeof(int64_t) * (size_t)(count + 64));
        if (grown == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        self->scratch = grown;
        self->room = count + 64;
    }
    return self->scratch;
}

/* Put a record into the next slots; its sequence number, -1 if policy or length forbid. */
static int64_t ring_append(RingCore *self, const int64_t *words, Py_ssize_t count)
{
    const int64_t size = (int64_t)count * 8;
    const int64_t total = (size + PAYLOAD - 1) / PAYLOAD;
    const int64_t first = self->next;
    const uint8_t *data = (const uint8_t *)words;
    uint32_t checksum;
    if (self->counters == NULL || first < 0 || first + total > self->limit || size > self->longest)
        return -1;
    self->next = first + total;
    checksum = crc_words(words, count, (uint32_t)(first + (first >> 32) + (size << 1)));
    for (int64_t position = 0; position < total; position++) {
        uint8_t *slot = self->first_slot + (first + position) % self->slots * SLOT_BYTES;
        const int64_t left = size - position * PAYLOAD;
        const uint64_t sequence = (uint64_t)(first + position + 1);
        const uint16_t place[2] = {(uint16_t)position, (uint16_t)total};
        const uint32_t sizes[2] = {(uint32_t)size, 0};
        memcpy(slot, &sequence, 8);
        memcpy(slot + 8, &checksum, 4);
        memcpy(slot + 12, place, 4);
        memcpy(slot + 16, sizes, 8);
        memcpy(slot + HEAD_BYTES, data + position * PAYLOAD, (size_t)(left < PAYLOAD ? left : PAYLOAD));
    }
    return first;
}

/* Hand the exception that is set to `_bad_event`; nothing is raised any more. */
static void ring_bad(RingCore *self, long kind)
{
    PyObject *type, *value, *traceback, *number, *done = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    number = PyLong_FromLong(kind);
    if (number != NULL && value != NULL)
        done = PyObject_CallMethodObjArgs((PyObject *)self, text_bad_event, number, value, NULL);
    forgive();
    Py_XDECREF(done);
    Py_XDECREF(number);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* Count and append an event whose words are complete. */
static void ring_event(RingCore *self, long kind, const int64_t *words, Py_ssize_t count)
{
    self->counters[EVENTS]++;
    if (kind == FORWARD_KIND)
        self->counters[FORWARDS]++;
    if (ring_append(self, words, count) < 0)
        self->counters[REFUSED]++;
    if (kind == ERROR_KIND || self->countdown) {
        PyObject *number = PyLong_FromLong(kind), *done = NULL;
        if (number != NULL)
            done = PyObject_CallMethodObjArgs((PyObject *)self, text_around_error, number, NULL);
        forgive();
        Py_XDECREF(done);
        Py_XDECREF(number);
    }
}

static int kind_of(PyObject *value, long *kind)
{
    *kind = PyLong_AsLong(value);
    if (*kind == -1 && PyErr_Occurred())
        return 0;
    if (*kind < 0 || *kind > 255) {
        PyErr_SetString(PyExc_TypeError, "there is no such kind of event");
        return 0;
    }
    return 1;
}

static int countable(Py_ssize_t scalars, Py_ssize_t values)
{
    if (scalars <= MAX_SCALARS && values <= MAX_VALUES)
        return 1;
    PyErr_SetString(PyExc_TypeError, "too many numbers for one event");
    return 0;
}

static PyObject *ring_write(RingCore *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *values = count > 2 ? args[2] : NULL;
    Py_ssize_t scalar_count, value_count = 0;
    int64_t *words;
    long kind = -1;
    if (count < 2 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "write takes a kind, scalars and values");
        return NULL;
    }
    if (!self->on || self->counters == NULL)
        Py_RETURN_NONE;
    if (!kind_of(args[0], &kind) || !is_sequence(args[1]) || (values && !is_sequence(values)))
        goto bad;
    scalar_count = PySequence_Fast_GET_SIZE(args[1]);
    if (values != NULL)
        value_count = PySequence_Fast_GET_SIZE(values);
    if (!countable(scalar_count, value_count))
        goto bad;
    words = ring_room(self, 1 + scalar_count + value_count);
    if (words == NULL || copy_numbers(args[1], words + 1) < 0 ||
        (values && copy_numbers(values, words + 1 + scalar_count) < 0))
        goto bad;
    words[0] = record_head(RECORD_EVENT, kind, scalar_count, value_count);
    ring_event(self, kind, words, 1 + scalar_count + value_count);
    return none_or_raise();
bad:
    ring_bad(self, kind);
    return none_or_raise();
}

static PyObject *ring_update(RingCore *self, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t pairs;
    int64_t *words;
    long kind = -1;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "update takes a kind, a number and pairs");
        return NULL;
    }
    if (!self->on || self->counters == NULL)
        Py_RETURN_NONE;
    if (!kind_of(args[0], &kind) || !is_sequence(args[2]))
        goto bad;
    pairs = PySequence_Fast_GET_SIZE(args[2]);
    if (pairs % 2 || pairs >= MAX_SCALARS) {
        PyErr_SetString(PyExc_TypeError, "an update takes pairs of column index and value");
        goto bad;
    }
    words = ring_room(self, pairs + 2);
    if (words == NULL)
        goto bad;
    words[0] = record_head(RECORD_UPDATE, kind, pairs + 1, 0);
    words[1] = int64_of(args[1]);
    if ((words[1] == -1 && PyErr_Occurred()) || copy_numbers(args[2], words + 2) < 0)
        goto bad;
    self->counters[UPDATES]++;
    ring_append(self, words, pairs + 2);
    Py_RETURN_NONE;
bad:
    ring_bad(self, kind);
    return none_or_raise();
}

static int64_t ring_keep_snapshot(RingCore *self, Snapshot *snapshot)
{
    int64_t reference = snapshot->reference;
    Py_ssize_t count;
    if (reference >= 0 && self->next - reference < self->old)
        return reference;
    if (!self->on || self->counters == NULL || snapshot->scalar_count == 0)
        return NOT_OBSERVED_CODE;
    count = 1 + snapshot->scalar_count + snapshot->value_count;
    reference = ring_append(self, snapshot->record, count);
    if (reference >= 0)
        return snapshot->reference = reference;
    if (count * 8 > self->longest)
        self->counters[REFUSED]++;
    else
        self->limit = self->next; /* full: no smaller event may follow without its snapshot */
    return NOT_OBSERVED_CODE;
}

static PyObject *ring_keep(RingCore *self, PyObject *snapshot)
{
    if (!Py_IS_TYPE(snapshot, &SnapshotType)) {
        PyErr_SetString(PyExc_TypeError, "keep takes a Snapshot");
        return NULL;
    }
    return PyLong_FromLongLong(ring_keep_snapshot(self, (Snapshot *)snapshot));
}

static PyObject *ring_count(RingCore *self, PyObject *const *args, Py_ssize_t count)
{
    long hook, n = 1;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "count takes a hook and a number");
        return NULL;
    }
    hook = PyLong_AsLong(args[0]);
    if (count > 1)
        n = PyLong_AsLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (self->on && self->fired != NULL && hook >= 0 && hook < MAX_HOOKS)
        self->fired[hook] += n;
    Py_RETURN_NONE;
}

static PyMethodDef ring_methods[] = {
    {"write", (PyCFunction)(void (*)(void))ring_write, METH_FASTCALL, NULL},
    {"update", (PyCFunction)(void (*)(void))ring_update, METH_FASTCALL, NULL},
    {"keep", (PyCFunction)ring_keep, METH_O, NULL},
    {"count", (PyCFunction)(void (*)(void))ring_count, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef ring_members[] = {
    {"on", T_BOOL, offsetof(RingCore, on), 0, NULL},
    {"next", T_LONGLONG, offsetof(RingCore, next), 0, NULL},
    {"limit", T_LONGLONG, offsetof(RingCore, limit), 0, NULL},
    {"countdown", T_LONGLONG, offsetof(RingCore, countdown), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject RingCoreType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.RingCore",
    .tp_basicsize = sizeof(RingCore),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = ring_new,
    .tp_init = (initproc)ring_init,
    .tp_dealloc = (destructor)ring_dealloc,
    .tp_methods = ring_methods,
    .tp_members = ring_members,
};

/* ---- Frame ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long enter_seq, parent, t_ns;
    PyObject *record, *title, *subject, *extra, *failed;
} Frame;

static PyTypeObject FrameType;

static int frame_traverse(Frame *self, visitproc visit, void *arg)
{
    Py_VISIT(self->record);
    Py_VISIT(self->title);
    Py_VISIT(self->subject);
    Py_VISIT(self->extra);
    Py_VISIT(self->failed);
    return 0;
}

static int frame_clear(Frame *self)
{
    Py_CLEAR(self->record);
    Py_CLEAR(self->title);
    Py_CLEAR(self->subject);
    Py_CLEAR(self->extra);
    Py_CLEAR(self->failed);
    return 0;
}

static void frame_dealloc(Frame *self)
{
    PyObject_GC_UnTrack(self);
    frame_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *frame_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return type->tp_alloc(type, 0);
}

static PyObject *frame_subject_is(Frame *self, PyObject *candidate)
{
    return PyBool_FromLong((self->subject ? self->subject : Py_None) == candidate);
}

static PyMemberDef frame_members[] = {
    {"enter_seq", T_LONGLONG, offsetof(Frame, enter_seq), 0, NULL},
    {"parent", T_LONGLONG, offsetof(Frame, parent), 0, NULL},
    {"t_ns", T_LONGLONG, offsetof(Frame, t_ns), 0, NULL},
    {"record", T_OBJECT, offsetof(Frame, record), 0, NULL},
    {"title", T_OBJECT, offsetof(Frame, title), 0, NULL},
    {"subject", T_OBJECT, offsetof(Frame, subject), 0, NULL},
    {"extra", T_OBJECT, offsetof(Frame, extra), 0, NULL},
    {"failed", T_OBJECT, offsetof(Frame, failed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef frame_methods[] = {
    {"subject_is", (PyCFunction)frame_subject_is, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject FrameType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Frame",
    .tp_basicsize = sizeof(Frame),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = frame_new,
    .tp_dealloc = (destructor)frame_dealloc,
    .tp_traverse = (traverseproc)frame_traverse,
    .tp_clear = (inquiry)frame_clear,
    .tp_members = frame_members,
    .tp_methods = frame_methods,
};

/* ---- StateCore --------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long seq, forward, step, step_source, phase, clock_offset;
    long long capture_phase, calm_phase; /* while a graph is captured, and otherwise */
    PyObject *open;
    PyObject *capturing; /* SGLang's get_is_capture_mode, once it is found */
    RingCore *ring;
} StateCore;

static PyTypeObject StateCoreType;

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    StateCore *self = (StateCore *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->open = PyList_New(0);
        if (self->open == NULL)
            Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int state_init(StateCore *self, PyObject *args, PyObject *kwargs)
{
    PyObject *ring;
    long long clock_offset;
    if (!PyArg_ParseTuple(args, "O!L", &RingCoreType, &ring, &clock_offset))
        return -1;
    Py_INCREF(ring);
    Py_XSETREF(self->ring, (RingCore *)ring);
    self->clock_offset = clock_offset;
    self->seq = self->step = self->step_source = self->phase = 0;
    self->forward = NOT_OBSERVED_CODE;
    return 0;
}

static int state_traverse(StateCore *self, visitproc visit, void *arg)
{
    Py_VISIT(self->open);
    Py_VISIT(self->capturing);
    Py_VISIT(self->ring);
    return 0;
}

static int state_clear(StateCore *self)
{
    Py_CLEAR(self->open);
    Py_CLEAR(self->capturing);
    Py_CLEAR(self->ring);
    return 0;
}

static void state_dealloc(StateCore *self)
{
    PyObject_GC_UnTrack(self);
    state_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The innermost open frame, borrowed; NULL without an exception if there is none. */
static Frame *state_innermost(StateCore *self)
{
    Py_ssize_t count = self->open == NULL ? 0 : PyList_GET_SIZE(self->open);
    PyObject *last = count ? PyList_GET_ITEM(self->open, count - 1) : NULL;
    if (last != NULL && !Py_IS_TYPE(last, &FrameType)) {
        PyErr_SetString(PyExc_TypeError, "only frames are open");
        return NULL;
    }
    return (Frame *)last;
}

static PyObject *state_enter(StateCore *self, PyObject *const *args, Py_ssize_t count)
{
    struct timespec now;
    Frame *frame, *outer;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "enter takes a title and a record");
        return NULL;
    }
    frame = (Frame *)FrameType.tp_alloc(&FrameType, 0);
    if (frame == NULL)
        return NULL;
    frame->enter_seq = self->seq++;
    outer = state_innermost(self);
    if (outer != NULL) {
        frame->parent = outer->enter_seq;
    } else {
        PyObject *done;
        if (PyErr_Occurred())
            goto bad;
        frame->parent = NOT_OBSERVED_CODE;
        if (self->capturing != NULL && self->capturing != Py_None) {
            int capturing;
            done = PyObject_CallNoArgs(self->capturing);
            capturing = done == NULL ? -1 : PyObject_IsTrue(done);
            if (capturing >= 0)
                self->phase = capturing ? self->capture_phase : self->calm_phase;
        } else {
            done = PyObject_CallMethodNoArgs((PyObject *)self, text_set_phase);
        }
        if (done == NULL || PyErr_Occurred()) {
            Py_XDECREF(done);
            goto bad;
        }
        Py_DECREF(done);
    }
    Py_INCREF(args[0]);
    frame->title = args[0];
    Py_INCREF(args[1]);
    frame->record = args[1];
    clock_gettime(CLOCK_MONOTONIC, &now);
    frame->t_ns = (long long)now.tv_sec * 1000000000 + now.tv_nsec + self->clock_offset;
    if (PyList_Append(self->open, (PyObject *)frame) < 0)
        goto bad;
    return (PyObject *)frame;
bad:
    Py_DECREF(frame);
    return NULL;
}

static PyObject *state_leave(StateCore *self, PyObject *frame)
{
    Py_ssize_t count = PyList_GET_SIZE(self->open);
    if (count && PyList_GET_ITEM(self->open, count - 1) == frame) {
        if (PyList_SetSlice(self->open, count - 1, count, NULL) < 0)
            return NULL;
    } else {
        PyObject *done = PyObject_CallMethodOneArg((PyObject *)self, text_abandon, frame);
        if (done == NULL)
            return NULL;
        Py_DECREF(done);
    }
    return PyLong_FromLongLong(self->seq++);
}

static int attribute(PyObject *object, PyObject *name, int64_t *into)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL)
        return 0;
    *into = int64_of(value);
    Py_DECREF(value);
    return !(*into == -1 && PyErr_Occurred());
}

/* event(kind, frame, exit_seq, own, values=()) */
static PyObject *state_event(StateCore *self, PyObject *const *args, Py_ssize_t count)
{
    RingCore *ring = self->ring;
    PyObject *own, *record, *values = count > 4 ? args[4] : NULL;
    int64_t worker = 0, number = 0, draft_step = 0, *words;
    int known;
    Py_ssize_t own_count, value_count = 0, scalars;
    long kind = -1;
    Frame *frame;
    if (count < 4 || count > 5 || !Py_IS_TYPE(args[1], &FrameType)) {
        PyErr_SetString(PyExc_TypeError, "event takes kind, frame, exit_seq, own and values");
        return NULL;
    }
    if (ring == NULL || !ring->on || ring->counters == NULL)
        Py_RETURN_NONE;
    frame = (Frame *)args[1];
    own = args[3];
    /* These may run code of Python, so they come before the scratch is filled. */
    record = frame->record;
    Py_XINCREF(record);
    known = record != NULL && attribute(record, text_worker, &worker) &&
            attribute(record, text_number, &number) &&
            attribute(record, text_draft_step, &draft_step);
    if (!known && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a frame without a record");
    Py_XDECREF(record);
    if (!known)
        goto bad;
    if (!kind_of(args[0], &kind) || !is_sequence(own) || (values && !is_sequence(values)))
        goto bad;
    own_count = PySequence_Fast_GET_SIZE(own);
    if (values != NULL)
        value_count = PySequence_Fast_GET_SIZE(values);
    scalars = 12 + own_count;
    if (!countable(scalars, value_count))
        goto bad;
    words = ring_room(ring, 1 + scalars + value_count);
    if (words == NULL)
        goto bad;
    words[0] = record_head(RECORD_EVENT, kind, scalars, value_count);
    words[1] = 0;
    words[2] = worker;
    words[3] = number;
    words[4] = self->forward;
    words[5] = draft_step;
    words[6] = self->step;
    words[7] = self->step_source;
    words[8] = frame->enter_seq;
    words[9] = int64_of(args[2]);
    words[10] = frame->parent;
    words[11] = self->phase;
    words[12] = frame->t_ns;
    if ((words[9] == -1 && PyErr_Occurred()) || copy_numbers(own, words + 13) < 0 ||
        (values && copy_numbers(values, words + 1 + scalars) < 0))
        goto bad;
    ring_event(ring, kind, words, 1 + scalars + value_count);
    return none_or_raise();
bad:
    ring_bad(ring, kind);
    return none_or_raise();
}

static PyMethodDef state_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))state_enter, METH_FASTCALL, NULL},
    {"leave", (PyCFunction)state_leave, METH_O, NULL},
    {"event", (PyCFunction)(void (*)(void))state_event, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef state_members[] = {
    {"seq", T_LONGLONG, offsetof(StateCore, seq), 0, NULL},
    {"forward", T_LONGLONG, offsetof(StateCore, forward), 0, NULL},
    {"step", T_LONGLONG, offsetof(StateCore, step), 0, NULL},
    {"step_source", T_LONGLONG, offsetof(StateCore, step_source), 0, NULL},
    {"phase", T_LONGLONG, offsetof(StateCore, phase), 0, NULL},
    {"capture_phase", T_LONGLONG, offsetof(StateCore, capture_phase), 0, NULL},
    {"calm_phase", T_LONGLONG, offsetof(StateCore, calm_phase), 0, NULL},
    {"capturing", T_OBJECT, offsetof(StateCore, capturing), 0, NULL},
    {"clock_offset", T_LONGLONG, offsetof(StateCore, clock_offset), 0, NULL},
    {"open", T_OBJECT_EX, offsetof(StateCore, open), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject StateCoreType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.StateCore",
    .tp_basicsize = sizeof(StateCore),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = state_new,
    .tp_init = (initproc)state_init,
    .tp_dealloc = (destructor)state_dealloc,
    .tp_traverse = (traverseproc)state_traverse,
    .tp_clear = (inquiry)state_clear,
    .tp_methods = state_methods,
    .tp_members = state_members,
};

/* ---- Looker ------------------------------------------------------------------------------ */

enum { ROWS, INTEGER, NAME, ANY, VECTOR, COUNTED, CONVERSIONS };

/* The columns that are read from attributes of one object. */
typedef struct {
    Py_ssize_t count;
    PyObject *names;      /* tuple of interned str */
    PyObject *converters; /* tuple: called for ANY and NAME, and for ROWS of no plain tensor */
    int *places, *conversions;
    PyObject **named; /* NAME: the value converted last */
    int64_t *name_codes;
} Columns;

/* The columns of one class of speculative input. */
typedef struct {
    PyTypeObject *type;
    Columns columns;
    Py_ssize_t code_count;
    int *code_places;
    int64_t *codes;
} Speculative;

typedef struct {
    PyObject *owner;
    PyObject **raw; /* the attributes, then the speculative input */
    PyObject **spec_raw;
    Py_ssize_t spec_count;
    Speculative *spec;
    Snapshot *snapshot;
} Look;

#define MAX_COLUMNS 256
#define MAX_ORDER 512
#define MAX_SPECULATIVE 64
#define MAX_SPEC_COLUMNS 64

typedef struct {
    PyObject_HEAD
    Columns columns;
    Py_ssize_t scalar_count, mirror;
    int64_t *blank;
    int max_place, sum_place;
    PyObject *spec_name, *tensor_type, *lengths_of, *partial, *describe;
    lenfunc length; /* of tensor_type's base in C */
    Speculative *speculative[MAX_SPECULATIVE];
    Py_ssize_t speculative_count;
    Look looks[2];
    int last;
    /* Keys of a batch in their order, and which column each is; see fetch_in_order. */
    Py_ssize_t order_length, order_columns[MAX_ORDER];
    unsigned long misses;
    /* The columns that are lists, which are looked into every time. */
    Py_ssize_t list_count, lists[MAX_COLUMNS];
    PyObject *order_keys[MAX_ORDER];
} Looker;

static PyTypeObject LookerType;

static void columns_free(Columns *self)
{
    for (Py_ssize_t i = 0; self->named != NULL && i < self->count; i++)
        Py_XDECREF(self->named[i]);
    Py_XDECREF(self->names);
    Py_XDECREF(self->converters);
    PyMem_Free(self->places);
    PyMem_Free(self->conversions);
    PyMem_Free(self->named);
    PyMem_Free(self->name_codes);
    memset(self, 0, sizeof(*self));
}

/* From three tuples: names, (place, conversion) pairs, converters. */
static int columns_fill(Columns *self, PyObject *names, PyObject *pairs, PyObject *converters,
                        Py_ssize_t scalar_count)
{
    Py_ssize_t count;
    if (!PyTuple_CheckExact(names) || !PyTuple_CheckExact(pairs) || !PyTuple_CheckExact(converters))
        goto wrong;
    count = PyTuple_GET_SIZE(names);
    if (PyTuple_GET_SIZE(pairs) != count || PyTuple_GET_SIZE(converters) != count)
        goto wrong;
    self->places = PyMem_Calloc((size_t)count + 1, sizeof(int));
    self->conversions = PyMem_Calloc((size_t)count + 1, sizeof(int));
    self->named = PyMem_Calloc((size_t)count + 1, sizeof(PyObject *));
    self->name_codes = PyMem_Calloc((size_t)count + 1, sizeof(int64_t));
    if (!self->places || !self->conversions || !self->named || !self->name_codes) {
        PyErr_NoMemory();
        return -1;
    }
    self->count = count;
    Py_INCREF(names);
    self->names = names;
    Py_INCREF(converters);
    self->converters = converters;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(names, i)))
            goto wrong;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "ii", &self->places[i],
                              &self->conversions[i]))
            return -1;
        if (self->places[i] < 0 || self->places[i] >= scalar_count || self->conversions[i] < 0 ||
            self->conversions[i] >= CONVERSIONS)
            goto wrong;
    }
    return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "columns come as names, pairs and converters");
    return -1;
}

static void look_clear(Look *look, Py_ssize_t count)
{
    Py_CLEAR(look->owner);
    Py_CLEAR(look->snapshot);
    for (Py_ssize_t i = 0; look->raw != NULL && i <= count; i++)
        Py_CLEAR(look->raw[i]);
    for (Py_ssize_t i = 0; look->spec_raw != NULL && i < look->spec_count; i++)
        Py_CLEAR(look->spec_raw[i]);
    look->spec_count = 0;
    look->spec = NULL;
}

static void looker_dealloc(Looker *self)
{
    for (int i = 0; i < 2; i++) {
        look_clear(&self->looks[i], self->columns.count);
        PyMem_Free(self->looks[i].raw);
        PyMem_Free(self->looks[i].spec_raw);
    }
    for (Py_ssize_t i = 0; i < self->speculative_count; i++) {
        Speculative *spec = self->speculative[i];
        Py_XDECREF((PyObject *)spec->type);
        columns_free(&spec->columns);
        PyMem_Free(spec->code_places);
        PyMem_Free(spec->codes);
        PyMem_Free(spec);
    }
    for (Py_ssize_t i = 0; i < MAX_ORDER; i++)
        Py_XDECREF(self->order_keys[i]);
    columns_free(&self->columns);
    PyMem_Free(self->blank);
    Py_XDECREF(self->spec_name);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->lengths_of);
    Py_XDECREF(self->partial);
    Py_XDECREF(self->describe);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *looker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"names",       "pairs",      "converters", "blank",   "mirror",
                               "lengths",     "tensor_type", "lengths_of", "partial", "describe",
                               NULL};
    PyObject *names, *pairs, *converters, *blank, *tensor_type, *lengths_of, *partial, *describe;
    Py_ssize_t mirror;
    int max_place, sum_place;
    Looker *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!n(ii)OOOO", keywords, &names, &pairs,
                                     &converters, &PyList_Type, &blank, &mirror, &max_place,
                                     &sum_place, &tensor_type, &lengths_of, &partial, &describe))
        return NULL;
    self = (Looker *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->scalar_count = PyList_GET_SIZE(blank);
    if (columns_fill(&self->columns, names, pairs, converters, self->scalar_count) < 0)
        goto bad;
    if (self->columns.count > MAX_COLUMNS || mirror < 0 || mirror > self->columns.count || max_place < 0 || sum_place < 0 ||
        max_place >= self->scalar_count || sum_place >= self->scalar_count) {
        PyErr_SetString(PyExc_ValueError, "no such column");
        goto bad;
    }
    for (Py_ssize_t i = 0; i < self->columns.count; i++)
        if (self->columns.conversions[i] == VECTOR || self->columns.conversions[i] == COUNTED)
            self->lists[self->list_count++] = i;
    self->mirror = mirror;
    self->max_place = max_place;
    self->sum_place = sum_place;
    if (PyList_GET_SIZE(blank) != self->scalar_count) {
        PyErr_SetString(PyExc_ValueError, "the blank changed");
        goto bad;
    }
    self->blank = PyMem_Calloc((size_t)self->scalar_count + 1, sizeof(int64_t));
    for (int i = 0; i < 2; i++) {
        self->looks[i].raw = PyMem_Calloc((size_t)self->columns.count + 1, sizeof(PyObject *));
        self->looks[i].spec_raw = PyMem_Calloc(MAX_SPEC_COLUMNS, sizeof(PyObject *));
    }
    if (!self->blank || !self->looks[0].raw || !self->looks[1].raw || !self->looks[0].spec_raw ||
        !self->looks[1].spec_raw) {
        PyErr_NoMemory();
        goto bad;
    }
    if (copy_numbers(blank, self->blank) < 0)
        goto bad;
    self->spec_name = PyUnicode_InternFromString("spec_info");
    if (self->spec_name == NULL)
        goto bad;
    Py_INCREF(tensor_type);
    self->tensor_type = tensor_type;
    if (PyType_Check(tensor_type)) {
        PyTypeObject *base = ((PyTypeObject *)tensor_type)->tp_base;
        if (base != NULL && base->tp_as_mapping != NULL)
            self->length = base->tp_as_mapping->mp_length;
    }
    Py_INCREF(lengths_of);
    self->lengths_of = lengths_of;
    Py_INCREF(partial);
    self->partial = partial;
    Py_INCREF(describe);
    self->describe = describe;
    return (PyObject *)self;
bad:
    Py_DECREF(self);
    return NULL;
}

/* How to read a class of speculative input, asked of Python once a class. */
static Speculative *looker_speculative(Looker *self, PyObject *spec)
{
    PyTypeObject *type = Py_TYPE(spec);
    PyObject *told, *codes, *names, *pairs, *converters;
    Speculative *found;
    for (Py_ssize_t i = 0; i < self->speculative_count; i++)
        if (self->speculative[i]->type == type)
            return self->speculative[i];
    if (self->speculative_count == MAX_SPECULATIVE) {
        PyErr_SetString(PyExc_RuntimeError, "too many classes of speculative input");
        return NULL;
    }
    told = PyObject_CallOneArg(self->describe, spec);
    if (told == NULL)
        return NULL;
    found = PyMem_Calloc(1, sizeof(Speculative));
    if (found == NULL) {
        PyErr_NoMemory();
        goto bad;
    }
    if (!PyArg_ParseTuple(told, "O!OOO", &PyTuple_Type, &codes, &names, &pairs, &converters))
        goto bad;
    if (columns_fill(&found->columns, names, pairs, converters, self->scalar_count) < 0)
        goto bad;
    found->code_count = PyTuple_GET_SIZE(codes);
    found->code_places = PyMem_Calloc((size_t)found->code_count + 1, sizeof(int));
    found->codes = PyMem_Calloc((size_t)found->code_count + 1, sizeof(int64_t));
    if (!found->code_places || !found->codes || found->columns.count > MAX_SPEC_COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "too many columns");
        goto bad;
    }
    for (Py_ssize_t i = 0; i < found->code_count; i++) {
        long long code;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(codes, i), "iL", &found->code_places[i], &code))
            goto bad;
        found->codes[i] = code;
        if (found->code_places[i] < 0 || found->code_places[i] >= self->scalar_count) {
            PyErr_SetString(PyExc_ValueError, "no such column");
            goto bad;
        }
    }
    if (self->speculative_count == MAX_SPECULATIVE) { /* `describe` may have come back here */
        PyErr_SetString(PyExc_RuntimeError, "too many classes of speculative input");
        goto bad;
    }
    Py_DECREF(told);
    Py_INCREF((PyObject *)type);
    found->type = type;
    self->speculative[self->speculative_count++] = found;
    return found;
bad:
    Py_DECREF(told);
    if (found != NULL) {
        columns_free(&found->columns);
        PyMem_Free(found->code_places);
        PyMem_Free(found->codes);
        PyMem_Free(found);
    }
    return NULL;
}

/* A list of ints, or an empty one: what a vector can be. */
static int is_integers(PyObject *value)
{
    return PyList_CheckExact(value) &&
           (PyList_GET_SIZE(value) == 0 || PyLong_CheckExact(PyList_GET_ITEM(value, 0)));
}

static int64_t call_converter(PyObject *converter, PyObject *value)
{
    PyObject *number = PyObject_CallOneArg(converter, value);
    int64_t code = NOT_OBSERVED_CODE;
    int overflow = 0;
    if (number == NULL)
        return -1;
    if (PyLong_Check(number)) {
        code = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (overflow)
            code = NOT_OBSERVED_CODE;
    }
    Py_DECREF(number);
    return code;
}

/* Rows of a plain tensor by the C function under its `__len__`, which is one of Python. */
static Py_ssize_t tensor_rows(Looker *self, PyObject *tensor)
{
    return self->length == NULL ? -1 : self->length(tensor);
}

/* The code of a value, no vector; -1 may come with an exception. */
static int64_t looker_convert(Looker *self, Columns *columns, Py_ssize_t i, PyObject *value)
{
    PyObject *converter = PyTuple_GET_ITEM(columns->converters, i);
    if (value == Py_None)
        return NONE_CODE;
    switch (columns->conversions[i]) {
    case ROWS:
        if (PyList_CheckExact(value))
            return PyList_GET_SIZE(value);
        if ((PyObject *)Py_TYPE(value) == self->tensor_type) {
            Py_ssize_t rows = tensor_rows(self, value);
            if (rows > 0)
                return rows;
            if (!forgive()) /* empty, or a scalar: the converter knows which */
                return -1;
        }
        return call_converter(converter, value);
    case COUNTED: {
        Py_ssize_t length = PyObject_Size(value);
        return length;
    }
    case INTEGER: {
        int overflow = 0;
        long long number;
        if (!PyLong_Check(value))
            return NOT_OBSERVED_CODE;
        number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? NOT_OBSERVED_CODE : number;
    }
    case NAME:
        if (columns->named[i] != value) {
            int64_t code = call_converter(converter, value);
            if (code == -1 && PyErr_Occurred())
                return -1;
            Py_INCREF(value);
            Py_XSETREF(columns->named[i], value);
            columns->name_codes[i] = code;
        }
        return columns->name_codes[i];
    default:
        return call_converter(converter, value);
    }
}

/* Largest and sum of seq_lens_cpu; 0 with an exception set. */
static int looker_lengths(Looker *self, PyObject *mirror, int64_t *scalars)
{
    PyObject *pair;
    scalars[self->max_place] = scalars[self->sum_place] = NONE_CODE;
    if (mirror == Py_None)
        return 1;
    if ((PyObject *)Py_TYPE(mirror) == self->tensor_type) {
        PyObject *on_host = PyObject_GetAttr(mirror, text_is_cpu), *listed;
        Py_ssize_t rows = on_host == NULL ? -1 : tensor_rows(self, mirror);
        int64_t largest = 0, sum = 0;
        int plain = on_host == Py_True && rows > 0 && rows <= SHORT_MIRROR;
        Py_XDECREF(on_host);
        if (!forgive())
            return 0;
        if (plain) {
            listed = PyObject_CallMethodNoArgs(mirror, text_tolist);
            if (listed == NULL)
                return 0;
            plain = PyList_CheckExact(listed);
            for (Py_ssize_t i = 0; plain && i < PyList_GET_SIZE(listed); i++) {
                PyObject *item = PyList_GET_ITEM(listed, i);
                int overflow = 0;
                int64_t length = 0;
                if (PyLong_CheckExact(item))
                    length = PyLong_AsLongLongAndOverflow(item, &overflow);
                else
                    plain = 0;
                if (overflow || length > INT64_MAX / (SHORT_MIRROR + 1) ||
                    length < -(INT64_MAX / (SHORT_MIRROR + 1)))
                    plain = 0;
                largest = i == 0 || length > largest ? length : largest;
                sum += plain ? length : 0;
            }
            Py_DECREF(listed);
        }
        if (plain) {
            scalars[self->max_place] = largest;
            scalars[self->sum_place] = sum;
            return 1;
        }
    }
    pair = PyObject_CallOneArg(self->lengths_of, mirror);
    if (pair == NULL)
        return 0;
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
        Py_DECREF(pair);
        PyErr_SetString(PyExc_TypeError, "lengths come as a pair");
        return 0;
    }
    scalars[self->max_place] = int64_of(PyTuple_GET_ITEM(pair, 0));
    scalars[self->sum_place] = int64_of(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    return !PyErr_Occurred();
}

/* Whether the lists among the attributes still hold what the snapshot says. */
static int lists_same(Looker *self, PyObject **now, Snapshot *snapshot)
{
    const int64_t *scalars = snapshot->record + 1;
    const int64_t *values = scalars + snapshot->scalar_count;
    for (Py_ssize_t at = 0; at < self->list_count; at++) {
        const Py_ssize_t i = self->lists[at];
        const int conversion = self->columns.conversions[i];
        const int64_t code = scalars[self->columns.places[i]];
        PyObject *value = now[i];
        if (conversion == COUNTED && value != Py_None) {
            if (!PyList_CheckExact(value) || PyList_GET_SIZE(value) != code)
                return 0;
        } else if (conversion == VECTOR && value != Py_None) {
            /* One that was not observed is converted again: it may be readable now. */
            if (!is_integers(value) || PyList_GET_SIZE(value) != code)
                return 0;
            for (Py_ssize_t k = 0; k < code; k++) {
                int overflow = 0;
                PyObject *item = PyList_GET_ITEM(value, k);
                if (!PyLong_CheckExact(item) ||
                    PyLong_AsLongLongAndOverflow(item, &overflow) != values[k] || overflow)
                    return 0;
            }
            values += code;
        }
    }
    return 1;
}

/* The attributes of a speculative input now; how many, -1 with an exception set. */
static Py_ssize_t speculative_now(Speculative *spec, PyObject *object, PyObject **into)
{
    for (Py_ssize_t i = 0; i < spec->columns.count; i++) {
        into[i] = PyObject_GetAttr(object, PyTuple_GET_ITEM(spec->columns.names, i));
        if (into[i] == NULL) {
            while (i-- > 0)
                Py_DECREF(into[i]);
            return -1;
        }
    }
    return spec->columns.count;
}

/* Room for the values of every vector among the attributes. */
static Py_ssize_t vector_room(Looker *self, PyObject **now)
{
    Py_ssize_t room = 0;
    for (Py_ssize_t at = 0; at < self->list_count; at++) {
        const Py_ssize_t i = self->lists[at];
        if (self->columns.conversions[i] == VECTOR && is_integers(now[i]))
            room += PyList_GET_SIZE(now[i]);
    }
    return room;
}

/* Copy the vectors; those that are no list of int64 were not observed. The values copied. */
static Py_ssize_t fill_vectors(Looker *self, PyObject **now, int64_t *scalars, int64_t *values,
                               Py_ssize_t room)
{
    Py_ssize_t used = 0;
    for (Py_ssize_t at = 0; at < self->list_count; at++) {
        const Py_ssize_t i = self->lists[at];
        int64_t *code;
        Py_ssize_t count;
        if (self->columns.conversions[i] != VECTOR)
            continue;
        code = &scalars[self->columns.places[i]];
        if (now[i] == Py_None) {
            *code = NONE_CODE;
            continue;
        }
        *code = NOT_OBSERVED_CODE;
        if (!is_integers(now[i]))
            continue;
        count = PyList_GET_SIZE(now[i]);
        if (count > room - used)
            continue;
        *code = count;
        for (Py_ssize_t k = 0; k < count; k++) {
            int overflow = 0;
            PyObject *item = PyList_GET_ITEM(now[i], k);
            if (!PyLong_CheckExact(item)) {
                *code = NOT_OBSERVED_CODE;
                break;
            }
            values[used + k] = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (overflow) {
                *code = NOT_OBSERVED_CODE;
                break;
            }
        }
        if (*code == count)
            used += count;
    }
    return used;
}

/* The snapshot of attributes that differ from the last look; a new reference. */
static Snapshot *looker_convert_all(Looker *self, Look *look, PyObject **now, Speculative *spec,
                                    PyObject **spec_now)
{
    Snapshot *before = look->snapshot, *made;
    Columns *columns = &self->columns;
    int64_t *scalars;
    Py_ssize_t room;
    made = snapshot_make(&SnapshotType, self->scalar_count, vector_room(self, now));
    if (made == NULL)
        return NULL;
    scalars = made->record + 1;
    room = made->value_count;
    memcpy(scalars, before == NULL ? self->blank : before->record + 1,
           sizeof(int64_t) * (size_t)self->scalar_count);
    for (Py_ssize_t i = 0; i < columns->count; i++) {
        int64_t code;
        if (columns->conversions[i] == VECTOR ||
            (before != NULL && now[i] == look->raw[i] && columns->conversions[i] != COUNTED))
            continue;
        code = looker_convert(self, columns, i, now[i]);
        if (code == -1 && PyErr_Occurred())
            goto bad;
        scalars[columns->places[i]] = code;
    }
    if ((before == NULL || now[self->mirror] != look->raw[self->mirror]) &&
        !looker_lengths(self, now[self->mirror], scalars))
        goto bad;
    if (before == NULL || look->spec != spec)
        for (Py_ssize_t i = 0; i < spec->code_count; i++)
            scalars[spec->code_places[i]] = spec->codes[i];
    for (Py_ssize_t i = 0; i < spec->columns.count; i++) {
        int64_t code;
        if (before != NULL && look->spec == spec && look->spec_raw[i] == spec_now[i])
            continue;
        code = looker_convert(self, &spec->columns, i, spec_now[i]);
        if (code == -1 && PyErr_Occurred())
            goto bad;
        scalars[spec->columns.places[i]] = code;
    }
    /* Last, since the code that ran above may have changed a list. */
    made->value_count = fill_vectors(self, now, scalars, scalars + self->scalar_count, room);
    made->record[0] =
        record_head(RECORD_EVENT, SNAPSHOT_KIND, made->scalar_count, made->value_count);
    if (before != NULL && before->value_count == made->value_count &&
        memcmp(before->record, made->record,
               sizeof(int64_t) * (size_t)(1 + made->scalar_count + made->value_count)) == 0) {
        /* Other objects of the same sizes are no other snapshot, and need no other record. */
        Py_DECREF(made);
        Py_INCREF(before);
        return before;
    }
    return made;
bad:
    Py_DECREF(made);
    return NULL;
}

/* The attributes of a batch now, borrowed, by the order in which its dict held them last time.
 * A dataclass sets its fields in one order, so this is one walk instead of a search each. */
static int fetch_in_order(Looker *self, PyObject *fields, PyObject **now)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, at = 0;
    if (self->order_length == 0)
        return 0;
    while (at < self->order_length && PyDict_Next(fields, &position, &key, &value)) {
        if (key != self->order_keys[at])
            return 0;
        if (self->order_columns[at] >= 0)
            now[self->order_columns[at]] = value;
        at++;
    }
    return at == self->order_length;
}

/* Remember the order of the keys up to the last one that is a column. */
static void learn_order(Looker *self, PyObject *fields)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *key, *value;
    Py_ssize_t position = 0, at = 0, found = 0;
    self->order_length = 0;
    while (PyDict_Next(fields, &position, &key, &value) && at < MAX_ORDER) {
        Py_ssize_t column = -1;
        for (Py_ssize_t i = 0; i <= count && column < 0; i++)
            if (key == (i < count ? PyTuple_GET_ITEM(self->columns.names, i) : self->spec_name))
                column = i;
        found += column >= 0;
        Py_INCREF(key);
        Py_XSETREF(self->order_keys[at], key);
        self->order_columns[at++] = column;
        if (found == count + 1) {
            self->order_length = at;
            return;
        }
    }
}

/* The attributes of a batch now, borrowed; 0 if one is missing or an exception is set. */
static int fetch(Looker *self, PyObject *fields, PyObject **now)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    if (fetch_in_order(self, fields, now))
        return 1;
    while (PyDict_Next(fields, &position, &key, &value))
        if (!PyUnicode_CheckExact(key))
            return 0; /* its comparison could run code, while references are borrowed */
    for (Py_ssize_t i = 0; i <= count; i++) {
        PyObject *name = i < count ? PyTuple_GET_ITEM(self->columns.names, i) : self->spec_name;
        now[i] = PyDict_GetItemWithError(fields, name);
        if (now[i] == NULL)
            return 0;
    }
    /* Seldom, since it costs more than the search, and batches may keep no order. */
    if (self->misses++ % 256 == 0)
        learn_order(self, fields);
    return 1;
}

/* Keep a look; what it takes the place of is let go last, since that may run code. */
static void look_keep(Look *into, PyObject *fields, Snapshot *snapshot, Speculative *spec,
                      PyObject **now, Py_ssize_t count, PyObject **spec_now, Py_ssize_t spec_count)
{
    Snapshot *old = into->snapshot;
    PyObject *old_owner = into->owner, *gone[MAX_COLUMNS + 1 + MAX_SPEC_COLUMNS];
    Py_ssize_t gone_count = 0;
    Py_INCREF(snapshot);
    into->snapshot = snapshot;
    Py_INCREF(fields);
    into->owner = fields;
    into->spec = spec;
    into->spec_count = spec_count;
    for (Py_ssize_t i = 0; i <= count; i++) {
        gone[gone_count++] = into->raw[i];
        Py_INCREF(now[i]);
        into->raw[i] = now[i];
    }
    for (Py_ssize_t i = 0; i < MAX_SPEC_COLUMNS; i++) {
        gone[gone_count++] = into->spec_raw[i];
        into->spec_raw[i] = i < spec_count ? spec_now[i] : NULL;
        Py_XINCREF(into->spec_raw[i]);
    }
    while (gone_count > 0)
        Py_XDECREF(gone[--gone_count]);
    Py_XDECREF((PyObject *)old);
    Py_XDECREF(old_owner);
}

/* A copy of a look that keeps alive what it refers to: converters may run code that looks again. */
static void look_hold(const Look *look, Look *held, PyObject **raw, PyObject **spec_raw,
                      Py_ssize_t count)
{
    *held = *look;
    held->raw = raw;
    held->spec_raw = spec_raw;
    Py_XINCREF((PyObject *)held->owner);
    Py_XINCREF((PyObject *)held->snapshot);
    for (Py_ssize_t i = 0; i <= count; i++) {
        raw[i] = look->raw[i];
        Py_XINCREF(raw[i]);
    }
    for (Py_ssize_t i = 0; i < look->spec_count; i++) {
        spec_raw[i] = look->spec_raw[i];
        Py_XINCREF(spec_raw[i]);
    }
}

/* A look at attributes that are all there; the speculative input is held by the caller. */
static PyObject *looker_look(Looker *self, PyObject *fields, PyObject *spec_input)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *now[MAX_COLUMNS + 1], *spec_now[MAX_SPEC_COLUMNS];
    Look *look = &self->looks[self->last];
    Py_ssize_t spec_count;
    Speculative *spec;
    Snapshot *found = NULL;
    if (look->owner != fields) {
        /* SGLang goes back and forth between a batch and its padded copy. */
        self->last = 1 - self->last;
        if (self->looks[self->last].owner == fields)
            look = &self->looks[self->last];
    }
    spec = looker_speculative(self, spec_input);
    if (spec == NULL)
        return NULL;
    spec_count = speculative_now(spec, spec_input, spec_now);
    if (spec_count < 0)
        return NULL;
    /* From here to the comparison no code of Python runs, so borrowed references will do. */
    if (!fetch(self, fields, now)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_KeyError, "an attribute is missing");
    } else if (look->owner == fields && look->spec == spec &&
               memcmp(now, look->raw, sizeof(PyObject *) * (size_t)(count + 1)) == 0 &&
               memcmp(spec_now, look->spec_raw, sizeof(PyObject *) * (size_t)spec_count) == 0 &&
               lists_same(self, now, look->snapshot)) {
        found = look->snapshot;
        Py_INCREF(found);
    } else {
        PyObject *raw[MAX_COLUMNS + 1], *spec_raw[MAX_SPEC_COLUMNS];
        Look held;
        for (Py_ssize_t i = 0; i <= count; i++)
            Py_INCREF(now[i]);
        look_hold(look, &held, raw, spec_raw, count);
        found = looker_convert_all(self, &held, now, spec, spec_now);
        if (found != NULL)
            look_keep(&self->looks[self->last], fields, found, spec, now, count, spec_now,
                      spec_count);
        look_clear(&held, count);
        for (Py_ssize_t i = 0; i <= count; i++)
            Py_DECREF(now[i]);
    }
    for (Py_ssize_t i = 0; i < spec_count; i++)
        Py_DECREF(spec_now[i]);
    return (PyObject *)found;
}

static PyObject *looker_take(Looker *self, PyObject *batch)
{
    PyObject *fields = PyObject_GetAttr(batch, text_dict), *spec_input = NULL, *found = NULL;
    if (fields != NULL && PyDict_CheckExact(fields))
        spec_input = PyDict_GetItemWithError(fields, self->spec_name);
    if (spec_input != NULL) {
        Py_INCREF(spec_input);
        found = looker_look(self, fields, spec_input);
        Py_DECREF(spec_input);
    }
    Py_XDECREF(fields);
    if (found != NULL)
        return found;
    /* Attributes are missing: the slow way knows which may. */
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_KeyError) &&
        !(fields == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)))
        return NULL;
    PyErr_Clear();
    return PyObject_CallOneArg(self->partial, batch);
}

static PyObject *looker_forget(Looker *self, PyObject *unused)
{
    self->last = 0;
    look_clear(&self->looks[0], self->columns.count);
    look_clear(&self->looks[1], self->columns.count);
    Py_RETURN_NONE;
}

/* read(object, own): the columns of this Looker from the attributes of an object, into a list */
static PyObject *looker_read(Looker *self, PyObject *const *given, Py_ssize_t count)
{
    Columns *columns = &self->columns;
    if (count != 2 || !PyList_CheckExact(given[1]) || PyList_GET_SIZE(given[1]) < self->scalar_count) {
        PyErr_SetString(PyExc_TypeError, "read takes an object and a list");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < columns->count; i++) {
        PyObject *value = PyObject_GetAttr(given[0], PyTuple_GET_ITEM(columns->names, i)), *number;
        int64_t code;
        if (value == NULL)
            return NULL;
        code = looker_convert(self, columns, i, value);
        Py_DECREF(value);
        if (code == -1 && PyErr_Occurred())
            return NULL;
        number = PyLong_FromLongLong(code);
        if (number == NULL || PyList_SetItem(given[1], columns->places[i], number) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef looker_methods[] = {
    {"read", (PyCFunction)(void (*)(void))looker_read, METH_FASTCALL, NULL},
    {"take", (PyCFunction)looker_take, METH_O, NULL},
    {"forget", (PyCFunction)looker_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LookerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Looker",
    .tp_basicsize = sizeof(Looker),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = looker_new,
    .tp_dealloc = (destructor)looker_dealloc,
    .tp_methods = looker_methods,
};

/* ---- calls: what hooks.py does around a hooked function ------------------------------------ */

/* Whether one probe still works; the base of hooks.Hook, which says how one is lost. */
typedef struct {
    PyObject_HEAD
    char alive;
    long number;
} HookCore;

static PyTypeObject HookCoreType;

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return type->tp_alloc(type, 0);
}

static int hook_init(HookCore *self, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, "l", &self->number))
        return -1;
    self->alive = 1;
    return 0;
}

static void hook_dealloc(HookCore *self)
{
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef hook_members[] = {
    {"alive", T_BOOL, offsetof(HookCore, alive), 0, NULL},
    {"number", T_LONG, offsetof(HookCore, number), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject HookCoreType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.HookCore",
    .tp_basicsize = sizeof(HookCore),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = hook_new,
    .tp_init = (initproc)hook_init,
    .tp_dealloc = (destructor)hook_dealloc,
    .tp_members = hook_members,
};

/* One hooked function. An event has `enter` and `leave`; a watch `before` and `after`. */
typedef struct {
    PyObject_HEAD
    HookCore *hook;
    StateCore *state;
    PyObject *first, *second; /* enter, leave or before, after; the latter may be None */
    int counts;               /* whether the ring counts the calls */
    PyObject *guard_exit;     /* told of an exception that leaves an outermost call */
} Call;

static int call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hook);
    Py_VISIT(self->state);
    Py_VISIT(self->first);
    Py_VISIT(self->second);
    Py_VISIT(self->guard_exit);
    return 0;
}

static int call_clear(Call *self)
{
    Py_CLEAR(self->hook);
    Py_CLEAR(self->state);
    Py_CLEAR(self->first);
    Py_CLEAR(self->second);
    Py_CLEAR(self->guard_exit);
    return 0;
}

static void call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *hook, *state, *first, *second, *guard_exit;
    int counts = 1;
    Call *self;
    if (!PyArg_ParseTuple(args, "O!O!OOO|p", &HookCoreType, &hook, &StateCoreType, &state, &first,
                          &second, &guard_exit, &counts))
        return NULL;
    self = (Call *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(hook);
    self->hook = (HookCore *)hook;
    Py_INCREF(state);
    self->state = (StateCore *)state;
    Py_INCREF(first);
    self->first = first;
    Py_INCREF(second);
    self->second = second;
    Py_INCREF(guard_exit);
    self->guard_exit = guard_exit;
    self->counts = counts;
    return (PyObject *)self;
}

/* The probe raised: have Python switch it off. 0 where the exception must go on. */
static int hook_lost(HookCore *hook, Py_ssize_t depth)
{
    PyObject *type, *value, *traceback, *number, *done = NULL;
    int forgiven;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return 0;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    hook->alive = 0;
    number = PyLong_FromSsize_t(depth);
    if (number != NULL && value != NULL)
        done = PyObject_CallMethodObjArgs((PyObject *)hook, text_lose, value, number, NULL);
    forgiven = forgive();
    Py_XDECREF(done);
    Py_XDECREF(number);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return forgiven;
}

/* The original, exactly once; the guard is told of what leaves an outermost one. */
static PyObject *call_original(PyObject *guard_exit, PyObject *original, PyObject *args,
                               PyObject *kwargs, int outermost)
{
    PyObject *result = PyObject_Call(original, args, kwargs);
    if (result == NULL && outermost) {
        PyObject *type, *value, *traceback, *done;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        if (traceback != NULL)
            PyException_SetTraceback(value, traceback);
        done = PyObject_CallFunctionObjArgs(guard_exit, type, value,
                                            traceback == NULL ? Py_None : traceback, NULL);
        if (forgive()) {
            PyErr_Restore(type, value, traceback);
        } else {
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
        }
        Py_XDECREF(done);
    }
    return result;
}

static void call_count(Call *self)
{
    RingCore *ring = self->state->ring;
    HookCore *hook = self->hook;
    if (self->counts && ring != NULL && ring->on && ring->fired != NULL && hook->number >= 0 && hook->number < MAX_HOOKS)
        ring->fired[hook->number]++;
}

static int call_arguments(PyObject *const *given, Py_ssize_t count)
{
    if (count == 3 && PyTuple_CheckExact(given[1]) && PyDict_CheckExact(given[2]))
        return 1;
    PyErr_SetString(PyExc_TypeError, "a call takes the original, a tuple and a dict");
    return 0;
}

/* around(original, args, kwargs): an event, if the probe opens one */
static PyObject *call_around(Call *self, PyObject *const *given, Py_ssize_t count)
{
    HookCore *hook = self->hook;
    PyObject *frame = NULL, *result;
    Py_ssize_t depth;
    if (!call_arguments(given, count))
        return NULL;
    depth = PyList_GET_SIZE(self->state->open);
    if (hook->alive) {
        call_count(self);
        frame = PyObject_Call(self->first, given[1], given[2]);
        if (frame == NULL && !hook_lost(hook, depth))
            return NULL;
        if (frame == Py_None)
            Py_CLEAR(frame);
    }
    if (frame == NULL)
        return PyObject_Call(given[0], given[1], given[2]);
    result = call_original(self->guard_exit, given[0], given[1], given[2], depth == 0);
    if (result != NULL && hook->alive) {
        PyObject *done = PyObject_CallFunctionObjArgs(self->second, frame, result, NULL);
        if (done == NULL && !hook_lost(hook, depth))
            Py_CLEAR(result);
        Py_XDECREF(done);
    } else if (result != NULL && PyList_GET_SIZE(self->state->open) > depth &&
               PyList_SetSlice(self->state->open, depth, PY_SSIZE_T_MAX, NULL) < 0) {
        PyErr_Clear();
    }
    Py_DECREF(frame);
    return result;
}

/* The result and then the arguments, for `after`. */
static PyObject *with_result(PyObject *result, PyObject *args)
{
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    PyObject *all = PyTuple_New(count + 1);
    if (all == NULL)
        return NULL;
    Py_INCREF(result);
    PyTuple_SET_ITEM(all, 0, result);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(args, i);
        Py_INCREF(item);
        PyTuple_SET_ITEM(all, i + 1, item);
    }
    return all;
}

/* watch(original, args, kwargs): no event of its own */
static PyObject *call_watch(Call *self, PyObject *const *given, Py_ssize_t count)
{
    HookCore *hook = self->hook;
    PyObject *result;
    Py_ssize_t depth;
    if (!call_arguments(given, count))
        return NULL;
    depth = PyList_GET_SIZE(self->state->open);
    if (hook->alive) {
        call_count(self);
        if (self->first != Py_None) {
            PyObject *done = PyObject_Call(self->first, given[1], given[2]);
            if (done == NULL && !hook_lost(hook, depth))
                return NULL;
            Py_XDECREF(done);
        }
    }
    depth = PyList_GET_SIZE(self->state->open);
    result = call_original(self->guard_exit, given[0], given[1], given[2], depth == 0);
    if (result != NULL && self->second != Py_None && hook->alive) {
        PyObject *all = with_result(result, given[1]), *done = NULL;
        depth = PyList_GET_SIZE(self->state->open);
        if (all != NULL)
            done = PyObject_Call(self->second, all, given[2]);
        if (done == NULL && !hook_lost(hook, depth))
            Py_CLEAR(result);
        Py_XDECREF(done);
        Py_XDECREF(all);
    }
    return result;
}

static PyMethodDef call_methods[] = {
    {"around", (PyCFunction)(void (*)(void))call_around, METH_FASTCALL, NULL},
    {"watch", (PyCFunction)(void (*)(void))call_watch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = call_new,
    .tp_dealloc = (destructor)call_dealloc,
    .tp_traverse = (traverseproc)call_traverse,
    .tp_clear = (inquiry)call_clear,
    .tp_methods = call_methods,
};

/* ---- Repeats: equal kernel calls of one forward --------------------------------------------- */

/* The call that LaunchProbe recorded last; see there why these are enough to know it again. */
typedef struct {
    PyObject_HEAD
    StateCore *state;
    HookCore *hook;
    PyObject *slow; /* called with original, args and kwargs where the call is another one */
    PyObject *frame, *inside, *num_splits, *cache_seqlens, *q_shape, *indices_shape;
    long long count;
} Repeats;

static PyTypeObject RepeatsType;

static int repeats_traverse(Repeats *self, visitproc visit, void *arg)
{
    Py_VISIT(self->state);
    Py_VISIT(self->hook);
    Py_VISIT(self->slow);
    Py_VISIT(self->frame);
    Py_VISIT(self->inside);
    Py_VISIT(self->num_splits);
    Py_VISIT(self->cache_seqlens);
    Py_VISIT(self->q_shape);
    Py_VISIT(self->indices_shape);
    return 0;
}

static void repeats_forget(Repeats *self)
{
    Py_CLEAR(self->frame);
    Py_CLEAR(self->inside);
    Py_CLEAR(self->num_splits);
    Py_CLEAR(self->cache_seqlens);
    Py_CLEAR(self->q_shape);
    Py_CLEAR(self->indices_shape);
    self->count = 0;
}

static int repeats_clear(Repeats *self)
{
    repeats_forget(self);
    Py_CLEAR(self->state);
    Py_CLEAR(self->hook);
    Py_CLEAR(self->slow);
    return 0;
}

static void repeats_dealloc(Repeats *self)
{
    PyObject_GC_UnTrack(self);
    repeats_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *repeats_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *state, *hook, *slow;
    Repeats *self;
    if (!PyArg_ParseTuple(args, "O!O!O", &StateCoreType, &state, &HookCoreType, &hook, &slow))
        return NULL;
    self = (Repeats *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(state);
    self->state = (StateCore *)state;
    Py_INCREF(hook);
    self->hook = (HookCore *)hook;
    Py_INCREF(slow);
    self->slow = slow;
    return (PyObject *)self;
}

/* remember(frame, inside, num_splits, cache_seqlens, q_shape, indices_shape) */
static PyObject *repeats_remember(Repeats *self, PyObject *const *given, Py_ssize_t count)
{
    PyObject **into[] = {&self->frame,         &self->inside,  &self->num_splits,
                         &self->cache_seqlens, &self->q_shape, &self->indices_shape};
    if (count != 6 || !Py_IS_TYPE(given[0], &FrameType)) {
        PyErr_SetString(PyExc_TypeError, "remember takes a frame and five objects");
        return NULL;
    }
    self->count = 0;
    for (int i = 0; i < 6; i++) {
        Py_INCREF(given[i]);
        Py_XSETREF(*into[i], given[i]);
    }
    Py_RETURN_NONE;
}

/* How many equal calls there were since `remember`, taken over by the caller. */
static PyObject *repeats_taken(Repeats *self, PyObject *unused)
{
    long long count = self->count;
    self->count = 0;
    return PyLong_FromLongLong(count);
}

static PyObject *repeats_forget_method(Repeats *self, PyObject *unused)
{
    repeats_forget(self);
    Py_RETURN_NONE;
}

/* 1 if the tensor given under `name` has this shape; 0 if not, or if that cannot be told. */
static int same_shape(PyObject *kwargs, PyObject *name, PyObject *shape)
{
    PyObject *given = PyDict_GetItemWithError(kwargs, name), *now;
    int same;
    if (given == NULL || given == Py_None)
        return shape == Py_None && !PyErr_Occurred();
    if (shape == NULL)
        return 0;
    /* What `shape` runs may forget the call that is compared with. */
    Py_INCREF(shape);
    Py_INCREF(given);
    now = PyObject_GetAttr(given, text_shape);
    Py_DECREF(given);
    same = now == NULL ? -1 : PyObject_RichCompareBool(now, shape, Py_EQ);
    Py_XDECREF(now);
    Py_DECREF(shape);
    return same;
}

static int given_is(PyObject *kwargs, PyObject *name, PyObject *known)
{
    PyObject *given = PyDict_GetItemWithError(kwargs, name);
    return (given == NULL ? Py_None : given) == known;
}

static int repeats_same(Repeats *self, PyObject *kwargs)
{
    PyObject *open = self->state->open;
    Py_ssize_t depth = PyList_GET_SIZE(open);
    int same;
    if (self->frame == NULL || depth == 0 || PyList_GET_ITEM(open, depth - 1) != self->inside ||
        !given_is(kwargs, text_num_splits, self->num_splits) ||
        !given_is(kwargs, text_cache_seqlens, self->cache_seqlens))
        return 0;
    same = same_shape(kwargs, text_q, self->q_shape);
    if (same == 1)
        same = same_shape(kwargs, text_indices, self->indices_shape);
    if (!forgive()) /* whatever else it was, the slow way meets it again and says so */
        return -1;
    return same == 1 && self->frame != NULL;
}

/* run(original, args, kwargs) */
static PyObject *repeats_run(Repeats *self, PyObject *const *given, Py_ssize_t count)
{
    PyObject *open = self->state->open, *frame, *result;
    Py_ssize_t depth;
    int same = 0;
    if (!call_arguments(given, count))
        return NULL;
    if (self->hook->alive && PyTuple_GET_SIZE(given[1]) == 0)
        same = repeats_same(self, given[2]);
    if (same < 0)
        return NULL;
    if (same == 0)
        return PyObject_Vectorcall(self->slow, given, 3, NULL);
    frame = self->frame;
    Py_INCREF(frame);
    if (PyList_Append(open, frame) < 0) {
        PyErr_Clear();
        Py_DECREF(frame);
        return PyObject_Call(given[0], given[1], given[2]);
    }
    self->count++;
    result = PyObject_Call(given[0], given[1], given[2]);
    depth = PyList_GET_SIZE(open);
    if (result != NULL && depth && PyList_GET_ITEM(open, depth - 1) == frame &&
        PyList_SetSlice(open, depth - 1, depth, NULL) < 0)
        PyErr_Clear();
    Py_DECREF(frame);
    return result;
}

static PyMethodDef repeats_methods[] = {
    {"remember", (PyCFunction)(void (*)(void))repeats_remember, METH_FASTCALL, NULL},
    {"taken", (PyCFunction)repeats_taken, METH_NOARGS, NULL},
    {"forget", (PyCFunction)repeats_forget_method, METH_NOARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))repeats_run, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject RepeatsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Repeats",
    .tp_basicsize = sizeof(Repeats),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = repeats_new,
    .tp_dealloc = (destructor)repeats_dealloc,
    .tp_traverse = (traverseproc)repeats_traverse,
    .tp_clear = (inquiry)repeats_clear,
    .tp_methods = repeats_methods,
};

/* ---- the module -------------------------------------------------------------------------- */

static PyObject *crc_of(PyObject *module, PyObject *args)
{
    Py_buffer view;
    unsigned int start;
    uint32_t crc;
    if (!PyArg_ParseTuple(args, "y*I", &view, &start))
        return NULL;
    if (view.len % 8 || (uintptr_t)view.buf % 8) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "the checksum is of whole words");
        return NULL;
    }
    crc = crc_words((const int64_t *)view.buf, view.len / 8, start);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef module_methods[] = {
    {"crc32", crc_of, METH_VARARGS, "zlib.crc32 of whole words, for the tests."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "padtrace.record._native",
    .m_doc = "The hot classes of the recorder, compiled; see padtrace.record.native.",
    .m_size = -1,
    .m_methods = module_methods,
};

static int intern(PyObject **into, const char *text)
{
    *into = PyUnicode_InternFromString(text);
    return *into != NULL;
}

static int add_layout(PyObject *module)
{
    PyObject *layout = Py_BuildValue(
        "(iiiiiiiiiiiiiiiiLLL)", VERSION, SLOT_BYTES, HEAD_BYTES, COUNTERS_OFFSET, HOOKS_OFFSET, STATIC_OFFSET,
        MAX_HOOKS, MAX_CHAIN, MAX_SCALARS, EVENTS, UPDATES, REFUSED, FORWARDS, FORWARD_KIND,
        ERROR_KIND, SNAPSHOT_KIND, (long long)NONE_CODE, (long long)NO_ATTRIBUTE_CODE,
        (long long)NOT_OBSERVED_CODE);
    int done = layout == NULL ? -1 : PyModule_AddObject(module, "LAYOUT", layout);
    if (done < 0)
        Py_XDECREF(layout);
    return done;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module;
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "rings are little-endian");
        return NULL;
    }
    crc_fill();
    if (!intern(&text_dict, "__dict__") || !intern(&text_bad_event, "_bad_event") ||
        !intern(&text_around_error, "_around_error") || !intern(&text_set_phase, "_set_phase") ||
        !intern(&text_abandon, "_abandon") || !intern(&text_worker, "worker") ||
        !intern(&text_number, "number") || !intern(&text_draft_step, "draft_step") ||
        !intern(&text_is_cpu, "is_cpu") || !intern(&text_tolist, "tolist") ||
        !intern(&text_lose, "lose") || !intern(&text_shape, "shape") || !intern(&text_q, "q") ||
        !intern(&text_indices, "indices") || !intern(&text_num_splits, "num_splits") ||
        !intern(&text_cache_seqlens, "cache_seqlens"))
        return NULL;
    module = PyModule_Create(&module_definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddType(module, &SnapshotType) < 0 || PyModule_AddType(module, &RingCoreType) < 0 ||
        PyModule_AddType(module, &FrameType) < 0 || PyModule_AddType(module, &StateCoreType) < 0 ||
        PyModule_AddType(module, &LookerType) < 0 || PyModule_AddType(module, &HookCoreType) < 0 ||
        PyModule_AddType(module, &CallType) < 0 || PyModule_AddType(module, &RepeatsType) < 0 || add_layout(module) < 0 ||
        PyModule_AddIntMacro(module, ROWS) < 0 || PyModule_AddIntMacro(module, INTEGER) < 0 ||
        PyModule_AddIntMacro(module, NAME) < 0 || PyModule_AddIntMacro(module, ANY) < 0 ||
        PyModule_AddIntMacro(module, VECTOR) < 0 || PyModule_AddIntMacro(module, COUNTED) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
