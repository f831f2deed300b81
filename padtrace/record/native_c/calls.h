/* What is done around a hooked call; see hooks.py and probes/launch.py. Part of _native.c. */

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
    /* Whose `enter` and `leave` those are, or whose `enter` each of them is, if compiled. */
    Probe *probe, *before, *after;
    int counts;           /* whether the ring counts the calls */
    PyObject *guard_exit; /* told of an exception that leaves an outermost call */
} Call;

static int call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hook);
    Py_VISIT(self->state);
    Py_VISIT(self->first);
    Py_VISIT(self->second);
    Py_VISIT(self->probe);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->guard_exit);
    return 0;
}

static int call_clear(Call *self)
{
    Py_CLEAR(self->hook);
    Py_CLEAR(self->state);
    Py_CLEAR(self->first);
    Py_CLEAR(self->second);
    Py_CLEAR(self->probe);
    Py_CLEAR(self->before);
    Py_CLEAR(self->after);
    Py_CLEAR(self->guard_exit);
    return 0;
}

static void call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The compiled probe that a function is `enter` of; NULL if it is anything else. */
static Probe *probe_entered(PyObject *enter)
{
    if (!PyCFunction_Check(enter) ||
        PyCFunction_GET_FUNCTION(enter) != (PyCFunction)(void (*)(void))probe_enter)
        return NULL;
    return (Probe *)Py_NewRef(PyCFunction_GET_SELF(enter));
}

/* The one that these are `enter` and `leave` of. */
static Probe *probe_behind(PyObject *enter, PyObject *leave)
{
    if (!PyCFunction_Check(leave) ||
        PyCFunction_GET_FUNCTION(leave) != (PyCFunction)(void (*)(void))probe_leave ||
        !PyCFunction_Check(enter) || PyCFunction_GET_SELF(enter) != PyCFunction_GET_SELF(leave))
        return NULL;
    return probe_entered(enter);
}

/* Call what a watch asks; 0 with an exception. */
static int watch_ask(Probe *probe, PyObject *function, PyObject *args, PyObject *kwargs)
{
    PyObject *done;
    if (probe != NULL) {
        done = (PyObject *)probe->doings->enter(probe, args, kwargs);
        Py_XDECREF(done);
        return !PyErr_Occurred();
    }
    done = PyObject_Call(function, args, kwargs);
    Py_XDECREF(done);
    return done != NULL;
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
    self->hook = (HookCore *)Py_NewRef(hook);
    self->state = (StateCore *)Py_NewRef(state);
    self->first = Py_NewRef(first);
    self->second = Py_NewRef(second);
    self->guard_exit = Py_NewRef(guard_exit);
    self->counts = counts;
    self->probe = probe_behind(first, second);
    self->before = probe_entered(first);
    self->after = probe_entered(second);
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
    if (self->counts && ring != NULL && ring->on && ring->fired != NULL && hook->number >= 0 &&
        hook->number < MAX_HOOKS)
        ring->fired[hook->number]++;
}

static int call_arguments(PyObject *const *given, Py_ssize_t count)
{
    if (count == 3 && PyTuple_CheckExact(given[1]) && PyDict_CheckExact(given[2]))
        return 1;
    PyErr_SetString(PyExc_TypeError, "a call takes the original, a tuple and a dict");
    return 0;
}

/* Ask the probe before the call: its frame, NULL where there is none or with an exception. */
static PyObject *call_enter(Call *self, PyObject *args, PyObject *kwargs)
{
    PyObject *frame;
    if (self->probe != NULL)
        return (PyObject *)self->probe->doings->enter(self->probe, args, kwargs);
    frame = PyObject_Call(self->first, args, kwargs);
    if (frame == Py_None)
        Py_CLEAR(frame);
    return frame;
}

/* Ask the probe after the call; 0 with an exception. */
static int call_leave(Call *self, PyObject *frame, PyObject *result)
{
    PyObject *done;
    if (self->probe != NULL)
        return self->probe->doings->leave(self->probe, (Frame *)frame, result);
    done = PyObject_CallFunctionObjArgs(self->second, frame, result, NULL);
    Py_XDECREF(done);
    return done != NULL;
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
        frame = call_enter(self, given[1], given[2]);
        if (frame == NULL && PyErr_Occurred() && !hook_lost(hook, depth))
            return NULL;
    }
    if (frame == NULL)
        return PyObject_Call(given[0], given[1], given[2]);
    result = call_original(self->guard_exit, given[0], given[1], given[2], depth == 0);
    if (result != NULL && hook->alive) {
        if (!call_leave(self, frame, result) && !hook_lost(hook, depth))
            Py_CLEAR(result);
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
            if (!watch_ask(self->before, self->first, given[1], given[2]) &&
                !hook_lost(hook, depth))
                return NULL;
        }
    }
    depth = PyList_GET_SIZE(self->state->open);
    result = call_original(self->guard_exit, given[0], given[1], given[2], depth == 0);
    if (result != NULL && self->second != Py_None && hook->alive) {
        PyObject *all = with_result(result, given[1]);
        depth = PyList_GET_SIZE(self->state->open);
        if ((all == NULL || !watch_ask(self->after, self->second, all, given[2])) &&
            !hook_lost(hook, depth))
            Py_CLEAR(result);
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
