/* init_new, init_mlp_sync_metadata, mark_forward_metadata_ready; see probes/batch.py, ready.py. */

/* ---- ForwardBatch.init_new(batch, model_runner) --------------------------------------------- */

static Frame *init_new_enter(Probe *self, const Arguments *given)
{
    PyObject *batch = given_argument(given, 1, text_batch), *model_runner;
    int64_t worker;
    if (batch == NULL)
        return NULL;
    model_runner = given_argument(given, 2, text_model_runner);
    if (model_runner == NULL)
        return NULL;
    worker = worker_of(self->shared, model_runner);
    if (PyErr_Occurred())
        return NULL;
    return probe_open(self, new_record(self->shared->state, worker), BATCH_KIND, batch);
}

static int init_new_leave(Probe *self, Frame *frame, PyObject *result)
{
    Shared *shared = self->shared;
    BatchRecord *record = (BatchRecord *)frame->record;
    Snapshot *snapshot;
    int64_t exit_seq;
    record->owner = (long long)(intptr_t)result;
    if (PyObject_SetAttr(result, text_padtrace, (PyObject *)record) < 0)
        return 0;
    if (self->more != Py_None) { /* SyncProbe.derive */
        PyObject *done =
            PyObject_CallFunctionObjArgs(self->more, frame->subject, result, record, NULL);
        if (done == NULL)
            return 0;
        Py_DECREF(done);
    }
    exit_seq = state_close(shared->state, (PyObject *)frame);
    if (exit_seq < 0)
        return 0;
    snapshot = snap(shared, result);
    if (snapshot == NULL)
        return 0;
    const int64_t own[] = {self->function, keep(shared, (PyObject *)snapshot)};
    Py_DECREF(snapshot);
    state_write(shared->state, BATCH_KIND, frame, exit_seq, own, 2, NULL, 0);
    return !PyErr_Occurred();
}

static int init_new_failed(Probe *self, Frame *frame, int observed)
{
    const int64_t own[] = {self->function, NOT_OBSERVED_CODE};
    const int64_t exit_seq = exit_number(self, observed);
    state_write(self->shared->state, BATCH_KIND, frame, exit_seq, own, 2, NULL, 0);
    return !PyErr_Occurred();
}

/* ---- ForwardBatch.init_mlp_sync_metadata(batch, device) ------------------------------------- */

#define SCHEDULED 4
#define SYNC_VECTORS 7

/* A list by content, since the call may edit it; NULL without an exception where there is none. */
static PyObject *scheduled_copy(PyObject *batch, PyObject *name)
{
    PyObject *vector = optional(batch, name), *copy;
    if (vector == NULL || vector == Py_None)
        return vector;
    copy = PySequence_List(vector);
    Py_DECREF(vector);
    return copy;
}

/* Whether the scheduler gathered no counts for this batch, from its first vector; -1 with an
 * exception. */
static int without_counts(PyObject *counts, PyObject *batch)
{
    PyObject *drafts;
    int draft = 0;
    if (counts != Py_None)
        return 0;
    drafts = optional(batch, text_draft_global_num_tokens);
    if (drafts != NULL)
        draft = PyObject_IsTrue(drafts);
    Py_XDECREF(drafts);
    return draft < 0 || PyErr_Occurred() ? -1 : !draft;
}

static Frame *sync_enter(Probe *self, const Arguments *given)
{
    PyObject *forward_batch = given_argument(given, 0, text_self), *batch, *counts;
    PyObject *names[SCHEDULED] = {text_global_num_tokens, text_global_num_tokens_for_logprob,
                                  text_draft_global_num_tokens,
                                  text_draft_global_num_tokens_for_logprob};
    Frame *frame;
    if (forward_batch == NULL)
        return NULL;
    batch = given_argument(given, 1, text_batch);
    counts = batch == NULL ? NULL : PyObject_GetAttr(batch, text_global_num_tokens);
    if (counts == NULL)
        return NULL;
    if (without_counts(counts, batch) != 0) {
        Py_DECREF(counts);
        return NULL;
    }
    frame =
        probe_open(self, record_of(self->shared, forward_batch, NULL), SYNC_KIND, forward_batch);
    if (frame == NULL) {
        Py_DECREF(counts);
        return NULL;
    }
    frame->extra = Py_NewRef(batch);
    frame->kept[0] = counts == Py_None ? Py_NewRef(Py_None) : PySequence_List(counts);
    Py_DECREF(counts);
    if (frame->kept[0] == NULL)
        return probe_give_up(frame);
    for (int i = 1; i < SCHEDULED; i++) {
        frame->kept[i] = scheduled_copy(batch, names[i]);
        if (frame->kept[i] == NULL && PyErr_Occurred())
            return probe_give_up(frame);
    }
    return frame;
}

/* A vector that can be kept: a list whose first item is an int, or an empty one. */
static int is_vector(PyObject *value)
{
    return value != NULL && is_integers(value);
}

/* Write a sync event from the seven vectors, some of which are not there (NULL). */
static void sync_write(Probe *self, Frame *frame, int64_t exit_seq, PyObject **vectors,
                       int64_t aliases, int64_t vote)
{
    RingCore *ring = self->shared->state->ring;
    int64_t own[1 + SYNC_VECTORS + 2], *values;
    Py_ssize_t count = 0, used = 0;
    for (int i = 0; i < SYNC_VECTORS; i++)
        count += is_vector(vectors[i]) ? PyList_GET_SIZE(vectors[i]) : 0;
    values = PyMem_Malloc(sizeof(int64_t) * (size_t)(count + 1));
    if (values == NULL) {
        PyErr_NoMemory();
        return;
    }
    own[0] = self->function;
    for (int i = 0; i < SYNC_VECTORS; i++) {
        PyObject *vector = vectors[i];
        if (is_vector(vector)) {
            own[1 + i] = PyList_GET_SIZE(vector);
            if (copy_numbers(vector, values + used) < 0) {
                ring_bad(ring, SYNC_KIND);
                PyMem_Free(values);
                return;
            }
            used += PyList_GET_SIZE(vector);
        } else {
            own[1 + i] = vector == NULL      ? NO_ATTRIBUTE_CODE
                         : vector == Py_None ? NONE_CODE
                                             : NOT_OBSERVED_CODE;
        }
    }
    own[1 + SYNC_VECTORS] = aliases;
    own[2 + SYNC_VECTORS] = vote;
    state_write(self->shared->state, SYNC_KIND, frame, exit_seq, own, 3 + SYNC_VECTORS, values,
                used);
    PyMem_Free(values);
}

/* What this rank voted for graphs: 0 or 1; -1 with an exception. */
static int64_t vote_of(PyObject *batch)
{
    PyObject *vote = optional(batch, text_can_run_dp_cuda_graph);
    int64_t code = NOT_OBSERVED_CODE;
    if (vote == NULL && !PyErr_Occurred())
        vote = optional(batch, text_can_run_decode_cuda_graph);
    if (PyErr_Occurred())
        return -1;
    if (vote != NULL && PyBool_Check(vote))
        code = vote == Py_True;
    Py_XDECREF(vote);
    return code;
}

static int sync_leave(Probe *self, Frame *frame, PyObject *result)
{
    StateCore *state = self->shared->state;
    PyObject *forward_batch = frame->subject, *held = NULL, *logprob = NULL, *source = NULL;
    int64_t exit_seq = state_close(state, (PyObject *)frame), vote;
    if (exit_seq < 0)
        return 0;
    held = PyObject_GetAttr(forward_batch, text_global_num_tokens_cpu);
    source =
        held == NULL ? NULL : PyObject_GetAttr(forward_batch, text_original_global_num_tokens_cpu);
    logprob = source == NULL
                  ? NULL
                  : PyObject_GetAttr(forward_batch, text_global_num_tokens_for_logprob_cpu);
    vote = logprob == NULL ? -1 : vote_of(frame->extra);
    if (logprob != NULL && !FAILED(vote)) {
        PyObject *vectors[SYNC_VECTORS] = {frame->kept[0], held,           frame->kept[1], logprob,
                                           source,         frame->kept[2], frame->kept[3]};
        BatchRecord *record = (BatchRecord *)frame->record;
        Py_INCREF(source);
        Py_XSETREF(record->scheduler_counts, source);
        sync_write(self, frame, exit_seq, vectors, held == source, vote);
    }
    Py_XDECREF(held);
    Py_XDECREF(source);
    Py_XDECREF(logprob);
    return !PyErr_Occurred();
}

static int nothing_failed(Probe *self, Frame *frame, int observed)
{
    return 1;
}

/* ---- ForwardBatch.mark_forward_metadata_ready() --------------------------------------------- */

static Frame *ready_enter(Probe *self, const Arguments *given)
{
    PyObject *batch = given_argument(given, 0, text_self);
    if (batch == NULL)
        return NULL;
    return probe_open(self, record_of(self->shared, batch, NULL), READY_KIND, batch);
}

static int ready_leave(Probe *self, Frame *frame, PyObject *result)
{
    PyObject *names[] = {text_forward_metadata_replan_equivalent, text_forward_metadata_planned_bs,
                         text_forward_metadata_planned_num_tokens};
    int64_t own[3], exit_seq = state_close(self->shared->state, (PyObject *)frame);
    if (exit_seq < 0)
        return 0;
    for (int i = 0; i < 3; i++) {
        own[i] = integer_attribute(frame->subject, names[i]);
        if (FAILED(own[i]))
            return 0;
    }
    state_write(self->shared->state, READY_KIND, frame, exit_seq, own, 3, NULL, 0);
    return !PyErr_Occurred();
}
