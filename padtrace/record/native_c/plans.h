/* Attention metadata: planning methods and what tells their rows; see probes/plan.py. */

/* ---- num_splits, wherever a backend keeps it ------------------------------------------------ */

/* The first of the sizes of a tensor; NOT_OBSERVED_CODE where it has none. -1 may come with an
 * exception. `splits` may be NULL. */
static int64_t first_size(Shared *shared, PyObject *splits, int *seen)
{
    PyObject *shape, *first;
    int64_t rows = NOT_OBSERVED_CODE;
    *seen = 1;
    if (splits != NULL && (PyObject *)Py_TYPE(splits) == shared->looker->tensor_type) {
        Py_ssize_t count = tensor_rows(shared->looker, splits);
        if (count > 0)
            return count;
        if (!forgive())
            return -1;
    }
    shape = splits == NULL ? NULL : optional(splits, text_shape);
    if (shape == NULL || shape == Py_None) {
        Py_XDECREF(shape);
        *seen = 0;
        return PyErr_Occurred() ? -1 : NOT_OBSERVED_CODE;
    }
    if (PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) > 0) {
        first = PyTuple_GET_ITEM(shape, 0);
        rows = int64_of(first);
    }
    Py_DECREF(shape);
    return rows;
}

/* num_splits of an object, or NULL where it has none or None. */
static PyObject *splits_of(PyObject *holder)
{
    PyObject *splits = holder == NULL ? NULL : optional(holder, text_num_splits);
    if (splits == Py_None)
        Py_CLEAR(splits);
    return splits;
}

/* Hand the object on whose rows were seen, or let it go. */
static void hand_on(PyObject *splits, int seen, PyObject **made)
{
    if (made != NULL && seen)
        Py_XSETREF(*made, Py_XNewRef(splits));
    Py_XDECREF(splits);
}

/* plan.num_splits_rows; -1 may come with an exception. Where `made` is given it becomes a new
 * reference to the num_splits, if there are any. */
static int64_t num_splits_rows(Shared *shared, PyObject *metadata, PyObject **made)
{
    PyObject *holder = optional(metadata, text_flashmla_metadata), *splits;
    int64_t rows = NOT_OBSERVED_CODE;
    int seen = 0;
    if (holder == NULL && !PyErr_Occurred())
        holder = Py_NewRef(metadata);
    if (holder == NULL)
        return -1;
    if (holder == Py_None) {
        Py_DECREF(holder);
        return NONE_CODE;
    }
    splits = splits_of(holder);
    if (splits == NULL && !PyErr_Occurred()) {
        PyObject *inner = optional(holder, text_flashmla_metadata);
        splits = splits_of(inner);
        Py_XDECREF(inner);
    }
    if (!PyErr_Occurred())
        rows = first_size(shared, splits, &seen);
    hand_on(splits, seen, made);
    if (!seen && !PyErr_Occurred()) {
        splits = splits_of(metadata);
        rows = PyErr_Occurred() ? -1 : first_size(shared, splits, &seen);
        hand_on(splits, seen, made);
    }
    Py_DECREF(holder);
    return PyErr_Occurred() ? -1 : rows;
}

/* ---- backends and their metadata ------------------------------------------------------------ */

/* A backend's name and number, asked of Python once; NULL with an exception. */
static Backend *backend_of(Probe *self, PyObject *backend)
{
    Shared *shared = self->shared;
    Backend *found = &shared->backends[0];
    PyObject *pair;
    long long name, number;
    for (Py_ssize_t i = 0; i < shared->backend_count; i++)
        if (shared->backends[i].backend == backend)
            return &shared->backends[i];
    pair = PyObject_CallOneArg(self->describe, backend);
    if (pair == NULL)
        return NULL;
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "LL", &name, &number)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a backend is described by two numbers");
        Py_DECREF(pair);
        return NULL;
    }
    Py_DECREF(pair);
    if (shared->backend_count < MAX_BACKENDS) /* else the last one is asked for again */
        found = &shared->backends[shared->backend_count++];
    else
        found = &shared->backends[MAX_BACKENDS - 1];
    Py_CLEAR(found->splits);
    found->name = name;
    found->number = number;
    Py_INCREF(backend);
    Py_XSETREF(found->backend, backend);
    return found;
}

static int reader_fill(Reader *reader, PyObject *told)
{
    PyObject *missing, *columns;
    if (!PyTuple_Check(told) ||
        !PyArg_ParseTuple(told, "O!O!", &PyTuple_Type, &missing, &LookerType, &columns)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "metadata is described by two objects");
        return 0;
    }
    reader->missing_count = PyTuple_GET_SIZE(missing);
    if (reader->missing_count > FRAME_NUMBERS ||
        ((Looker *)columns)->scalar_count > FRAME_NUMBERS) {
        PyErr_SetString(PyExc_ValueError, "too many columns for a frame");
        return 0;
    }
    for (Py_ssize_t i = 0; i < reader->missing_count; i++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(missing, i));
        if (place < 0 || place >= FRAME_NUMBERS) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a frame has no such number");
            return 0;
        }
        reader->missing[i] = (int)place;
    }
    reader->columns = (Looker *)Py_NewRef(columns);
    return 1;
}

/* How this class of metadata is read, asked of Python once. */
static Reader *reader_of(Probe *self, PyObject *metadata)
{
    Shared *shared = self->shared;
    Reader made = {.type = Py_TYPE(metadata)};
    PyObject *told;
    int filled;
    for (Py_ssize_t i = 0; i < shared->reader_count; i++)
        if (shared->readers[i].type == made.type)
            return &shared->readers[i];
    told = PyObject_CallOneArg(self->more, metadata);
    if (told == NULL)
        return NULL;
    filled = reader_fill(&made, told);
    Py_DECREF(told);
    if (!filled)
        return NULL;
    if (shared->reader_count == MAX_READERS) {
        Py_DECREF(made.columns);
        PyErr_SetString(PyExc_RuntimeError, "too many classes of metadata");
        return NULL;
    }
    Py_INCREF((PyObject *)made.type);
    shared->readers[shared->reader_count] = made;
    return &shared->readers[shared->reader_count++];
}

/* Backends.read: the rows of `backend.forward_metadata`, into the frame. */
static int read_metadata(Probe *self, Frame *frame, PyObject **made)
{
    PyObject *metadata = optional(frame->subject, text_forward_metadata);
    int64_t splits;
    Reader *reader;
    Looker *columns;
    int done = 0;
    if (metadata == NULL || metadata == Py_None) {
        Py_XDECREF(metadata);
        return !PyErr_Occurred();
    }
    reader = reader_of(self, metadata);
    if (reader != NULL) {
        for (Py_ssize_t i = 0; i < reader->missing_count; i++)
            frame->numbers[reader->missing[i]] = NO_ATTRIBUTE_CODE;
        columns = (Looker *)Py_NewRef(reader->columns);
        done = looker_read(columns, metadata, frame->numbers);
        Py_DECREF(columns);
    }
    splits = done ? num_splits_rows(self->shared, metadata, made) : 0;
    Py_DECREF(metadata);
    if (!done || FAILED(splits))
        return 0;
    if (splits != NOT_OBSERVED_CODE || frame->numbers[self->splits] == NOT_OBSERVED_CODE)
        frame->numbers[self->splits] = splits;
    return 1;
}

/* ---- the planning methods ------------------------------------------------------------------- */

/* The batch given, borrowed (NULL for none), and its batch size where it is a captured one. */
static PyObject *batch_and_bucket(Probe *self, const Arguments *given, int64_t *bucket)
{
    PyObject *first = given_or_null(given, 1, text_forward_batch), *second, *size;
    *bucket = NOT_OBSERVED_CODE;
    if (first == NULL)
        first = given_or_null(given, 1, text_bs);
    if (first == NULL) {
        *bucket = NONE_CODE;
        return NULL;
    }
    if (PyLong_Check(first)) {
        *bucket = integer_code(first);
        return NULL;
    }
    second = given->count > 2 ? given->values[2] : NULL;
    if (second != NULL && PyLong_CheckExact(second)) {
        *bucket = integer_code(second);
    } else if (self->flag) {
        size = optional(first, text_batch_size);
        *bucket = integer_code(size);
        Py_XDECREF(size);
    }
    return first == Py_None || PyErr_Occurred() ? NULL : first;
}

static Frame *plan_enter(Probe *self, const Arguments *given)
{
    Shared *shared = self->shared;
    PyObject *backend = given_argument(given, 0, text_self), *batch;
    BatchRecord *record;
    Snapshot *entry = NULL;
    Frame *outer, *frame;
    int64_t bucket;
    if (backend == NULL)
        return NULL;
    outer = state_innermost(shared->state);
    if (PyErr_Occurred() || (outer != NULL && outer->subject == backend))
        return NULL; /* part of the event that is open */
    batch = batch_and_bucket(self, given, &bucket);
    if (PyErr_Occurred())
        return NULL;
    if (batch == NULL) {
        record = enclosing_record(shared);
        entry = (Snapshot *)Py_NewRef(shared->unseen);
    } else {
        Py_INCREF(batch);
        record = record_of(shared, batch, NULL);
        entry = record == NULL ? NULL : snap(shared, batch);
        Py_DECREF(batch);
    }
    if (entry == NULL) {
        Py_XDECREF(record);
        return NULL;
    }
    frame = probe_open(self, record, PLAN_KIND, backend);
    if (frame == NULL) {
        Py_DECREF(entry);
        return NULL;
    }
    frame->entry = (PyObject *)entry;
    for (int i = 0; i < self->columns; i++)
        frame->numbers[i] = NOT_OBSERVED_CODE;
    if (self->flag)
        frame->numbers[self->bucket] = bucket;
    return frame;
}

/* `Class.method`, for the alarm; borrowed. */
static PyObject *planner_name(Probe *self, PyObject *backend)
{
    PyObject *name, *made;
    if (self->by != NULL && self->by_type == Py_TYPE(backend))
        return self->by;
    name = PyType_GetName(Py_TYPE(backend));
    made = name == NULL ? NULL : PyUnicode_FromFormat("%U.%U", name, self->title);
    Py_XDECREF(name);
    if (made == NULL)
        return NULL;
    Py_XSETREF(self->by, made);
    Py_INCREF((PyObject *)Py_TYPE(backend));
    Py_XSETREF(self->by_type, Py_TYPE(backend));
    return self->by;
}

static int plan_write(Probe *self, Frame *frame, int64_t exit_seq)
{
    Backend *backend = backend_of(self, frame->subject);
    int64_t own[4 + FRAME_NUMBERS];
    if (backend == NULL)
        return 0;
    own[0] = backend->name;
    own[1] = backend->number;
    own[2] = self->function;
    own[3] = keep(self->shared, frame->entry);
    memcpy(own + 4, frame->numbers, sizeof(int64_t) * (size_t)self->columns);
    state_write(self->shared->state, PLAN_KIND, frame, exit_seq, own, 4 + self->columns, NULL, 0);
    return !PyErr_Occurred();
}

/* Backends.planned: these num_splits of the backend are those of this plan now. */
static int splits_made(Probe *self, Frame *frame, PyObject *made)
{
    Backend *backend = backend_of(self, frame->subject);
    if (backend == NULL)
        return 0;
    Py_XSETREF(backend->splits, Py_NewRef(made));
    backend->planned = frame->enter_seq;
    return 1;
}

/* Backends.plan_of: the number of the plan that made this very tensor. */
static int64_t plan_of(Shared *shared, PyObject *splits)
{
    if (splits != NULL && splits != Py_None)
        for (Py_ssize_t i = 0; i < shared->backend_count; i++)
            if (shared->backends[i].splits == splits)
                return shared->backends[i].planned;
    return NOT_OBSERVED_CODE;
}

static int plan_leave(Probe *self, Frame *frame, PyObject *result)
{
    StateCore *state = self->shared->state;
    int64_t exit_seq = state_close(state, (PyObject *)frame);
    PyObject *made = NULL;
    int done = exit_seq >= 0 && read_metadata(self, frame, &made);
    if (done && made != NULL && frame->numbers[self->splits] > 0)
        done = splits_made(self, frame, made);
    Py_XDECREF(made);
    if (!done)
        return 0;
    if (frame->numbers[self->splits] > 0) {
        PyObject *by = planner_name(self, frame->subject);
        if (by == NULL)
            return 0;
        batch_record_planned((BatchRecord *)frame->record, by, frame->enter_seq,
                             frame->numbers[self->planned], frame->numbers[self->splits]);
    }
    if (!plan_write(self, frame, exit_seq))
        return 0;
    return PyList_GET_SIZE(state->open) ? 1 : call_and_forget(self->finish);
}

static int plan_failed(Probe *self, Frame *frame, int observed)
{
    return plan_write(self, frame, exit_number(self, observed));
}

/* ---- _compute_flashmla_metadata(cache_seqlens, seq_len_q): the rows the plan was made for -----
 */

/* after(result, backend, cache_seqlens, ...) of FlashMLAMetadataWatch, for a probe of this name */
static Frame *flashmla_enter(Probe *self, const Arguments *given)
{
    Frame *plan = state_innermost(self->shared->state);
    PyObject *result, *cache_seqlens;
    int64_t rows, splits;
    if (plan == NULL || plan->kind != PLAN_KIND)
        return NULL;
    result = given_argument(given, 0, text_result);
    if (result == NULL)
        return NULL;
    cache_seqlens = given_or_null(given, 2, text_cache_seqlens);
    Py_INCREF(plan);
    rows = rows_code(self->shared, cache_seqlens);
    splits = FAILED(rows) ? -1 : num_splits_rows(self->shared, result, NULL);
    if (!FAILED(splits)) {
        plan->numbers[self->planned] = rows;
        plan->numbers[self->splits] = splits;
    }
    Py_DECREF(plan);
    return NULL;
}
