/* The ring that events and snapshots are written to; see ring_core.py. Part of _native.c. */

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
    Ahead *ahead;
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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnLL", names, &mapping, &offset, &slots,
                                     &limit))
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
    ahead_end(self->ahead);
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
        memcpy(slot + HEAD_BYTES, data + position * PAYLOAD,
               (size_t)(left < PAYLOAD ? left : PAYLOAD));
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

/* Append an update whose number and pairs are in `words` already. */
static void ring_put_update(RingCore *self, long kind, int64_t *words, Py_ssize_t pairs)
{
    words[0] = record_head(RECORD_UPDATE, kind, pairs + 1, 0);
    self->counters[UPDATES]++;
    ring_append(self, words, pairs + 2);
}

/* Complete an earlier event; `pairs` is column index, value, ... and `count` numbers. */
static void ring_complete(RingCore *self, long kind, int64_t enter_seq, const int64_t *pairs,
                          Py_ssize_t count)
{
    int64_t *words;
    if (!self->on || self->counters == NULL)
        return;
    words = ring_room(self, count + 2);
    if (words == NULL) {
        ring_bad(self, kind);
        return;
    }
    words[1] = enter_seq;
    memcpy(words + 2, pairs, sizeof(int64_t) * (size_t)count);
    ring_put_update(self, kind, words, count);
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
    words[1] = int64_of(args[1]);
    if ((words[1] == -1 && PyErr_Occurred()) || copy_numbers(args[2], words + 2) < 0)
        goto bad;
    ring_put_update(self, kind, words, pairs);
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

/* run_ahead(on): have a thread meet the page faults of the slots to come, or end it */
static PyObject *ring_run_ahead(RingCore *self, PyObject *wanted)
{
    const int on = PyObject_IsTrue(wanted);
    if (on < 0)
        return NULL;
    if (on && self->ahead == NULL && self->counters != NULL) {
        self->ahead = ahead_start(&self->next, self->first_slot, self->slots);
    } else if (!on) {
        Ahead *ahead = self->ahead;
        self->ahead = NULL;
        ahead_end(ahead);
    }
    return PyBool_FromLong(self->ahead != NULL);
}

static PyMethodDef ring_methods[] = {
    {"run_ahead", (PyCFunction)ring_run_ahead, METH_O, NULL},
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
