/* What is done around a hooked call; see hooks.py and probes/launch.py. Part of _native.c. */

/* One hooked function, called with the original and then its arguments. An event has `enter` and
 * `leave`; a watch, which is no event, `before` and `after`. */
typedef struct Call Call;
struct Call {
    PyObject_HEAD
    PyObject *(*run)(Call *self, PyObject *original, const Arguments *given);
    HookCore *hook;
    StateCore *state;
    PyObject *first, *second; /* enter, leave or before, after; those of a watch may be None */
    /* Whose `enter` and `leave` those are, or whose `enter` each of them is, if compiled. */
    Probe *probe, *before, *after;
    Launch *launch;
    PyObject *guard_exit; /* told of an exception that leaves an outermost call */
};

static PyTypeObject CallType;

static int call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hook);
    Py_VISIT(self->state);
    Py_VISIT(self->first);
    Py_VISIT(self->second);
    Py_VISIT(self->probe);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->launch);
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
    Py_CLEAR(self->launch);
    Py_CLEAR(self->guard_exit);
    return 0;
}

static void call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The object whose method this is, if it is this method in C; a new reference, else NULL. */
static PyObject *method_of(PyObject *method, PyCFunction function)
{
    if (!PyCFunction_Check(method) || PyCFunction_GET_FUNCTION(method) != function)
        return NULL;
    return Py_NewRef(PyCFunction_GET_SELF(method));
}

/* The compiled probe, or launch, that these are `enter` and `leave` of. */
static PyObject *behind(PyObject *enter, PyCFunction enters, PyObject *leave, PyCFunction leaves)
{
    PyObject *entered = method_of(enter, enters), *left = method_of(leave, leaves);
    if (entered != left)
        Py_CLEAR(entered);
    Py_XDECREF(left);
    return entered;
}

#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

/* Call what a watch asks; 0 with an exception. */
static int watch_ask(Probe *probe, PyObject *function, const Arguments *given)
{
    PyObject *done =
        probe == NULL ? call_with(function, given) : (PyObject *)probe->doings->enter(probe, given);
    Py_XDECREF(done);
    return !PyErr_Occurred();
}

static void call_count(Call *self)
{
    RingCore *ring = self->state->ring;
    HookCore *hook = self->hook;
    /* The calls of a launch are counted when it is complete. */
    if (self->launch == NULL && ring != NULL && ring->on && ring->fired != NULL &&
        hook->number >= 0 && hook->number < MAX_HOOKS)
        ring->fired[hook->number]++;
}

/* Ask the probe before the call: its frame, NULL where there is none or with an exception. */
static PyObject *call_enter(Call *self, const Arguments *given)
{
    PyObject *frame;
    if (self->launch != NULL)
        return (PyObject *)launch_open(self->launch, given);
    if (self->probe != NULL)
        return (PyObject *)self->probe->doings->enter(self->probe, given);
    frame = call_with(self->first, given);
    if (frame == Py_None)
        Py_CLEAR(frame);
    return frame;
}

/* Ask the probe after the call; 0 with an exception. */
static int call_leave(Call *self, PyObject *frame, PyObject *result)
{
    PyObject *done;
    if (self->launch != NULL)
        return launch_close(self->launch, frame, result);
    if (self->probe != NULL)
        return self->probe->doings->leave(self->probe, (Frame *)frame, result);
    done = PyObject_CallFunctionObjArgs(self->second, frame, result, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* An event, if the probe opens one. */
static PyObject *call_around(Call *self, PyObject *original, const Arguments *given)
{
    HookCore *hook = self->hook;
    PyObject *frame = NULL, *result;
    const Py_ssize_t depth = PyList_GET_SIZE(self->state->open);
    if (hook->alive) {
        call_count(self);
        frame = call_enter(self, given);
        if (frame == NULL && PyErr_Occurred() && !hook_lost(hook, depth))
            return NULL;
    }
    if (frame == NULL)
        return call_with(original, given);
    result = call_original(self->guard_exit, original, given, depth == 0);
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

/* The same of a kernel, and next to nothing for an equal call of the same forward. */
static PyObject *call_launch(Call *self, PyObject *original, const Arguments *given)
{
    PyObject *open = self->state->open, *result;
    Frame *frame;
    int same = self->hook->alive ? launch_repeats(self->launch, given) : 0;
    if (same < 0)
        return NULL;
    if (same == 0)
        return call_around(self, original, given);
    frame = (Frame *)Py_NewRef(self->launch->last);
    if (PyList_Append(open, (PyObject *)frame) < 0) {
        PyErr_Clear();
        Py_DECREF(frame);
        return call_with(original, given);
    }
    frame->numbers[COUNT]++;
    result = call_with(original, given);
    if (result != NULL)
        pop_if_innermost(open, (PyObject *)frame);
    Py_DECREF(frame);
    return result;
}

#define FEW 16

/* Tell `after` the result and then the arguments; 0 with an exception. */
static int watch_tell(Call *self, PyObject *result, const Arguments *given)
{
    const Py_ssize_t named = given->names == NULL ? 0 : PyTuple_GET_SIZE(given->names);
    const Py_ssize_t count = given->count + named;
    PyObject *few[FEW], **values = count < FEW ? few : PyMem_Malloc(sizeof(*values) * (count + 1));
    int told;
    if (values == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    values[0] = result;
    memcpy(values + 1, given->values, sizeof(*values) * (size_t)count);
    const Arguments all = {values, given->count + 1, given->names};
    told = watch_ask(self->after, self->second, &all);
    if (values != few)
        PyMem_Free(values);
    return told;
}

/* No event of its own. */
static PyObject *call_watch(Call *self, PyObject *original, const Arguments *given)
{
    HookCore *hook = self->hook;
    PyObject *result;
    Py_ssize_t depth = PyList_GET_SIZE(self->state->open);
    if (hook->alive) {
        call_count(self);
        if (self->first != Py_None && !watch_ask(self->before, self->first, given) &&
            !hook_lost(hook, depth))
            return NULL;
    }
    depth = PyList_GET_SIZE(self->state->open);
    result = call_original(self->guard_exit, original, given, depth == 0);
    if (result != NULL && self->second != Py_None && hook->alive) {
        depth = PyList_GET_SIZE(self->state->open);
        if (!watch_tell(self, result, given) && !hook_lost(hook, depth))
            Py_CLEAR(result);
    }
    return result;
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *hook, *state, *first, *second, *guard_exit;
    int watches = 0;
    Call *self;
    if (!PyArg_ParseTuple(args, "O!O!OOO|p", &HookCoreType, &hook, &StateCoreType, &state, &first,
                          &second, &guard_exit, &watches))
        return NULL;
    self = (Call *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->hook = (HookCore *)Py_NewRef(hook);
    self->state = (StateCore *)Py_NewRef(state);
    self->first = Py_NewRef(first);
    self->second = Py_NewRef(second);
    self->guard_exit = Py_NewRef(guard_exit);
    self->run = watches ? call_watch : call_around;
    if (watches) {
        self->before = (Probe *)method_of(first, METHOD(probe_enter));
        self->after = (Probe *)method_of(second, METHOD(probe_enter));
        return (PyObject *)self;
    }
    self->probe = (Probe *)behind(first, METHOD(probe_enter), second, METHOD(probe_leave));
    self->launch = (Launch *)behind(first, METHOD(launch_enter), second, METHOD(launch_leave));
    if (self->launch != NULL) {
        self->run = call_launch;
        Py_INCREF(hook);
        Py_XSETREF(self->launch->hook, (HookCore *)hook);
    }
    return (PyObject *)self;
}

/* packed(original, args, kwargs): do what this Call is for. */
static PyObject *call_packed(Call *self, PyObject *const *given, Py_ssize_t count)
{
    PyObject *names, *key, *value, *few[FEW], **values = few, *result = NULL;
    Py_ssize_t by_position, named, position = 0;
    if (count != 3 || !PyTuple_CheckExact(given[1]) || !PyDict_CheckExact(given[2])) {
        PyErr_SetString(PyExc_TypeError, "a hook is called with the original, a tuple and a dict");
        return NULL;
    }
    by_position = PyTuple_GET_SIZE(given[1]);
    named = PyDict_GET_SIZE(given[2]);
    names = named ? PyTuple_New(named) : NULL;
    if (named && names == NULL)
        return NULL;
    if (by_position + named > FEW)
        values = PyMem_Malloc(sizeof(*values) * (size_t)(by_position + named));
    if (values == NULL) {
        Py_XDECREF(names);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < by_position; i++)
        values[i] = PyTuple_GET_ITEM(given[1], i);
    /* The dict is the caller's: it may change while these are used. */
    for (Py_ssize_t i = 0; PyDict_Next(given[2], &position, &key, &value); i++) {
        PyTuple_SET_ITEM(names, i, Py_NewRef(key));
        values[by_position + i] = Py_NewRef(value);
    }
    const Arguments all = {values, by_position, names};
    /* Without a hook it was cleared as part of a cycle, and is called once more. */
    result = self->hook == NULL ? call_with(given[0], &all) : self->run(self, given[0], &all);
    for (Py_ssize_t i = 0; i < named; i++)
        Py_DECREF(values[by_position + i]);
    if (values != few)
        PyMem_Free(values);
    Py_XDECREF(names);
    return result;
}

static PyMethodDef call_methods[] = {
    {"packed", METHOD(call_packed), METH_FASTCALL, NULL},
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

/* ---- a function of Python that the extension stands in for ----------------------------------- */

/* torch.compile looks into a function of Python and not into the extension. So what is registered
 * is such a function, and whoever really calls it gets the Call that its body would call: the first
 * of its free variables, in the order of their names. A second one after `is_compiling` is the
 * original, which such a function is not given. */

#define WITH_ORIGINAL 3

static vectorcallfunc by_interpreter;

/* A free variable of a function, borrowed; NULL where there is none. */
static PyObject *free_variable(PyObject *function, Py_ssize_t index)
{
    PyObject *closure = PyFunction_GET_CLOSURE(function);
    if (closure == NULL || PyTuple_GET_SIZE(closure) <= index)
        return NULL;
    return PyCell_GET(PyTuple_GET_ITEM(closure, index));
}

static Call *call_behind(PyObject *function)
{
    PyObject *call = free_variable(function, 0);
    return call != NULL && Py_IS_TYPE(call, &CallType) ? (Call *)call : NULL;
}

static PyObject *stand_in_vectorcall(PyObject *function, PyObject *const *values, size_t flagged,
                                     PyObject *names)
{
    Call *call = call_behind(function);
    PyObject *original = free_variable(function, WITH_ORIGINAL - 1), *result;
    const Py_ssize_t count = PyVectorcall_NARGS(flagged);
    if (call == NULL || call->hook == NULL || (original == NULL && count < 1))
        return by_interpreter(function, values, flagged, names);
    Py_INCREF(call);
    if (original == NULL) {
        const Arguments given = {values + 1, count - 1, names};
        result = call->run(call, values[0], &given);
    } else {
        const Arguments given = {values, count, names};
        Py_INCREF(original);
        result = call->run(call, original, &given);
        Py_DECREF(original);
    }
    Py_DECREF(call);
    return result;
}

/* stand_in(function): whether it now is its Call that runs. */
static PyObject *stand_in(PyObject *module, PyObject *function)
{
    PyFunctionObject *plain = (PyFunctionObject *)function;
    if (!PyFunction_Check(function) || call_behind(function) == NULL)
        Py_RETURN_FALSE;
    if (plain->vectorcall != stand_in_vectorcall) {
        by_interpreter = plain->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
        PyFunction_SetVectorcall(plain, stand_in_vectorcall);
#else
        plain->vectorcall = stand_in_vectorcall; /* where a call is not of CALL_FUNCTION_EX, the
                                                  * interpreter of 3.11 still runs the body */
#endif
    }
    Py_RETURN_TRUE;
}
