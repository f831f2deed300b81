/* Looks at batches, from which snapshots are made; see snapshots.py. Part of _native.c. */

/* ---- Looker ------------------------------------------------------------------------------ */

enum { ROWS, INTEGER, NAME, ANY, VECTOR, COUNTED, CONVERSIONS };

/* The columns that are read from attributes of one object. */
typedef struct {
    Py_ssize_t count;
    PyObject *names;      /* tuple of interned str */
    PyObject *converters; /* tuple: called for ANY and NAME, and for ROWS of no plain tensor */
    int *places, *conversions;
    PyObject **named; /* NAME: the value converted last */
    int64_t *name_codes;
} Columns;

/* The columns of one class of speculative input. */
typedef struct {
    PyTypeObject *type;
    Columns columns;
    Py_ssize_t code_count;
    int *code_places;
    int64_t *codes;
} Speculative;

typedef struct {
    PyObject *owner;
    PyObject **raw; /* the attributes, then the speculative input */
    PyObject **spec_raw;
    Py_ssize_t spec_count;
    Speculative *spec;
    Snapshot *snapshot;
    uint64_t version, spec_version; /* of both dicts when they were looked at; 0: not known */
    PyObject *spec_owner;           /* the dict of the speculative input */
} Look;

/* A number that changes with every change of a dict; 0 where this Python has none. */
static uint64_t dict_version(PyObject *dict)
{
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* 3.12 still keeps it */
    return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    return 0;
#endif
}

#define MAX_COLUMNS 256
#define MAX_ORDER 512
#define MAX_SPECULATIVE 64
#define MAX_SPEC_COLUMNS 64

typedef struct {
    PyObject_HEAD
    Columns columns;
    Py_ssize_t scalar_count, mirror;
    int64_t *blank;
    int max_place, sum_place;
    PyObject *spec_name, *tensor_type, *lengths_of, *partial, *describe;
    lenfunc length; /* of tensor_type's base in C */
    TensorViewer view;
    Speculative *speculative[MAX_SPECULATIVE];
    Py_ssize_t speculative_count;
    Look looks[2];
    int last;
    PyObject **spare_raw, **spare_spec_raw; /* room for a look while one is taken out; or NULL */
    /* Keys of a batch in their order, and which column each is; see fetch_in_order. */
    Py_ssize_t order_length, order_columns[MAX_ORDER];
    unsigned long misses;
    /* The columns that are lists, which are looked into every time. */
    Py_ssize_t list_count, lists[MAX_COLUMNS];
    PyObject *order_keys[MAX_ORDER];
} Looker;

static PyTypeObject LookerType;

static void columns_free(Columns *self)
{
    for (Py_ssize_t i = 0; self->named != NULL && i < self->count; i++)
        Py_XDECREF(self->named[i]);
    Py_XDECREF(self->names);
    Py_XDECREF(self->converters);
    PyMem_Free(self->places);
    PyMem_Free(self->conversions);
    PyMem_Free(self->named);
    PyMem_Free(self->name_codes);
    memset(self, 0, sizeof(*self));
}

/* From three tuples: names, (place, conversion) pairs, converters. */
static int columns_fill(Columns *self, PyObject *names, PyObject *pairs, PyObject *converters,
                        Py_ssize_t scalar_count)
{
    Py_ssize_t count;
    if (!PyTuple_CheckExact(names) || !PyTuple_CheckExact(pairs) || !PyTuple_CheckExact(converters))
        goto wrong;
    count = PyTuple_GET_SIZE(names);
    if (PyTuple_GET_SIZE(pairs) != count || PyTuple_GET_SIZE(converters) != count)
        goto wrong;
    self->places = PyMem_Calloc((size_t)count + 1, sizeof(int));
    self->conversions = PyMem_Calloc((size_t)count + 1, sizeof(int));
    self->named = PyMem_Calloc((size_t)count + 1, sizeof(PyObject *));
    self->name_codes = PyMem_Calloc((size_t)count + 1, sizeof(int64_t));
    if (!self->places || !self->conversions || !self->named || !self->name_codes) {
        PyErr_NoMemory();
        return -1;
    }
    self->count = count;
    self->converters = Py_NewRef(converters);
    self->names = PyTuple_New(count);
    if (self->names == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (!PyUnicode_CheckExact(name))
            goto wrong;
        /* The very string that attributes are kept under, so that they are found by identity. */
        Py_INCREF(name);
        PyUnicode_InternInPlace(&name);
        PyTuple_SET_ITEM(self->names, i, name);
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "ii", &self->places[i],
                              &self->conversions[i]))
            return -1;
        if (self->places[i] < 0 || self->places[i] >= scalar_count || self->conversions[i] < 0 ||
            self->conversions[i] >= CONVERSIONS)
            goto wrong;
    }
    return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "columns come as names, pairs and converters");
    return -1;
}

static void look_clear(Look *look, Py_ssize_t count)
{
    look->version = look->spec_version = 0;
    Py_CLEAR(look->owner);
    Py_CLEAR(look->spec_owner);
    Py_CLEAR(look->snapshot);
    for (Py_ssize_t i = 0; look->raw != NULL && i <= count; i++)
        Py_CLEAR(look->raw[i]);
    for (Py_ssize_t i = 0; look->spec_raw != NULL && i < look->spec_count; i++)
        Py_CLEAR(look->spec_raw[i]);
    look->spec_count = 0;
    look->spec = NULL;
}

static void looker_dealloc(Looker *self)
{
    for (int i = 0; i < 2; i++) {
        look_clear(&self->looks[i], self->columns.count);
        PyMem_Free(self->looks[i].raw);
        PyMem_Free(self->looks[i].spec_raw);
    }
    PyMem_Free(self->spare_raw);
    PyMem_Free(self->spare_spec_raw);
    for (Py_ssize_t i = 0; i < self->speculative_count; i++) {
        Speculative *spec = self->speculative[i];
        Py_XDECREF((PyObject *)spec->type);
        columns_free(&spec->columns);
        PyMem_Free(spec->code_places);
        PyMem_Free(spec->codes);
        PyMem_Free(spec);
    }
    for (Py_ssize_t i = 0; i < MAX_ORDER; i++)
        Py_XDECREF(self->order_keys[i]);
    columns_free(&self->columns);
    PyMem_Free(self->blank);
    Py_XDECREF(self->spec_name);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->lengths_of);
    Py_XDECREF(self->partial);
    Py_XDECREF(self->describe);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *looker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"names",   "pairs",    "converters",  "blank",
                               "mirror",  "lengths",  "tensor_type", "lengths_of",
                               "partial", "describe", NULL};
    PyObject *names, *pairs, *converters, *blank, *tensor_type, *lengths_of, *partial, *describe;
    Py_ssize_t mirror;
    int max_place, sum_place;
    Looker *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!n(ii)OOOO", keywords, &names, &pairs,
                                     &converters, &PyList_Type, &blank, &mirror, &max_place,
                                     &sum_place, &tensor_type, &lengths_of, &partial, &describe))
        return NULL;
    self = (Looker *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->scalar_count = PyList_GET_SIZE(blank);
    if (columns_fill(&self->columns, names, pairs, converters, self->scalar_count) < 0)
        goto bad;
    if (self->columns.count > MAX_COLUMNS || mirror < 0 || mirror > self->columns.count ||
        max_place < 0 || sum_place < 0 || max_place >= self->scalar_count ||
        sum_place >= self->scalar_count) {
        PyErr_SetString(PyExc_ValueError, "no such column");
        goto bad;
    }
    for (Py_ssize_t i = 0; i < self->columns.count; i++)
        if (self->columns.conversions[i] == VECTOR || self->columns.conversions[i] == COUNTED)
            self->lists[self->list_count++] = i;
    self->mirror = mirror;
    self->max_place = max_place;
    self->sum_place = sum_place;
    if (PyList_GET_SIZE(blank) != self->scalar_count) {
        PyErr_SetString(PyExc_ValueError, "the blank changed");
        goto bad;
    }
    self->blank = PyMem_Calloc((size_t)self->scalar_count + 1, sizeof(int64_t));
    for (int i = 0; i < 2; i++) {
        self->looks[i].raw = PyMem_Calloc((size_t)self->columns.count + 1, sizeof(PyObject *));
        self->looks[i].spec_raw = PyMem_Calloc(MAX_SPEC_COLUMNS, sizeof(PyObject *));
    }
    self->spare_raw = PyMem_Calloc((size_t)self->columns.count + 1, sizeof(PyObject *));
    self->spare_spec_raw = PyMem_Calloc(MAX_SPEC_COLUMNS, sizeof(PyObject *));
    if (!self->spare_raw || !self->spare_spec_raw || !self->blank || !self->looks[0].raw ||
        !self->looks[1].raw || !self->looks[0].spec_raw || !self->looks[1].spec_raw) {
        PyErr_NoMemory();
        goto bad;
    }
    if (copy_numbers(blank, self->blank) < 0)
        goto bad;
    self->spec_name = PyUnicode_InternFromString("spec_info");
    if (self->spec_name == NULL)
        goto bad;
    self->tensor_type = Py_NewRef(tensor_type);
    if (PyType_Check(tensor_type)) {
        PyTypeObject *base = ((PyTypeObject *)tensor_type)->tp_base;
        if (base != NULL && base->tp_as_mapping != NULL)
            self->length = base->tp_as_mapping->mp_length;
    }
    self->view = viewer_of(tensor_type);
    self->lengths_of = Py_NewRef(lengths_of);
    self->partial = Py_NewRef(partial);
    self->describe = Py_NewRef(describe);
    return (PyObject *)self;
bad:
    Py_DECREF(self);
    return NULL;
}

/* How to read a class of speculative input, asked of Python once a class. */
static Speculative *looker_speculative(Looker *self, PyObject *spec)
{
    PyTypeObject *type = Py_TYPE(spec);
    PyObject *told, *codes, *names, *pairs, *converters;
    Speculative *found;
    for (Py_ssize_t i = 0; i < self->speculative_count; i++)
        if (self->speculative[i]->type == type)
            return self->speculative[i];
    if (self->speculative_count == MAX_SPECULATIVE) {
        PyErr_SetString(PyExc_RuntimeError, "too many classes of speculative input");
        return NULL;
    }
    told = PyObject_CallOneArg(self->describe, spec);
    if (told == NULL)
        return NULL;
    found = PyMem_Calloc(1, sizeof(Speculative));
    if (found == NULL) {
        PyErr_NoMemory();
        goto bad;
    }
    if (!PyArg_ParseTuple(told, "O!OOO", &PyTuple_Type, &codes, &names, &pairs, &converters))
        goto bad;
    if (columns_fill(&found->columns, names, pairs, converters, self->scalar_count) < 0)
        goto bad;
    found->code_count = PyTuple_GET_SIZE(codes);
    found->code_places = PyMem_Calloc((size_t)found->code_count + 1, sizeof(int));
    found->codes = PyMem_Calloc((size_t)found->code_count + 1, sizeof(int64_t));
    if (!found->code_places || !found->codes || found->columns.count > MAX_SPEC_COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "too many columns");
        goto bad;
    }
    for (Py_ssize_t i = 0; i < found->code_count; i++) {
        long long code;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(codes, i), "iL", &found->code_places[i], &code))
            goto bad;
        found->codes[i] = code;
        if (found->code_places[i] < 0 || found->code_places[i] >= self->scalar_count) {
            PyErr_SetString(PyExc_ValueError, "no such column");
            goto bad;
        }
    }
    if (self->speculative_count == MAX_SPECULATIVE) { /* `describe` may have come back here */
        PyErr_SetString(PyExc_RuntimeError, "too many classes of speculative input");
        goto bad;
    }
    Py_DECREF(told);
    Py_INCREF((PyObject *)type);
    found->type = type;
    self->speculative[self->speculative_count++] = found;
    return found;
bad:
    Py_DECREF(told);
    if (found != NULL) {
        columns_free(&found->columns);
        PyMem_Free(found->code_places);
        PyMem_Free(found->codes);
        PyMem_Free(found);
    }
    return NULL;
}

/* A list of ints, or an empty one: what a vector can be. */
static int is_integers(PyObject *value)
{
    return PyList_CheckExact(value) &&
           (PyList_GET_SIZE(value) == 0 || PyLong_CheckExact(PyList_GET_ITEM(value, 0)));
}

static int64_t call_converter(PyObject *converter, PyObject *value)
{
    PyObject *number = PyObject_CallOneArg(converter, value);
    int64_t code = NOT_OBSERVED_CODE;
    int overflow = 0;
    if (number == NULL)
        return -1;
    if (PyLong_Check(number)) {
        code = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (overflow)
            code = NOT_OBSERVED_CODE;
    }
    Py_DECREF(number);
    return code;
}

/* Rows of a plain tensor by the C function under its `__len__`, which is one of Python. */
static Py_ssize_t tensor_rows(Looker *self, PyObject *tensor)
{
    return self->length == NULL ? -1 : self->length(tensor);
}

/* What a plain tensor is; 0 where that cannot be told, with an exception if it is the server's. */
static int tensor_view(Looker *self, PyObject *tensor, TensorView *view)
{
    if (self->view == NULL || (PyObject *)Py_TYPE(tensor) != self->tensor_type)
        return 0;
    if (self->view(tensor, view) == 0)
        return 1;
    forgive();
    return 0;
}

/* The code of a value, no vector; -1 may come with an exception. */
static int64_t looker_convert(Looker *self, Columns *columns, Py_ssize_t i, PyObject *value)
{
    PyObject *converter = PyTuple_GET_ITEM(columns->converters, i);
    if (value == Py_None)
        return NONE_CODE;
    switch (columns->conversions[i]) {
    case ROWS:
        if (PyList_CheckExact(value))
            return PyList_GET_SIZE(value);
        if ((PyObject *)Py_TYPE(value) == self->tensor_type) {
            Py_ssize_t rows = tensor_rows(self, value);
            if (rows > 0)
                return rows;
            if (!forgive()) /* empty, or a scalar: the converter knows which */
                return -1;
        }
        return call_converter(converter, value);
    case COUNTED: {
        Py_ssize_t length = PyObject_Size(value);
        return length;
    }
    case INTEGER: {
        int overflow = 0;
        long long number;
        if (!PyLong_Check(value))
            return NOT_OBSERVED_CODE;
        number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? NOT_OBSERVED_CODE : number;
    }
    case NAME:
        if (columns->named[i] != value) {
            int64_t code = call_converter(converter, value);
            if (code == -1 && PyErr_Occurred())
                return -1;
            Py_INCREF(value);
            Py_XSETREF(columns->named[i], value);
            columns->name_codes[i] = code;
        }
        return columns->name_codes[i];
    default:
        return call_converter(converter, value);
    }
}

/* Largest and sum of seq_lens_cpu; 0 with an exception set. */
static int looker_lengths(Looker *self, PyObject *mirror, int64_t *scalars)
{
    PyObject *pair;
    TensorView view;
    scalars[self->max_place] = scalars[self->sum_place] = NONE_CODE;
    if (mirror == Py_None)
        return 1;
    if (tensor_view(self, mirror, &view) &&
        summed(&view, &scalars[self->max_place], &scalars[self->sum_place]))
        return 1;
    if (PyErr_Occurred())
        return 0;
    if ((PyObject *)Py_TYPE(mirror) == self->tensor_type) {
        PyObject *on_host = PyObject_GetAttr(mirror, text_is_cpu), *listed;
        Py_ssize_t rows = on_host == NULL ? -1 : tensor_rows(self, mirror);
        int64_t largest = 0, sum = 0;
        int plain = on_host == Py_True && rows > 0 && rows <= SHORT_MIRROR;
        Py_XDECREF(on_host);
        if (!forgive())
            return 0;
        if (plain) {
            listed = PyObject_CallMethodNoArgs(mirror, text_tolist);
            if (listed == NULL)
                return 0;
            plain = PyList_CheckExact(listed);
            for (Py_ssize_t i = 0; plain && i < PyList_GET_SIZE(listed); i++) {
                PyObject *item = PyList_GET_ITEM(listed, i);
                int overflow = 0;
                int64_t length = 0;
                if (PyLong_CheckExact(item))
                    length = PyLong_AsLongLongAndOverflow(item, &overflow);
                else
                    plain = 0;
                if (overflow || length > INT64_MAX / (SHORT_MIRROR + 1) ||
                    length < -(INT64_MAX / (SHORT_MIRROR + 1)))
                    plain = 0;
                largest = i == 0 || length > largest ? length : largest;
                sum += plain ? length : 0;
            }
            Py_DECREF(listed);
        }
        if (plain) {
            scalars[self->max_place] = largest;
            scalars[self->sum_place] = sum;
            return 1;
        }
    }
    pair = PyObject_CallOneArg(self->lengths_of, mirror);
    if (pair == NULL)
        return 0;
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
        Py_DECREF(pair);
        PyErr_SetString(PyExc_TypeError, "lengths come as a pair");
        return 0;
    }
    scalars[self->max_place] = int64_of(PyTuple_GET_ITEM(pair, 0));
    scalars[self->sum_place] = int64_of(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    return !PyErr_Occurred();
}
