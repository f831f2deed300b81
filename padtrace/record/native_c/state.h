/* Frames and the state that numbers and writes events; see state_core.py. Part of _native.c. */

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
    frame->title = Py_NewRef(args[0]);
    frame->record = Py_NewRef(args[1]);
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
