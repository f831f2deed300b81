/* The rows and host integers of one object at one moment; see ring_core.py. Part of _native.c. */

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
