/* Whether a probe still works, and what happens where it or the server fails; see hooks.py. */

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
static PyObject *call_original(PyObject *guard_exit, PyObject *original, const Arguments *given,
                               int outermost)
{
    PyObject *result = call_with(original, given);
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
