/* The arguments of a hooked call, as its caller passes them. Part of _native.c. */

/* Nothing is packed on the way to the probe and on to the hooked function. */
typedef struct {
    PyObject *const *values; /* those by position, then those by name */
    Py_ssize_t count;        /* of those by position */
    PyObject *names;         /* tuple of str; NULL where none is given by name */
} Arguments;

static int same_name(PyObject *one, PyObject *other)
{
    if (one == other)
        return 1;
    if (PyUnicode_CHECK_INTERNED(one) && PyUnicode_CHECK_INTERNED(other))
        return 0;
    return PyUnicode_GET_LENGTH(one) == PyUnicode_GET_LENGTH(other) &&
           PyUnicode_Compare(one, other) == 0;
}

/* An argument given by this name, borrowed; NULL without an exception where there is none. */
static PyObject *given_by_name(const Arguments *given, PyObject *name)
{
    const Py_ssize_t count = given->names == NULL ? 0 : PyTuple_GET_SIZE(given->names);
    for (Py_ssize_t i = 0; i < count; i++)
        if (same_name(PyTuple_GET_ITEM(given->names, i), name))
            return given->values[given->count + i];
    return NULL;
}

/* An argument by position or name, borrowed; NULL without an exception where it was not given. */
static PyObject *given_or_null(const Arguments *given, Py_ssize_t index, PyObject *name)
{
    return index < given->count ? given->values[index] : given_by_name(given, name);
}

/* The same of an argument that must be there. */
static PyObject *given_argument(const Arguments *given, Py_ssize_t index, PyObject *name)
{
    PyObject *value = given_or_null(given, index, name);
    if (value == NULL)
        PyErr_Format(PyExc_TypeError, "argument %zd (%U) is missing", index, name);
    return value;
}

static PyObject *call_with(PyObject *function, const Arguments *given)
{
    return PyObject_Vectorcall(function, given->values, (size_t)given->count, given->names);
}

/* The arguments by position, as a tuple. */
static PyObject *positional_of(const Arguments *given)
{
    PyObject *tuple = PyTuple_New(given->count);
    for (Py_ssize_t i = 0; tuple != NULL && i < given->count; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(given->values[i]));
    return tuple;
}

/* The arguments by name, as a dict. */
static PyObject *named_of(const Arguments *given)
{
    const Py_ssize_t count = given->names == NULL ? 0 : PyTuple_GET_SIZE(given->names);
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < count; i++)
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(given->names, i),
                           given->values[given->count + i]) < 0)
            Py_CLEAR(dict);
    return dict;
}
