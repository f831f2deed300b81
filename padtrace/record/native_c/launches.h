/* Kernel calls by shapes, equal ones counted; see probes/launch.py. Part of _native.c. */

/* The arguments of a kernel that columns are read from; the shapes of the first six tell one
 * launch of a forward from another. */
enum {
    Q,
    NUM_SPLITS,
    CACHE_SEQLENS,
    BLOCK_TABLE,
    INDICES,
    K_CACHE,
    SHAPED,
    TILES = SHAPED,
    HEAD_DIM_V,
    IS_FP8,
    ARGUMENTS
};
#define NAMES 3
#define MAX_DIMENSIONS 64

/* Numbers in the frame of a launch; its shapes are in `kept`, the call it is nested in is its
 * subject, and num_splits and cache_seqlens of the last call are in `extra` and `entry`. */
enum { COUNT, LAST_EXIT, MADE_SPLITS, INSIDE, MADE };

typedef struct {
    PyObject_HEAD
    Shared *shared;
    HookCore *hook;
    PyObject *title;
    int64_t function;
    PyObject *alarm;  /* told of lengths that do not agree; or None */
    PyObject *kept;   /* given every new launch's number, args and kwargs; or None */
    PyObject *string; /* interns a string */
    PyObject *dtypes; /* dict of dtype to string id */
    Py_ssize_t positions[ARGUMENTS];
    PyObject *names[ARGUMENTS][NAMES];
    int metadata;       /* get_mla_metadata, whose result is num_splits */
    PyObject *launches; /* list of the frames of this forward */
    Frame *last, *now;
} Launch;

static PyTypeObject LaunchType;

/* From (position or -1, name, other names of it ...), one for each argument. */
static int launch_arguments(Launch *self, PyObject *arguments)
{
    if (PyTuple_GET_SIZE(arguments) != ARGUMENTS)
        goto wrong;
    for (int i = 0; i < ARGUMENTS; i++) {
        PyObject *one = PyTuple_GET_ITEM(arguments, i);
        if (!PyTuple_CheckExact(one) || PyTuple_GET_SIZE(one) < 2 ||
            PyTuple_GET_SIZE(one) > 1 + NAMES)
            goto wrong;
        self->positions[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0));
        if (self->positions[i] == -1 && PyErr_Occurred())
            return 0;
        for (Py_ssize_t k = 1; k < PyTuple_GET_SIZE(one); k++) {
            if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(one, k)))
                goto wrong;
            self->names[i][k - 1] = Py_NewRef(PyTuple_GET_ITEM(one, k));
        }
    }
    return 1;
wrong:
    PyErr_SetString(PyExc_TypeError, "arguments come as positions and names");
    return 0;
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"shared", "title", "function", "arguments", "metadata",
                            "alarm",  "kept",  "string",   NULL};
    PyObject *shared, *title, *arguments, *alarm, *kept, *string;
    long long function;
    int metadata;
    Launch *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!ULO!pOOO", names, &SharedType, &shared,
                                     &title, &function, &PyTuple_Type, &arguments, &metadata,
                                     &alarm, &kept, &string))
        return NULL;
    self = (Launch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->shared = (Shared *)Py_NewRef(shared);
    self->title = Py_NewRef(title);
    self->function = function;
    self->metadata = metadata;
    self->alarm = Py_NewRef(alarm);
    self->kept = Py_NewRef(kept);
    self->string = Py_NewRef(string);
    self->dtypes = PyDict_New();
    self->launches = PyList_New(0);
    if (self->dtypes == NULL || self->launches == NULL || !launch_arguments(self, arguments) ||
        PyList_Append(self->shared->launches, (PyObject *)self) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int launch_traverse(Launch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->shared);
    Py_VISIT(self->hook);
    Py_VISIT(self->alarm);
    Py_VISIT(self->kept);
    Py_VISIT(self->string);
    Py_VISIT(self->launches);
    Py_VISIT(self->last);
    Py_VISIT(self->now);
    return 0;
}

static void launch_forget(Launch *self)
{
    Py_CLEAR(self->last);
    Py_CLEAR(self->now);
}

static int launch_clear(Launch *self)
{
    launch_forget(self);
    Py_SETREF(self->alarm, Py_NewRef(Py_None));
    Py_SETREF(self->kept, Py_NewRef(Py_None));
    return PyList_SetSlice(self->launches, 0, PY_SSIZE_T_MAX, NULL);
}

static void launch_dealloc(Launch *self)
{
    PyObject_GC_UnTrack(self);
    launch_forget(self);
    Py_XDECREF(self->launches);
    Py_XDECREF(self->alarm);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->string);
    Py_XDECREF(self->dtypes);
    Py_XDECREF(self->title);
    Py_XDECREF(self->hook);
    Py_XDECREF(self->shared);
    for (int i = 0; i < ARGUMENTS; i++)
        for (int k = 0; k < NAMES; k++)
            Py_XDECREF(self->names[i][k]);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* ---- telling launches apart ----------------------------------------------------------------- */

/* An argument of the kernel, borrowed; NULL without an exception where it was not given. */
static PyObject *launch_given(Launch *self, const Arguments *given, int which)
{
    PyObject *found = NULL;
    for (int k = NAMES - 1; k >= 0 && found == NULL; k--)
        if (self->names[which][k] != NULL)
            found = given_by_name(given, self->names[which][k]);
    if (found == NULL && self->positions[which] >= 0 && self->positions[which] < given->count)
        found = given->values[self->positions[which]];
    return found;
}

/* 1 if a tensor of this view has this shape. */
static int view_has_shape(const TensorView *view, PyObject *shape)
{
    if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != view->dimensions)
        return 0;
    for (int32_t i = 0; i < view->dimensions; i++) {
        int overflow = 0;
        PyObject *size = PyTuple_GET_ITEM(shape, i);
        if (!PyLong_CheckExact(size) ||
            PyLong_AsLongLongAndOverflow(size, &overflow) != view->shape[i] || overflow)
            return 0;
    }
    return 1;
}

/* 1 if the tensor given by this name has this shape; 0 if not, or if that cannot be told. */
static int same_shape(Launch *self, const Arguments *all, PyObject *name, PyObject *shape)
{
    PyObject *given = given_by_name(all, name), *now;
    TensorView view;
    int same;
    if (given == NULL || given == Py_None)
        return shape == Py_None;
    if (shape == NULL)
        return 0;
    if (tensor_view(self->shared->looker, given, &view))
        return view_has_shape(&view, shape);
    if (PyErr_Occurred())
        return -1;
    /* What `shape` runs may forget the call that is compared with. */
    Py_INCREF(shape);
    now = PyObject_GetAttr(given, text_shape);
    same = now == NULL ? -1 : PyObject_RichCompareBool(now, shape, Py_EQ);
    Py_XDECREF(now);
    Py_DECREF(shape);
    return same;
}

static int given_is(const Arguments *all, PyObject *name, PyObject *known)
{
    PyObject *given = given_by_name(all, name);
    return (given == NULL ? Py_None : given) == known;
}

/* Whether a call is the last one again, all by names; -1 with an exception that is the server's. */
static int launch_repeats(Launch *self, const Arguments *given)
{
    PyObject *open = self->shared->state->open;
    Py_ssize_t depth = PyList_GET_SIZE(open);
    Frame *last = self->last;
    int same;
    if (last == NULL || given->count > 0 || depth == 0 ||
        PyList_GET_ITEM(open, depth - 1) != last->subject ||
        !given_is(given, self->names[NUM_SPLITS][0], last->extra) ||
        !given_is(given, self->names[CACHE_SEQLENS][0], last->entry))
        return 0;
    Py_INCREF(last);
    same = same_shape(self, given, self->names[Q][0], last->kept[Q]);
    if (same == 1)
        same = same_shape(self, given, self->names[INDICES][0], last->kept[INDICES]);
    same = same == 1 && self->last == last;
    Py_DECREF(last);
    if (!forgive()) /* whatever else it was, the slow way meets it again and says so */
        return -1;
    return same;
}

/* The frame of this forward with these shapes and this nesting, a new reference; NULL if none. */
static Frame *launch_known(Launch *self, int64_t inside, PyObject **shapes)
{
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(self->launches); at++) {
        Frame *frame = (Frame *)Py_NewRef(PyList_GET_ITEM(self->launches, at));
        int same = frame->numbers[INSIDE] == inside;
        for (int i = 0; i < SHAPED && same == 1; i++)
            same = frame->kept[i] == NULL
                       ? 0
                       : PyObject_RichCompareBool(frame->kept[i], shapes[i], Py_EQ);
        if (same == 1)
            return frame;
        Py_DECREF(frame);
        if (same < 0)
            return NULL;
    }
    return NULL;
}

/* ---- a launch with shapes this forward had not ----------------------------------------------- */

/* The first of the sizes of a tensor, given its shape. */
static int64_t shape_rows(PyObject *shape)
{
    if (shape == Py_None)
        return NONE_CODE;
    return PyTuple_GET_SIZE(shape) ? int64_of(PyTuple_GET_ITEM(shape, 0)) : NOT_OBSERVED_CODE;
}

static int64_t shape_length(PyObject *shape)
{
    return shape == Py_None ? NONE_CODE : PyTuple_GET_SIZE(shape);
}

static int64_t dtype_code(Launch *self, PyObject *tensor)
{
    PyObject *dtype = tensor == NULL ? NULL : optional(tensor, text_dtype), *known, *text;
    int64_t code = -1;
    if (dtype == NULL || dtype == Py_None) {
        Py_XDECREF(dtype);
        return PyErr_Occurred() ? -1 : NONE_CODE;
    }
    known = PyDict_GetItemWithError(self->dtypes, dtype);
    if (known != NULL) {
        code = int64_of(known);
    } else if (!PyErr_Occurred()) {
        text = PyObject_Str(dtype);
        known = text == NULL ? NULL : PyObject_CallOneArg(self->string, text);
        if (known != NULL && PyDict_SetItem(self->dtypes, dtype, known) == 0)
            code = int64_of(known);
        Py_XDECREF(known);
        Py_XDECREF(text);
    }
    Py_DECREF(dtype);
    return code;
}

/* Rows of num_splits and of the tile metadata; newer FlashMLA keeps both in one object. */
static int tile_rows(Launch *self, PyObject *tiles, PyObject *splits_shape, int64_t *splits,
                     int64_t *rows)
{
    Shared *shared = self->shared;
    PyObject *shape = NULL;
    *splits = shape_rows(splits_shape);
    if (tiles != NULL && tiles != Py_None && splits_shape == Py_None) {
        shape = optional(tiles, text_shape);
        if (shape == NULL && !PyErr_Occurred()) {
            *splits = rows_attribute(shared, tiles, text_num_splits);
            *rows =
                FAILED(*splits) ? -1 : rows_attribute(shared, tiles, text_tile_scheduler_metadata);
            return !PyErr_Occurred();
        }
        Py_XDECREF(shape);
    }
    *rows = PyErr_Occurred() ? -1 : rows_code(shared, tiles);
    return !PyErr_Occurred();
}

/* The event of a new launch; 0 with an exception. */
static int launch_write(Launch *self, Frame *frame, PyObject **given, int64_t *split_rows)
{
    PyObject **shapes = frame->kept,
             *valued[] = {shapes[Q], shapes[BLOCK_TABLE], shapes[INDICES], shapes[K_CACHE]};
    int64_t values[MAX_DIMENSIONS], own[15];
    Py_ssize_t used = 0;
    for (int i = 0; i < 4; i++) {
        if (valued[i] == Py_None)
            continue;
        if (used + PyTuple_GET_SIZE(valued[i]) > MAX_DIMENSIONS) {
            PyErr_SetString(PyExc_ValueError, "tensors of too many dimensions");
            return 0;
        }
        if (copy_numbers(valued[i], values + used) < 0)
            return 0;
        used += PyTuple_GET_SIZE(valued[i]);
    }
    own[0] = self->function;
    own[1] = shape_length(shapes[Q]);
    own[2] = dtype_code(self, given[Q]);
    if (FAILED(own[2]) || !tile_rows(self, given[TILES], shapes[NUM_SPLITS], &own[3], &own[4]))
        return 0;
    own[5] = shape_rows(shapes[CACHE_SEQLENS]);
    own[6] = shape_length(shapes[BLOCK_TABLE]);
    own[7] = shape_length(shapes[INDICES]);
    own[8] = shape_length(shapes[K_CACHE]);
    own[9] = dtype_code(self, given[K_CACHE]);
    own[10] = integer_code(given[HEAD_DIM_V]);
    own[11] = integer_code(given[IS_FP8]);
    own[12] = 1;
    own[13] = NOT_OBSERVED_CODE;
    own[14] = plan_of(self->shared, given[NUM_SPLITS]);
    if (PyErr_Occurred())
        return 0;
    *split_rows = own[3];
    state_write(self->shared->state, LAUNCH_KIND, frame, NOT_OBSERVED_CODE, own, 15, values, used);
    return !PyErr_Occurred();
}

/* Tell the plan that is open, or the alarm, what the rows say. */
static int launch_tell(Launch *self, Frame *frame, int64_t split_rows)
{
    int64_t q_rows = shape_rows(frame->kept[Q]);
    PyObject *done;
    if (self->metadata) {
        Frame *plan = (Frame *)frame->subject;
        if (Py_IS_TYPE(plan, &FrameType) && plan->kind == PLAN_KIND &&
            plan->numbers[PLANNED_ROWS] == NOT_OBSERVED_CODE)
            plan->numbers[PLANNED_ROWS] = shape_rows(frame->kept[CACHE_SEQLENS]);
        return !PyErr_Occurred();
    }
    /* Where they agree, see contracts/rows.py, there is nothing to tell. */
    if (self->alarm == Py_None || frame->kept[Q] == Py_None || split_rows < 0 ||
        split_rows == q_rows + SPLITS_BEYOND_ROWS)
        return 1;
    done = PyObject_CallFunction(self->alarm, "OOLL", self->title, frame->record, (long long)q_rows,
                                 (long long)split_rows);
    Py_XDECREF(done);
    return done != NULL;
}

/* Give what keeps values the number and the arguments of a launch; 0 with an exception. */
static int launch_keep(Launch *self, Frame *frame, const Arguments *all)
{
    PyObject *args, *kwargs, *done = NULL;
    if (self->kept == Py_None)
        return 1;
    args = positional_of(all);
    kwargs = args == NULL ? NULL : named_of(all);
    if (kwargs != NULL)
        done = PyObject_CallFunction(self->kept, "LOO", frame->enter_seq, args, kwargs);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(done);
    return done != NULL;
}

/* Record a launch with these shapes and arguments of SHAPED and others. A new reference. */
static Frame *launch_first(Launch *self, PyObject **shapes, PyObject **given, const Arguments *all)
{
    Frame *inside = state_innermost(self->shared->state), *frame = NULL;
    BatchRecord *record = PyErr_Occurred() ? NULL : enclosing_record(self->shared);
    PyObject *subject = Py_NewRef(inside == NULL ? Py_None : (PyObject *)inside);
    int64_t split_rows = 0;
    if (record != NULL)
        frame = state_open(self->shared->state, self->title, (PyObject *)record);
    Py_XDECREF(record);
    if (frame == NULL) {
        Py_DECREF(subject);
        return NULL;
    }
    frame->kind = LAUNCH_KIND;
    frame->subject = subject;
    frame->failed = Py_NewRef((PyObject *)self);
    frame->numbers[COUNT] = 1;
    frame->numbers[LAST_EXIT] = frame->numbers[MADE_SPLITS] = NOT_OBSERVED_CODE;
    frame->numbers[MADE] = 0;
    frame->numbers[INSIDE] = subject == Py_None ? -1 : ((Frame *)subject)->enter_seq;
    for (int i = 0; i < SHAPED; i++)
        frame->kept[i] = Py_NewRef(shapes[i]);
    if (PyList_Append(self->launches, (PyObject *)frame) < 0 ||
        !launch_write(self, frame, given, &split_rows) || !launch_tell(self, frame, split_rows))
        return probe_give_up(frame);
    if (!launch_keep(self, frame, all))
        return probe_give_up(frame);
    Py_INCREF(frame);
    Py_XSETREF(self->now, frame);
    return frame;
}

/* ---- around the call --------------------------------------------------------------------------
 */

/* Open the event of a call that is not the last one again. A new reference. */
static Frame *launch_open(Launch *self, const Arguments *all)
{
    PyObject *given[ARGUMENTS], *shapes[SHAPED] = {NULL};
    Frame *inside, *frame = NULL;
    for (int i = 0; i < ARGUMENTS; i++)
        given[i] = launch_given(self, all, i);
    for (int i = 0; i < SHAPED; i++) {
        shapes[i] = given[i] == NULL || given[i] == Py_None
                        ? Py_NewRef(Py_None)
                        : PyObject_GetAttr(given[i], text_shape);
        if (shapes[i] != NULL && shapes[i] != Py_None && !PyTuple_Check(shapes[i]))
            PyErr_SetString(PyExc_TypeError, "a shape is a tuple");
        if (PyErr_Occurred())
            goto done;
    }
    /* Only now: what `shape` runs may let another thread close what was open. */
    inside = state_innermost(self->shared->state);
    if (PyErr_Occurred())
        goto done;
    frame = launch_known(self, inside == NULL ? -1 : inside->enter_seq, shapes);
    if (frame != NULL) {
        frame->numbers[COUNT]++;
        if (PyList_Append(self->shared->state->open, (PyObject *)frame) < 0)
            Py_CLEAR(frame);
    } else if (!PyErr_Occurred()) {
        frame = launch_first(self, shapes, given, all);
    }
    if (frame != NULL) {
        PyObject *lengths = given[CACHE_SEQLENS] == NULL ? Py_None : given[CACHE_SEQLENS];
        Py_XINCREF(given[NUM_SPLITS]); /* NULL: such a call is never known again */
        Py_XSETREF(frame->extra, given[NUM_SPLITS]);
        Py_INCREF(lengths);
        Py_XSETREF(frame->entry, lengths);
        Py_INCREF(frame);
        Py_XSETREF(self->last, frame);
    }
done:
    for (int i = 0; i < SHAPED; i++)
        Py_XDECREF(shapes[i]);
    return frame;
}

/* enter(*args, **kwargs) */
static PyObject *launch_enter(Launch *self, PyObject *const *values, Py_ssize_t count,
                              PyObject *names)
{
    const Arguments all = {values, count, names};
    return (PyObject *)launch_open(self, &all);
}

static void pop_if_innermost(PyObject *open, PyObject *frame)
{
    const Py_ssize_t depth = PyList_GET_SIZE(open);
    if (depth && PyList_GET_ITEM(open, depth - 1) == frame)
        open_pop(open);
}

/* The first call of a shape has ended; 0 with an exception. */
static int launch_close(Launch *self, PyObject *frame, PyObject *result)
{
    Frame *now = self->now;
    int64_t rows;
    pop_if_innermost(self->shared->state->open, frame);
    if (now == NULL)
        return 1;
    self->now = NULL;
    now->numbers[LAST_EXIT] = self->shared->state->seq++;
    if (self->metadata && PyTuple_Check(result) && PyTuple_GET_SIZE(result) == 2) {
        rows = rows_code(self->shared, PyTuple_GET_ITEM(result, 1));
        if (!FAILED(rows)) {
            now->numbers[MADE_SPLITS] = rows;
            now->numbers[MADE] = 1;
        }
    }
    Py_DECREF(now);
    return !PyErr_Occurred();
}

/* leave(frame, result) */
static PyObject *launch_leave(Launch *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "leave takes a frame and a result");
        return NULL;
    }
    if (!launch_close(self, given[0], given[1]))
        return NULL;
    Py_RETURN_NONE;
}

/* ---- the end of a forward ---------------------------------------------------------------------
 */

/* Write how often a launch happened. */
static void launch_complete(Launch *self, Frame *frame, int64_t failed)
{
    RingCore *ring = self->shared->state->ring;
    const int64_t count = frame->numbers[COUNT];
    const int64_t pairs[] = {
        EXIT_SEQ,      frame->numbers[LAST_EXIT],  LAUNCH_COUNT, count, LAUNCH_FAILED, failed,
        LAUNCH_SPLITS, frame->numbers[MADE_SPLITS]};
    HookCore *hook = self->hook;
    if (ring == NULL)
        return;
    if (ring->on && ring->fired != NULL && hook != NULL && hook->number >= 0 &&
        hook->number < MAX_HOOKS)
        ring->fired[hook->number] += count;
    ring_complete(ring, LAUNCH_KIND, frame->enter_seq, pairs, frame->numbers[MADE] ? 8 : 6);
}

static PyObject *launch_finish(Launch *self, PyObject *unused)
{
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(self->launches); at++)
        launch_complete(self, (Frame *)PyList_GET_ITEM(self->launches, at), 0);
    if (PyList_GET_SIZE(self->launches)) {
        launch_forget(self);
        if (PyList_SetSlice(self->launches, 0, PY_SSIZE_T_MAX, NULL) < 0)
            return NULL;
    }
    return none_or_raise();
}

/* The same of every kernel function. */
static PyObject *shared_finish(Shared *self, PyObject *unused)
{
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(self->launches); at++) {
        PyObject *done = launch_finish((Launch *)PyList_GET_ITEM(self->launches, at), NULL);
        if (done == NULL)
            return NULL;
        Py_DECREF(done);
    }
    Py_RETURN_NONE;
}

/* What the frame of a launch has as `failed`. */
static PyObject *launch_failed(Launch *self, PyObject *args, PyObject *kwargs)
{
    PyObject *given;
    Frame *frame;
    int observed;
    if (!PyArg_ParseTuple(args, "O!p", &FrameType, &given, &observed))
        return NULL;
    frame = (Frame *)given;
    if (frame->kind != LAUNCH_KIND || frame->failed != (PyObject *)self) {
        PyErr_SetString(PyExc_TypeError, "that is no launch of this probe");
        return NULL;
    }
    if (observed && frame->numbers[LAST_EXIT] == NOT_OBSERVED_CODE)
        frame->numbers[LAST_EXIT] = self->shared->state->seq++;
    launch_complete(self, frame, 1);
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(self->launches); at++)
        if (PyList_GET_ITEM(self->launches, at) == given) {
            if (PyList_SetSlice(self->launches, at, at + 1, NULL) < 0)
                return NULL;
            break;
        }
    launch_forget(self);
    return none_or_raise();
}

static PyMethodDef launch_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))launch_enter, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"leave", (PyCFunction)(void (*)(void))launch_leave, METH_FASTCALL, NULL},
    {"finish", (PyCFunction)launch_finish, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = launch_new,
    .tp_dealloc = (destructor)launch_dealloc,
    .tp_traverse = (traverseproc)launch_traverse,
    .tp_clear = (inquiry)launch_clear,
    .tp_call = (ternaryfunc)launch_failed,
    .tp_methods = launch_methods,
};
