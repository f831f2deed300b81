/* The state of a recorded process, its open events, its batches; see state_core.py. */

/* ---- BatchRecord ------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long number, worker, owner, draft_step, forwards;
    long long planned_seq, planned_rows, planned_splits, padded_seq, rows_before_pad,
        rows_after_pad;
    PyObject *scheduler_counts, *planned_by, *padded_by; /* None where there is none */
} BatchRecord;

static PyTypeObject BatchRecordType;

static BatchRecord *batch_record_make(PyTypeObject *type, long long number, long long worker,
                                      long long owner)
{
    BatchRecord *self = (BatchRecord *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->number = number;
        self->worker = worker;
        self->owner = owner;
        self->scheduler_counts = Py_NewRef(Py_None);
        self->planned_by = Py_NewRef(Py_None);
        self->padded_by = Py_NewRef(Py_None);
    }
    return self;
}

static PyObject *batch_record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"number", "worker", "owner", NULL};
    long long number, worker, owner = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LL|L", names, &number, &worker, &owner))
        return NULL;
    return (PyObject *)batch_record_make(type, number, worker, owner);
}

static int batch_record_traverse(BatchRecord *self, visitproc visit, void *arg)
{
    Py_VISIT(self->scheduler_counts);
    Py_VISIT(self->planned_by);
    Py_VISIT(self->padded_by);
    return 0;
}

static int batch_record_clear(BatchRecord *self)
{
    Py_CLEAR(self->scheduler_counts);
    Py_CLEAR(self->planned_by);
    Py_CLEAR(self->padded_by);
    return 0;
}

static void batch_record_dealloc(BatchRecord *self)
{
    PyObject_GC_UnTrack(self);
    batch_record_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void batch_record_planned(BatchRecord *self, PyObject *by, long long enter_seq,
                                 long long rows, long long num_splits)
{
    self->planned_seq = enter_seq;
    self->planned_rows = rows;
    self->planned_splits = num_splits;
    Py_INCREF(by);
    Py_XSETREF(self->planned_by, by);
}

static void batch_record_padded(BatchRecord *self, PyObject *by, long long enter_seq,
                                long long before, long long after)
{
    self->padded_seq = enter_seq;
    self->rows_before_pad = before;
    self->rows_after_pad = after;
    Py_INCREF(by);
    Py_XSETREF(self->padded_by, by);
}

static PyObject *batch_record_planned_method(BatchRecord *self, PyObject *args)
{
    PyObject *by;
    long long given[3];
    if (!PyArg_ParseTuple(args, "OLLL", &by, &given[0], &given[1], &given[2]))
        return NULL;
    batch_record_planned(self, by, given[0], given[1], given[2]);
    Py_RETURN_NONE;
}

static PyObject *batch_record_padded_method(BatchRecord *self, PyObject *args)
{
    PyObject *by;
    long long given[3];
    if (!PyArg_ParseTuple(args, "OLLL", &by, &given[0], &given[1], &given[2]))
        return NULL;
    batch_record_padded(self, by, given[0], given[1], given[2]);
    Py_RETURN_NONE;
}

#define NUMBER_OF(type, name) {#name, T_LONGLONG, offsetof(type, name), 0, NULL}
#define OBJECT_OF(type, name) {#name, T_OBJECT, offsetof(type, name), 0, NULL}

static PyMemberDef batch_record_members[] = {
    NUMBER_OF(BatchRecord, number),
    NUMBER_OF(BatchRecord, worker),
    NUMBER_OF(BatchRecord, owner),
    NUMBER_OF(BatchRecord, draft_step),
    NUMBER_OF(BatchRecord, forwards),
    NUMBER_OF(BatchRecord, planned_seq),
    NUMBER_OF(BatchRecord, planned_rows),
    NUMBER_OF(BatchRecord, planned_splits),
    NUMBER_OF(BatchRecord, padded_seq),
    NUMBER_OF(BatchRecord, rows_before_pad),
    NUMBER_OF(BatchRecord, rows_after_pad),
    OBJECT_OF(BatchRecord, scheduler_counts),
    OBJECT_OF(BatchRecord, planned_by),
    OBJECT_OF(BatchRecord, padded_by),
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef batch_record_methods[] = {
    {"planned", (PyCFunction)batch_record_planned_method, METH_VARARGS, NULL},
    {"padded", (PyCFunction)batch_record_padded_method, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject BatchRecordType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.BatchRecord",
    .tp_basicsize = sizeof(BatchRecord),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = batch_record_new,
    .tp_dealloc = (destructor)batch_record_dealloc,
    .tp_traverse = (traverseproc)batch_record_traverse,
    .tp_clear = (inquiry)batch_record_clear,
    .tp_members = batch_record_members,
    .tp_methods = batch_record_methods,
};

/* ---- Frame ------------------------------------------------------------------------------- */

#define FRAME_NUMBERS 32
#define FRAME_KEPT 6

typedef struct {
    PyObject_HEAD
    long long enter_seq, parent, t_ns, kind;
    PyObject *record, *title, *subject, *extra, *entry, *failed;
    PyObject *kept[FRAME_KEPT]; /* what compiled probes keep instead of `extra` */
    int64_t numbers[FRAME_NUMBERS];
} Frame;

static PyTypeObject FrameType;

static int frame_traverse(Frame *self, visitproc visit, void *arg)
{
    Py_VISIT(self->record);
    Py_VISIT(self->title);
    Py_VISIT(self->subject);
    Py_VISIT(self->extra);
    Py_VISIT(self->entry);
    Py_VISIT(self->failed);
    for (int i = 0; i < FRAME_KEPT; i++)
        Py_VISIT(self->kept[i]);
    return 0;
}

static int frame_clear(Frame *self)
{
    Py_CLEAR(self->record);
    Py_CLEAR(self->title);
    Py_CLEAR(self->subject);
    Py_CLEAR(self->extra);
    Py_CLEAR(self->entry);
    Py_CLEAR(self->failed);
    for (int i = 0; i < FRAME_KEPT; i++)
        Py_CLEAR(self->kept[i]);
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

static PyObject *frame_get(Frame *self, PyObject *place)
{
    Py_ssize_t at = PyLong_AsSsize_t(place);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    if (at < 0 || at >= FRAME_NUMBERS) {
        PyErr_SetString(PyExc_IndexError, "a frame has no such number");
        return NULL;
    }
    return PyLong_FromLongLong(self->numbers[at]);
}

static PyObject *frame_put(Frame *self, PyObject *args)
{
    Py_ssize_t at;
    long long number;
    if (!PyArg_ParseTuple(args, "nL", &at, &number))
        return NULL;
    if (at < 0 || at >= FRAME_NUMBERS) {
        PyErr_SetString(PyExc_IndexError, "a frame has no such number");
        return NULL;
    }
    self->numbers[at] = number;
    Py_RETURN_NONE;
}

/* For probes of Python, which keep their numbers in a list. */
static PyObject *frame_numbers(Frame *self, void *unused)
{
    return list_of(self->numbers, FRAME_NUMBERS);
}

static int frame_set_numbers(Frame *self, PyObject *given, void *unused)
{
    if (given == NULL || !is_sequence(given) || PySequence_Fast_GET_SIZE(given) > FRAME_NUMBERS) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "too many numbers for a frame");
        return -1;
    }
    return copy_numbers(given, self->numbers) < 0 ? -1 : 0;
}

static PyGetSetDef frame_getters[] = {
    {"numbers", (getter)frame_numbers, (setter)frame_set_numbers, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMemberDef frame_members[] = {
    NUMBER_OF(Frame, enter_seq), NUMBER_OF(Frame, parent), NUMBER_OF(Frame, t_ns),
    NUMBER_OF(Frame, kind),      OBJECT_OF(Frame, record), OBJECT_OF(Frame, title),
    OBJECT_OF(Frame, subject),   OBJECT_OF(Frame, extra),  OBJECT_OF(Frame, entry),
    OBJECT_OF(Frame, failed),    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef frame_methods[] = {
    {"subject_is", (PyCFunction)frame_subject_is, METH_O, NULL},
    {"get", (PyCFunction)frame_get, METH_O, NULL},
    {"put", (PyCFunction)frame_put, METH_VARARGS, NULL},
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
    .tp_getset = frame_getters,
    .tp_methods = frame_methods,
};

/* ---- StateCore --------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long seq, batches, forwards, forward, step, step_source, phase, clock_offset;
    long long syncs, rounds, source_sync, serve_phase;
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
    self->seq = self->batches = self->forwards = 0;
    self->step = self->step_source = self->phase = self->syncs = self->rounds = 0;
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

/* What SGLang is doing now, asked where no event is open. */
static int state_set_phase(StateCore *self)
{
    PyObject *done;
    if (self->capturing != NULL && self->capturing != Py_None) {
        int capturing;
        done = PyObject_CallNoArgs(self->capturing);
        capturing = done == NULL ? -1 : PyObject_IsTrue(done);
        if (capturing >= 0)
            self->phase = capturing ? self->capture_phase : self->calm_phase;
    } else {
        done = PyObject_CallMethodNoArgs((PyObject *)self, text_set_phase);
    }
    Py_XDECREF(done);
    return done != NULL && !PyErr_Occurred();
}

/* Open an event nested in the innermost open one; a new reference. */
static Frame *state_open(StateCore *self, PyObject *title, PyObject *record)
{
    struct timespec now;
    Frame *outer, *frame = (Frame *)FrameType.tp_alloc(&FrameType, 0);
    if (frame == NULL)
        return NULL;
    frame->kind = -1;
    frame->enter_seq = self->seq++;
    frame->parent = NOT_OBSERVED_CODE;
    outer = state_innermost(self);
    if (outer != NULL)
        frame->parent = outer->enter_seq;
    else if (PyErr_Occurred() || !state_set_phase(self))
        goto bad;
    frame->title = Py_NewRef(title);
    frame->record = Py_NewRef(record);
    clock_gettime(CLOCK_MONOTONIC, &now);
    frame->t_ns = (long long)now.tv_sec * 1000000000 + now.tv_nsec + self->clock_offset;
    if (PyList_Append(self->open, (PyObject *)frame) < 0)
        goto bad;
    return frame;
bad:
    Py_DECREF(frame);
    return NULL;
}

static PyObject *state_enter(StateCore *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "enter takes a title and a record");
        return NULL;
    }
    return (PyObject *)state_open(self, args[0], args[1]);
}

/* Take the innermost of the open frames out, as list.pop does. */
static void open_pop(PyObject *open)
{
    const Py_ssize_t last = PyList_GET_SIZE(open) - 1;
    PyObject *frame = PyList_GET_ITEM(open, last);
    Py_SET_SIZE((PyVarObject *)open, last);
    Py_DECREF(frame);
}

/* Close an event and everything left open inside it; its exit number, -1 with an exception. */
static int64_t state_close(StateCore *self, PyObject *frame)
{
    Py_ssize_t count = PyList_GET_SIZE(self->open);
    if (count && PyList_GET_ITEM(self->open, count - 1) == frame) {
        open_pop(self->open);
    } else {
        PyObject *done = PyObject_CallMethodOneArg((PyObject *)self, text_abandon, frame);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return self->seq++;
}

static PyObject *state_leave(StateCore *self, PyObject *frame)
{
    int64_t exit_seq = state_close(self, frame);
    return exit_seq < 0 ? NULL : PyLong_FromLongLong(exit_seq);
}

/* Write an event: the scalars every event has, those of its kind, and the values of its vectors.
 * No code of Python runs before it is in the ring. */
static void state_write(StateCore *self, long kind, Frame *frame, int64_t exit_seq,
                        const int64_t *own, Py_ssize_t own_count, const int64_t *values,
                        Py_ssize_t value_count)
{
    RingCore *ring = self->ring;
    BatchRecord *record = (BatchRecord *)frame->record;
    Py_ssize_t scalars = 12 + own_count;
    int64_t *words;
    if (ring == NULL || !ring->on || ring->counters == NULL)
        return;
    if (record == NULL || !Py_IS_TYPE(record, &BatchRecordType)) {
        PyErr_SetString(PyExc_TypeError, "a frame without a record");
        goto bad;
    }
    if (!countable(scalars, value_count) ||
        (words = ring_room(ring, 1 + scalars + value_count)) == NULL)
        goto bad;
    words[0] = record_head(RECORD_EVENT, kind, scalars, value_count);
    words[1] = 0; /* the process; seal puts it in */
    words[2] = record->worker;
    words[3] = record->number;
    words[4] = self->forward;
    words[5] = record->draft_step;
    words[6] = self->step;
    words[7] = self->step_source;
    words[8] = frame->enter_seq;
    words[9] = exit_seq;
    words[10] = frame->parent;
    words[11] = self->phase;
    words[12] = frame->t_ns;
    memcpy(words + 13, own, sizeof(int64_t) * (size_t)own_count);
    if (value_count)
        memcpy(words + 1 + scalars, values, sizeof(int64_t) * (size_t)value_count);
    ring_event(ring, kind, words, 1 + scalars + value_count);
    return;
bad:
    ring_bad(ring, kind);
}

/* event(kind, frame, exit_seq, own, values=()) */
static PyObject *state_event(StateCore *self, PyObject *const *args, Py_ssize_t count)
{
    RingCore *ring = self->ring;
    PyObject *values = count > 4 ? args[4] : NULL;
    Py_ssize_t own_count, value_count = 0;
    int64_t *numbers = NULL, exit_seq;
    long kind = -1;
    if (count < 4 || count > 5 || !Py_IS_TYPE(args[1], &FrameType)) {
        PyErr_SetString(PyExc_TypeError, "event takes kind, frame, exit_seq, own and values");
        return NULL;
    }
    if (ring == NULL || !ring->on)
        Py_RETURN_NONE;
    if (!kind_of(args[0], &kind) || !is_sequence(args[3]) || (values && !is_sequence(values)))
        goto bad;
    own_count = PySequence_Fast_GET_SIZE(args[3]);
    if (values != NULL)
        value_count = PySequence_Fast_GET_SIZE(values);
    numbers = PyMem_Malloc(sizeof(int64_t) * (size_t)(own_count + value_count + 1));
    if (numbers == NULL) {
        PyErr_NoMemory();
        goto bad;
    }
    exit_seq = int64_of(args[2]);
    if ((exit_seq == -1 && PyErr_Occurred()) || copy_numbers(args[3], numbers) < 0 ||
        (values && copy_numbers(values, numbers + own_count) < 0))
        goto bad;
    state_write(self, kind, (Frame *)args[1], exit_seq, numbers, own_count, numbers + own_count,
                value_count);
    PyMem_Free(numbers);
    return none_or_raise();
bad:
    PyMem_Free(numbers);
    ring_bad(ring, kind);
    return none_or_raise();
}

static PyObject *state_count_sync(StateCore *self, PyObject *unused)
{
    self->step = ++self->syncs;
    self->step_source = self->source_sync;
    self->calm_phase = self->serve_phase;
    Py_RETURN_NONE;
}

static PyObject *state_count_round(StateCore *self, PyObject *unused)
{
    self->rounds++;
    self->calm_phase = self->serve_phase;
    if (self->syncs == 0)
        self->step = self->rounds;
    Py_RETURN_NONE;
}

static PyMethodDef state_methods[] = {
    {"count_sync", (PyCFunction)state_count_sync, METH_NOARGS, NULL},
    {"count_round", (PyCFunction)state_count_round, METH_NOARGS, NULL},
    {"enter", (PyCFunction)(void (*)(void))state_enter, METH_FASTCALL, NULL},
    {"leave", (PyCFunction)state_leave, METH_O, NULL},
    {"event", (PyCFunction)(void (*)(void))state_event, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef state_members[] = {
    NUMBER_OF(StateCore, seq),
    NUMBER_OF(StateCore, batches),
    NUMBER_OF(StateCore, forwards),
    NUMBER_OF(StateCore, forward),
    NUMBER_OF(StateCore, step),
    NUMBER_OF(StateCore, step_source),
    NUMBER_OF(StateCore, phase),
    NUMBER_OF(StateCore, capture_phase),
    NUMBER_OF(StateCore, calm_phase),
    NUMBER_OF(StateCore, clock_offset),
    NUMBER_OF(StateCore, syncs),
    NUMBER_OF(StateCore, rounds),
    NUMBER_OF(StateCore, source_sync),
    NUMBER_OF(StateCore, serve_phase),
    OBJECT_OF(StateCore, capturing),
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
