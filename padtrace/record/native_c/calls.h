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
    self->hook = (HookCore *)Py_NewRef(hook);
    self->state = (StateCore *)Py_NewRef(state);
    self->first = Py_NewRef(first);
    self->second = Py_NewRef(second);
    self->guard_exit = Py_NewRef(guard_exit);
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
    self->state = (StateCore *)Py_NewRef(state);
    self->hook = (HookCore *)Py_NewRef(hook);
    self->slow = Py_NewRef(slow);
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
