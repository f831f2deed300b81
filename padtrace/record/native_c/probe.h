/* What all compiled probes share, and the object that stands for one. Part of _native.c.
 *
 * A probe does what the methods of the class of the same name in probes/ do; those say what and
 * why. It keeps what it needs until the call ends in the frame itself.
 */

/* ---- Shared: context.py's Context, as far as the probes here need it ------------------------- */

#define MAX_BACKENDS 64
#define MAX_READERS 16

/* An attention backend met before, with its name and number in the recording, and the num_splits
 * that it holds now with the number of the plan that made them. */
typedef struct {
    PyObject *backend, *splits;
    int64_t name, number, planned;
} Backend;

/* How one class of attention metadata is read. */
typedef struct {
    PyTypeObject *type;
    Looker *columns;
    Py_ssize_t missing_count;
    int missing[FRAME_NUMBERS];
} Reader;

typedef struct {
    PyObject_HEAD
    StateCore *state;
    Looker *looker;
    PyObject *record_of; /* Context.record_of, for a batch seen the first time */
    PyObject *rows_of;   /* values.rows_of, for what is no plain tensor */
    PyObject *batch_class;
    BatchRecord *nobody;
    Snapshot *unseen;
    long long target, draft;
    int mode, batch_size, token_rows; /* places in a snapshot */
    Backend backends[MAX_BACKENDS];
    Py_ssize_t backend_count;
    Reader readers[MAX_READERS];
    Py_ssize_t reader_count;
    PyObject *launches; /* list of the Launch objects: one for each kernel function */
} Shared;

static PyTypeObject SharedType;

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *state, *looker, *record_of, *rows_of, *nobody, *batch_class;
    long long target, draft;
    int mode, batch_size, token_rows;
    Shared *self;
    if (!PyArg_ParseTuple(args, "O!O!OOO!O!(LL)(iii)", &StateCoreType, &state, &LookerType, &looker,
                          &record_of, &rows_of, &BatchRecordType, &nobody, &PyType_Type,
                          &batch_class, &target, &draft, &mode, &batch_size, &token_rows))
        return NULL;
    self = (Shared *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->state = (StateCore *)Py_NewRef(state);
    self->looker = (Looker *)Py_NewRef(looker);
    self->record_of = Py_NewRef(record_of);
    self->rows_of = Py_NewRef(rows_of);
    self->batch_class = Py_NewRef(batch_class);
    self->nobody = (BatchRecord *)Py_NewRef(nobody);
    self->target = target;
    self->draft = draft;
    self->mode = mode;
    self->batch_size = batch_size;
    self->token_rows = token_rows;
    self->unseen = snapshot_make(&SnapshotType, 0, 0);
    self->launches = PyList_New(0);
    if (self->unseen == NULL || self->launches == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int shared_traverse(Shared *self, visitproc visit, void *arg)
{
    Py_VISIT(self->state);
    Py_VISIT(self->looker);
    Py_VISIT(self->record_of);
    Py_VISIT(self->rows_of);
    Py_VISIT(self->nobody);
    Py_VISIT(self->launches);
    for (Py_ssize_t i = 0; i < self->backend_count; i++) {
        Py_VISIT(self->backends[i].backend);
        Py_VISIT(self->backends[i].splits);
    }
    return 0;
}

/* Only what can be part of a cycle: the rest stays for as long as a probe can be called. */
static int shared_clear(Shared *self)
{
    Py_CLEAR(self->record_of);
    if (PyList_SetSlice(self->launches, 0, PY_SSIZE_T_MAX, NULL) < 0)
        PyErr_Clear();
    while (self->backend_count > 0) {
        self->backend_count--;
        Py_CLEAR(self->backends[self->backend_count].backend);
        Py_CLEAR(self->backends[self->backend_count].splits);
    }
    return 0;
}

static void shared_dealloc(Shared *self)
{
    PyObject_GC_UnTrack(self);
    shared_clear(self);
    Py_CLEAR(self->state);
    Py_CLEAR(self->looker);
    Py_CLEAR(self->rows_of);
    Py_CLEAR(self->batch_class);
    Py_CLEAR(self->nobody);
    for (Py_ssize_t i = 0; i < self->reader_count; i++) {
        Py_XDECREF((PyObject *)self->readers[i].type);
        Py_XDECREF(self->readers[i].columns);
    }
    Py_XDECREF(self->unseen);
    Py_XDECREF(self->launches);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *shared_finish(Shared *self, PyObject *unused);

static PyMethodDef shared_methods[] = {
    {"finish_launches", (PyCFunction)shared_finish, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject SharedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Shared",
    .tp_basicsize = sizeof(Shared),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = shared_new,
    .tp_dealloc = (destructor)shared_dealloc,
    .tp_traverse = (traverseproc)shared_traverse,
    .tp_clear = (inquiry)shared_clear,
    .tp_methods = shared_methods,
};

/* ---- attributes ------------------------------------------------------------------------------ */

/* An attribute, a new reference; NULL without an exception where there is none.
 * It spares the making of an AttributeError, which costs a microsecond. */
static PyObject *optional(PyObject *object, PyObject *name)
{
    PyObject *value = NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject_GetOptionalAttr(object, name, &value);
#else
    _PyObject_LookupAttr(object, name, &value);
#endif
    return value;
}

/* values.integer_of */
static int64_t integer_code(PyObject *value)
{
    int overflow = 0;
    long long number;
    if (value == NULL || value == Py_None)
        return NONE_CODE;
    if (!PyLong_Check(value))
        return NOT_OBSERVED_CODE;
    number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow ? NOT_OBSERVED_CODE : number;
}

/* integer_of of an attribute that must be there; -1 may come with an exception. */
static int64_t integer_attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int64_t code = value == NULL ? -1 : integer_code(value);
    Py_XDECREF(value);
    return code;
}

/* values.rows_of; -1 may come with an exception. */
static int64_t rows_code(Shared *shared, PyObject *value)
{
    if (value == NULL || value == Py_None)
        return NONE_CODE;
    if (PyList_CheckExact(value))
        return PyList_GET_SIZE(value);
    if ((PyObject *)Py_TYPE(value) == shared->looker->tensor_type) {
        Py_ssize_t rows = tensor_rows(shared->looker, value);
        if (rows > 0)
            return rows;
        if (!forgive())
            return -1;
    }
    return call_converter(shared->rows_of, value);
}

/* rows_of of an attribute, or of None where there is none; -1 may come with an exception. */
static int64_t rows_attribute(Shared *shared, PyObject *object, PyObject *name)
{
    PyObject *value = optional(object, name);
    int64_t code = value == NULL && PyErr_Occurred() ? -1 : rows_code(shared, value);
    Py_XDECREF(value);
    return code;
}

#define FAILED(code) ((code) == -1 && PyErr_Occurred())

/* ---- batches -------------------------------------------------------------------------------- */

/* State.worker_of; NOT_OBSERVED_CODE with an exception set. */
static int64_t worker_of(Shared *shared, PyObject *model_runner)
{
    PyObject *value = PyObject_GetAttr(model_runner, text_is_draft_worker);
    int draft = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    if (draft < 0)
        return NOT_OBSERVED_CODE;
    return draft ? shared->draft : shared->target;
}

static BatchRecord *new_record(StateCore *state, int64_t worker)
{
    return batch_record_make(&BatchRecordType, state->batches++, worker, 0);
}

/* State.enclosing_record; a new reference. */
static BatchRecord *enclosing_record(Shared *shared)
{
    Frame *frame = state_innermost(shared->state);
    PyObject *record;
    if (frame == NULL && PyErr_Occurred())
        return NULL;
    record = frame == NULL ? (PyObject *)shared->nobody : frame->record;
    if (record == NULL || !Py_IS_TYPE(record, &BatchRecordType)) {
        PyErr_SetString(PyExc_TypeError, "a frame without a record");
        return NULL;
    }
    return (BatchRecord *)Py_NewRef(record);
}

/* Whether a batch without a record belongs to the call that is open, as Context.record_of says:
 * any copy or view that SGLang makes inside a hooked call, but no child of two-batch overlap. */
static int is_enclosed(Shared *shared, PyObject *batch)
{
    PyObject *parent;
    int child;
    if (PyList_GET_SIZE(shared->state->open) == 0)
        return 0;
    if (!PyType_IsSubtype(Py_TYPE(batch), (PyTypeObject *)shared->batch_class))
        return 1;
    parent = optional(batch, text_tbo_parent_token_range);
    child = parent != NULL && parent != Py_None;
    Py_XDECREF(parent);
    return !child && !PyErr_Occurred();
}

/* Context.record_of; a new reference. `worker` is NULL where the call does not tell it. */
static BatchRecord *record_of(Shared *shared, PyObject *batch, const int64_t *worker)
{
    PyObject *found = optional(batch, text_padtrace), *number;
    if (found != NULL && Py_IS_TYPE(found, &BatchRecordType) &&
        ((BatchRecord *)found)->owner == (long long)(intptr_t)batch)
        return (BatchRecord *)found;
    Py_XDECREF(found);
    if (PyErr_Occurred())
        return NULL;
    if (is_enclosed(shared, batch))
        return enclosing_record(shared);
    number = PyErr_Occurred() ? NULL
             : worker == NULL ? Py_NewRef(Py_None)
                              : PyLong_FromLongLong(*worker);
    if (number == NULL)
        return NULL;
    found = PyObject_CallFunctionObjArgs(shared->record_of, batch, number, NULL);
    Py_DECREF(number);
    if (found != NULL && !Py_IS_TYPE(found, &BatchRecordType)) {
        PyErr_SetString(PyExc_TypeError, "that is no record of a batch");
        Py_CLEAR(found);
    }
    return (BatchRecord *)found;
}

static Snapshot *snap(Shared *shared, PyObject *batch)
{
    PyObject *taken = looker_take(shared->looker, batch);
    if (taken != NULL && !Py_IS_TYPE(taken, &SnapshotType)) {
        PyErr_SetString(PyExc_TypeError, "that is no snapshot");
        Py_CLEAR(taken);
    }
    return (Snapshot *)taken;
}

static int64_t keep(Shared *shared, PyObject *snapshot)
{
    if (snapshot == NULL || !Py_IS_TYPE(snapshot, &SnapshotType) || shared->state->ring == NULL)
        return NOT_OBSERVED_CODE;
    return ring_keep_snapshot(shared->state->ring, (Snapshot *)snapshot);
}

static int64_t snapshot_at(PyObject *snapshot, int place)
{
    Snapshot *taken = (Snapshot *)snapshot;
    if (snapshot == NULL || !Py_IS_TYPE(snapshot, &SnapshotType) || place >= taken->scalar_count)
        return NOT_OBSERVED_CODE;
    return taken->record[1 + place];
}

/* ---- Probe ---------------------------------------------------------------------------------- */

typedef struct Probe Probe;

/* What one kind of probe does.
 *
 * `enter` gives the event it opened, a new reference; NULL without an exception where this call is
 * not to be recorded. `leave` and `failed` give 0 with an exception set. */
typedef struct {
    const char *name;
    Frame *(*enter)(Probe *self, const Arguments *given);
    int (*leave)(Probe *self, Frame *frame, PyObject *result);
    int (*failed)(Probe *self, Frame *frame, int observed);
} Doings;

#define MAX_RUNNERS 16
#define MAX_CAPTURED 1024

/* What stays the same of one graph runner. */
typedef struct {
    PyObject *runner;
    int64_t worker, name, algorithm, width, limit;
    int has_worker;
    Py_ssize_t captured_count; /* -1 where they are not known */
    int64_t *captured;
} Runner;

struct Probe {
    PyObject_HEAD
    const Doings *doings;
    Shared *shared;
    PyObject *title;
    int64_t function;
    PyObject *more, *finish, *describe; /* Python's part, see each kind; None where there is none */
    int flag;
    /* plan: how many columns it has, and where some of them are */
    int columns, planned, splits, bucket;
    PyObject *by;
    PyTypeObject *by_type;
    /* forward: the model runners met; by address, like the set of ids that Python keeps */
    void *met[MAX_RUNNERS];
    Py_ssize_t met_count;
    Runner *runners; /* graph */
    Py_ssize_t runner_count;
};

static PyTypeObject ProbeType;
static const Doings all_doings[];

static PyObject *probe_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"shared", "kind",     "title", "function", "more",
                            "finish", "describe", "flag",  "places",   NULL};
    PyObject *shared, *title, *more = Py_None, *finish = Py_None, *describe = Py_None;
    const char *kind;
    long long function;
    int flag = 0, columns = 0, planned = 0, splits = 0, bucket = 0;
    const Doings *doings = all_doings;
    Probe *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!sUL|OOOp(iiii)", names, &SharedType, &shared,
                                     &kind, &title, &function, &more, &finish, &describe, &flag,
                                     &columns, &planned, &splits, &bucket))
        return NULL;
    while (doings->name != NULL && strcmp(doings->name, kind) != 0)
        doings++;
    if (doings->name == NULL || columns < 0 || columns > FRAME_NUMBERS || planned < 0 ||
        splits < 0 || bucket < 0 || planned >= FRAME_NUMBERS || splits >= FRAME_NUMBERS ||
        bucket >= FRAME_NUMBERS) {
        PyErr_SetString(PyExc_ValueError, "there is no such probe");
        return NULL;
    }
    self = (Probe *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->doings = doings;
    self->shared = (Shared *)Py_NewRef(shared);
    self->title = Py_NewRef(title);
    self->function = function;
    self->more = Py_NewRef(more);
    self->finish = Py_NewRef(finish);
    self->describe = Py_NewRef(describe);
    self->flag = flag;
    self->columns = columns;
    self->planned = planned;
    self->splits = splits;
    self->bucket = bucket;
    return (PyObject *)self;
}

static int probe_traverse(Probe *self, visitproc visit, void *arg)
{
    Py_VISIT(self->shared);
    Py_VISIT(self->more);
    Py_VISIT(self->finish);
    Py_VISIT(self->describe);
    for (Py_ssize_t i = 0; i < self->runner_count; i++)
        Py_VISIT(self->runners[i].runner);
    return 0;
}

/* None in their place: the probe may be called once more. */
static int probe_clear(Probe *self)
{
    Py_SETREF(self->more, Py_NewRef(Py_None));
    Py_SETREF(self->finish, Py_NewRef(Py_None));
    Py_SETREF(self->describe, Py_NewRef(Py_None));
    while (self->runner_count > 0) {
        Runner *runner = &self->runners[--self->runner_count];
        PyMem_Free(runner->captured);
        Py_CLEAR(runner->runner);
    }
    return 0;
}

static void probe_dealloc(Probe *self)
{
    PyObject_GC_UnTrack(self);
    probe_clear(self);
    Py_DECREF(self->more);
    Py_DECREF(self->finish);
    Py_DECREF(self->describe);
    PyMem_Free(self->runners);
    Py_CLEAR(self->shared);
    Py_XDECREF(self->title);
    Py_XDECREF(self->by);
    Py_XDECREF((PyObject *)self->by_type);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Open an event of this probe. `record` is taken over; NULL passes an exception on. */
static Frame *probe_open(Probe *self, BatchRecord *record, int kind, PyObject *subject)
{
    Frame *frame;
    if (record == NULL)
        return NULL;
    frame = state_open(self->shared->state, self->title, (PyObject *)record);
    Py_DECREF(record);
    if (frame == NULL)
        return NULL;
    frame->kind = kind;
    frame->subject = Py_NewRef(subject);
    frame->failed = Py_NewRef((PyObject *)self);
    return frame;
}

/* An event that could not be opened after all: close it again, with the exception kept. */
static Frame *probe_give_up(Frame *frame)
{
    Py_DECREF(frame); /* the hook takes it out of the open ones */
    return NULL;
}

/* The exit number of a call that an exception left, if the exception was seen passing. */
static int64_t exit_number(Probe *self, int observed)
{
    return observed ? self->shared->state->seq++ : NOT_OBSERVED_CODE;
}

static int call_and_forget(PyObject *function)
{
    PyObject *done;
    if (function == Py_None)
        return 1;
    done = PyObject_CallNoArgs(function);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *probe_enter(Probe *self, PyObject *const *values, Py_ssize_t count,
                             PyObject *names)
{
    const Arguments given = {values, count, names};
    Frame *frame = self->doings->enter(self, &given);
    if (frame == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return (PyObject *)frame;
}

/* Whether this is an event of this very probe. */
static int probe_owns(Probe *self, PyObject *frame)
{
    if (Py_IS_TYPE(frame, &FrameType) && ((Frame *)frame)->failed == (PyObject *)self)
        return 1;
    PyErr_SetString(PyExc_TypeError, "that is no event of this probe");
    return 0;
}

static PyObject *probe_leave(Probe *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !probe_owns(self, args[0])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "leave takes a frame and a result");
        return NULL;
    }
    if (!self->doings->leave(self, (Frame *)args[0], args[1]))
        return NULL;
    Py_RETURN_NONE;
}

/* What a frame has as `failed`: called with the frame and whether the exception was seen. */
static PyObject *probe_failed(Probe *self, PyObject *args, PyObject *kwargs)
{
    PyObject *frame;
    int observed;
    if (!PyArg_ParseTuple(args, "Op", &frame, &observed) || !probe_owns(self, frame))
        return NULL;
    if (!self->doings->failed(self, (Frame *)frame, observed))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef probe_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))probe_enter, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"leave", (PyCFunction)(void (*)(void))probe_leave, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ProbeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Probe",
    .tp_basicsize = sizeof(Probe),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = probe_new,
    .tp_dealloc = (destructor)probe_dealloc,
    .tp_traverse = (traverseproc)probe_traverse,
    .tp_clear = (inquiry)probe_clear,
    .tp_call = (ternaryfunc)probe_failed,
    .tp_methods = probe_methods,
};
