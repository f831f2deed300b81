/* ModelRunner.forward and the graph runners; see probes/forward.py and probes/graph.py. */

static int64_t verdict_code(PyObject *value)
{
    return value != NULL && PyBool_Check(value) ? value == Py_True : NOT_OBSERVED_CODE;
}

/* ---- ModelRunner.forward(forward_batch, ...) ------------------------------------------------ */

/* At the first sight of a runner Python takes its facts. */
static int forward_meet(Probe *self, PyObject *model_runner)
{
    PyObject *done;
    for (Py_ssize_t i = 0; i < self->met_count; i++)
        if (self->met[i] == (void *)model_runner)
            return 1;
    if (self->describe == Py_None)
        return 1;
    done = PyObject_CallOneArg(self->describe, model_runner);
    if (done == NULL)
        return 0;
    Py_DECREF(done);
    if (self->met_count < MAX_RUNNERS)
        self->met[self->met_count++] = (void *)model_runner;
    return 1;
}

/* SGLang before 0.5.15: skip_attn_backend_init says that the batch was planned outside. */
static int forward_skips(Probe *self, const Arguments *given, PyObject *batch, BatchRecord *record)
{
    PyObject *skip, *done;
    int true;
    if (self->more == Py_None)
        return 1;
    skip = given_or_null(given, 2, text_skip_attn_backend_init);
    true = skip == NULL ? 0 : PyObject_IsTrue(skip);
    if (PyErr_Occurred() || !true)
        return !PyErr_Occurred();
    done = PyObject_CallFunctionObjArgs(self->more, batch, record, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

static Frame *forward_enter(Probe *self, const Arguments *given)
{
    Shared *shared = self->shared;
    StateCore *state = shared->state;
    PyObject *model_runner = given_argument(given, 0, text_self), *batch;
    BatchRecord *record;
    Snapshot *snapshot;
    Frame *frame;
    int64_t worker;
    if (model_runner == NULL)
        return NULL;
    batch = given_argument(given, 1, text_forward_batch);
    if (batch == NULL || !forward_meet(self, model_runner))
        return NULL;
    worker = worker_of(shared, model_runner);
    record = PyErr_Occurred() ? NULL : record_of(shared, batch, &worker);
    if (record == NULL)
        return NULL;
    record->draft_step = worker == shared->draft ? record->forwards : 0;
    record->forwards++;
    frame = probe_open(self, record, FORWARD_KIND, Py_None);
    if (frame == NULL)
        return NULL;
    frame->numbers[0] = state->forward; /* what it is again when this one ends */
    state->forward = state->forwards++;
    snapshot = snap(shared, batch);
    if (snapshot == NULL)
        return probe_give_up(frame);
    const int64_t own[] = {keep(shared, (PyObject *)snapshot),
                           snapshot_at((PyObject *)snapshot, shared->mode), NOT_OBSERVED_CODE,
                           NOT_OBSERVED_CODE};
    Py_DECREF(snapshot);
    /* Written now, so that a process that dies inside it leaves it behind. */
    state_write(state, FORWARD_KIND, frame, NOT_OBSERVED_CODE, own, 4, NULL, 0);
    if (PyErr_Occurred() || !forward_skips(self, given, batch, (BatchRecord *)frame->record))
        return probe_give_up(frame);
    return frame;
}

static int forward_end(Probe *self, Frame *frame, int64_t exit_seq, int64_t can_run_graph,
                       int64_t failed)
{
    StateCore *state = self->shared->state;
    const int64_t pairs[] = {EXIT_SEQ,      exit_seq,       FORWARD_CAN_RUN_GRAPH,
                             can_run_graph, FORWARD_FAILED, failed};
    /* First, so that nothing that fails after it keeps a tensor. */
    looker_let_go(self->shared->looker);
    if (!call_and_forget(self->finish))
        return 0;
    state->forward = frame->numbers[0];
    if (state->ring != NULL)
        ring_complete(state->ring, FORWARD_KIND, frame->enter_seq, pairs, 6);
    return !PyErr_Occurred();
}

static int forward_leave(Probe *self, Frame *frame, PyObject *result)
{
    PyObject *verdict = optional(result, text_can_run_graph);
    int64_t exit_seq, code;
    if (PyErr_Occurred())
        return 0;
    code = verdict_code(verdict);
    if ((verdict == NULL || verdict == Py_None) && PyTuple_Check(result) &&
        PyTuple_GET_SIZE(result) == 2)
        code = verdict_code(PyTuple_GET_ITEM(result, 1));
    Py_XDECREF(verdict);
    exit_seq = state_close(self->shared->state, (PyObject *)frame);
    return exit_seq >= 0 && forward_end(self, frame, exit_seq, code, 0);
}

static int forward_failed(Probe *self, Frame *frame, int observed)
{
    return forward_end(self, frame, exit_number(self, observed), NOT_OBSERVED_CODE, 1);
}

/* ---- graph runners --------------------------------------------------------------------------- */

#define CHOSEN_FOR 0 /* numbers in the frame of a graph event */
#define CHOSEN 1

/* From (worker or None, (name, algorithm, width, limit), captured sizes or None). */
static int runner_fill(Runner *runner, PyObject *told)
{
    PyObject *worker, *captured;
    long long name, algorithm, width, limit;
    if (!PyTuple_Check(told) || !PyArg_ParseTuple(told, "O(LLLL)O", &worker, &name, &algorithm,
                                                  &width, &limit, &captured)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a runner is described by three objects");
        return 0;
    }
    runner->name = name;
    runner->algorithm = algorithm;
    runner->width = width;
    runner->limit = limit;
    runner->has_worker = worker != Py_None;
    if (runner->has_worker)
        runner->worker = int64_of(worker);
    runner->captured_count = -1;
    if (PyErr_Occurred() || captured == Py_None)
        return !PyErr_Occurred();
    if (!is_sequence(captured))
        return 0;
    runner->captured_count = PySequence_Fast_GET_SIZE(captured);
    runner->captured = PyMem_Malloc(sizeof(int64_t) * (size_t)(runner->captured_count + 1));
    if (runner->captured == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    return copy_numbers(captured, runner->captured) >= 0;
}

/* What is known of a runner, asked of Python once. */
static Runner *runner_of(Probe *self, PyObject *runner)
{
    Runner made = {.runner = runner};
    PyObject *told;
    int filled;
    for (Py_ssize_t i = 0; i < self->runner_count; i++)
        if (self->runners[i].runner == runner)
            return &self->runners[i];
    told = PyObject_CallOneArg(self->describe, runner);
    if (told == NULL)
        return NULL;
    filled = runner_fill(&made, told);
    Py_DECREF(told);
    if (filled && self->runners == NULL)
        self->runners = PyMem_Calloc(MAX_RUNNERS, sizeof(Runner));
    if (!filled || self->runners == NULL || self->runner_count == MAX_RUNNERS) {
        PyMem_Free(made.captured);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "too many graph runners");
        return NULL;
    }
    Py_INCREF(runner);
    self->runners[self->runner_count] = made;
    return &self->runners[self->runner_count++];
}

static Frame *graph_enter(Probe *self, const Arguments *given)
{
    Shared *shared = self->shared;
    PyObject *runner = given_argument(given, 0, text_self), *batch, *entry;
    Runner *known;
    Frame *frame;
    if (runner == NULL)
        return NULL;
    batch = given_argument(given, 1, text_forward_batch);
    known = batch == NULL ? NULL : runner_of(self, runner);
    if (known == NULL)
        return NULL;
    frame = probe_open(self, record_of(shared, batch, known->has_worker ? &known->worker : NULL),
                       GRAPH_KIND, runner);
    if (frame == NULL)
        return NULL;
    entry = (PyObject *)snap(shared, batch);
    /* What ran above may have met more runners. */
    known = entry == NULL ? NULL : runner_of(self, runner);
    if (known == NULL) {
        Py_XDECREF(entry);
        return probe_give_up(frame);
    }
    frame->numbers[CHOSEN_FOR] = frame->numbers[CHOSEN] = NOT_OBSERVED_CODE;
    const Py_ssize_t captured = known->captured_count;
    const int64_t own[] = {
        known->name,
        self->function,
        keep(shared, entry),
        known->algorithm,
        snapshot_at(entry, shared->batch_size),
        known->width,
        captured < 0 ? NOT_OBSERVED_CODE : captured,
        known->limit,
        NOT_OBSERVED_CODE,
        NOT_OBSERVED_CODE,
        NOT_OBSERVED_CODE,
    };
    Py_DECREF(entry);
    /* Written now, since a replay may never return. */
    state_write(shared->state, GRAPH_KIND, frame, NOT_OBSERVED_CODE, own, 11, known->captured,
                captured < 0 ? 0 : captured);
    return PyErr_Occurred() ? probe_give_up(frame) : frame;
}

static int graph_complete(Probe *self, Frame *frame, int64_t exit_seq, int64_t verdict)
{
    RingCore *ring = self->shared->state->ring;
    const int64_t pairs[] = {
        EXIT_SEQ,       exit_seq,
        GRAPH_VERDICT,  verdict,
        GRAPH_ARGUMENT, frame->numbers[CHOSEN_FOR],
        GRAPH_BUCKET,   frame->numbers[CHOSEN],
    };
    if (ring != NULL)
        ring_complete(ring, GRAPH_KIND, frame->enter_seq, pairs, 8);
    return !PyErr_Occurred();
}

static int graph_leave(Probe *self, Frame *frame, PyObject *result)
{
    StateCore *state = self->shared->state;
    int64_t exit_seq = state_close(state, (PyObject *)frame);
    if (exit_seq < 0)
        return 0;
    if (self->flag && frame->numbers[CHOSEN] == NOT_OBSERVED_CODE) {
        /* Releases without _pad_to_bucket leave the bucket on the runner. */
        PyObject *bs = optional(frame->subject, text_bs);
        if (bs == NULL && PyErr_Occurred())
            return 0;
        frame->numbers[CHOSEN] = integer_code(bs);
        Py_XDECREF(bs);
    }
    if (self->flag && PyList_GET_SIZE(state->open) == 0)
        looker_let_go(self->shared->looker);
    return graph_complete(self, frame, exit_seq, verdict_code(result));
}

static int graph_failed(Probe *self, Frame *frame, int observed)
{
    return graph_complete(self, frame, exit_number(self, observed), NOT_OBSERVED_CODE);
}

/* ---- steps: see probes/steps.py ---------------------------------------------------------------
 */

/* prepare_mlp_sync_batch_raw; the flag says that a gather really happens */
static Frame *step_enter(Probe *self, const Arguments *given)
{
    if (self->flag)
        Py_DECREF(state_count_sync(self->shared->state, NULL));
    return NULL;
}

static Frame *round_enter(Probe *self, const Arguments *given)
{
    Py_DECREF(state_count_round(self->shared->state, NULL));
    return NULL;
}

/* An event is opened by none of these. */
static int nothing_left(Probe *self, Frame *frame, PyObject *result)
{
    return 1;
}

static const Doings all_doings[] = {
    {"step", step_enter, nothing_left, nothing_failed},
    {"round", round_enter, nothing_left, nothing_failed},
    {"init_new", init_new_enter, init_new_leave, init_new_failed},
    {"sync", sync_enter, sync_leave, nothing_failed},
    {"ready", ready_enter, ready_leave, nothing_failed},
    {"pad", pad_enter, pad_leave, pad_failed},
    {"pad_inputs", pad_inputs_enter, pad_leave, pad_failed},
    {"unpad", unpad_enter, unpad_leave, unpad_failed},
    {"plan", plan_enter, plan_leave, plan_failed},
    {"flashmla", flashmla_enter, nothing_left, nothing_failed},
    {"forward", forward_enter, forward_leave, forward_failed},
    {"graph", graph_enter, graph_leave, graph_failed},
    {NULL, NULL, NULL, NULL},
};
