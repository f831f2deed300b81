/* prepare_mlp_sync_batch, _pad_inputs_to_size, post_forward_mlp_sync_batch; see probes/pad.py. */

/* ---- the pad -------------------------------------------------------------------------------- */

#define OWNED 4
#define NUM_TOKENS 0 /* numbers in the frame of a pad */
#define BS 1

static Frame *pad_open(Probe *self, PyObject *batch, PyObject *model_runner)
{
    PyObject *names[OWNED] = {text_extend_seq_lens_cpu, text_extend_prefix_lens_cpu,
                              text_extend_logprob_start_lens_cpu, text_lora_ids};
    Shared *shared = self->shared;
    BatchRecord *record;
    PyObject *counts;
    Frame *frame;
    int64_t worker = worker_of(shared, model_runner);
    if (PyErr_Occurred())
        return NULL;
    frame = probe_open(self, record_of(shared, batch, &worker), PAD_KIND, batch);
    if (frame == NULL)
        return NULL;
    record = (BatchRecord *)frame->record;
    frame->numbers[NUM_TOKENS] = frame->numbers[BS] = NOT_OBSERVED_CODE;
    frame->entry = (PyObject *)snap(shared, batch);
    counts = record->scheduler_counts;
    if (frame->entry == NULL)
        return probe_give_up(frame);
    if (counts != NULL && counts != Py_None) {
        frame->extra = PySequence_GetSlice(counts, 0, PY_SSIZE_T_MAX);
        if (frame->extra == NULL)
            return probe_give_up(frame);
    }
    for (int i = 0; i < OWNED; i++) {
        frame->kept[i] = optional(batch, names[i]);
        if (frame->kept[i] == NULL && PyErr_Occurred())
            return probe_give_up(frame);
    }
    return frame;
}

static Frame *pad_enter(Probe *self, const Arguments *given)
{
    PyObject *batch = given_argument(given, 0, text_self), *model_runner;
    if (batch == NULL)
        return NULL;
    model_runner = given_argument(given, 1, text_model_runner);
    return model_runner == NULL ? NULL : pad_open(self, batch, model_runner);
}

/* Whether the pad edited the scheduler's own list. */
static int64_t counts_changed(Frame *frame)
{
    PyObject *counts = ((BatchRecord *)frame->record)->scheduler_counts;
    int same;
    if (counts == NULL || counts == Py_None)
        return NOT_OBSERVED_CODE;
    if (frame->extra == NULL)
        return 1;
    Py_INCREF(counts);
    same = PyObject_RichCompareBool(counts, frame->extra, Py_EQ);
    Py_DECREF(counts);
    return same < 0 ? -1 : !same;
}

static int pad_write(Probe *self, Frame *frame, int64_t exit_seq, Snapshot *after)
{
    Shared *shared = self->shared;
    int64_t own[6 + OWNED];
    own[0] = self->function;
    own[1] = keep(shared, frame->entry);
    own[2] = keep(shared, (PyObject *)after);
    own[3] = frame->numbers[NUM_TOKENS];
    own[4] = frame->numbers[BS];
    own[5] = counts_changed(frame);
    if (FAILED(own[5]))
        return 0;
    for (int i = 0; i < OWNED; i++) {
        own[6 + i] = rows_code(shared, frame->kept[i]);
        if (FAILED(own[6 + i]))
            return 0;
    }
    state_write(shared->state, PAD_KIND, frame, exit_seq, own, 6 + OWNED, NULL, 0);
    return !PyErr_Occurred();
}

static int pad_leave(Probe *self, Frame *frame, PyObject *result)
{
    Shared *shared = self->shared;
    int64_t exit_seq = state_close(shared->state, (PyObject *)frame);
    Snapshot *after = exit_seq < 0 ? NULL : snap(shared, frame->subject);
    int done;
    if (after == NULL)
        return 0;
    batch_record_padded((BatchRecord *)frame->record, self->title, frame->enter_seq,
                        snapshot_at(frame->entry, shared->token_rows),
                        snapshot_at((PyObject *)after, shared->token_rows));
    done = pad_write(self, frame, exit_seq, after);
    if (done && self->more != Py_None) { /* the alarm, where no launch will tell it */
        PyObject *told = PyObject_CallFunctionObjArgs(self->more, frame->record, after, NULL);
        done = told != NULL;
        Py_XDECREF(told);
    }
    Py_DECREF(after);
    return done;
}

static int pad_failed(Probe *self, Frame *frame, int observed)
{
    return pad_write(self, frame, exit_number(self, observed), self->shared->unseen);
}

/* An int given for a size; anything else was not observed. */
static int64_t size_code(PyObject *value)
{
    return value == NULL || !PyLong_Check(value) ? NOT_OBSERVED_CODE : integer_code(value);
}

static Frame *pad_inputs_enter(Probe *self, const Arguments *given)
{
    PyObject *batch = given_argument(given, 0, text_self), *model_runner, *tokens, *bs;
    Frame *outer, *frame;
    if (batch == NULL)
        return NULL;
    model_runner = given_argument(given, 1, text_model_runner);
    if (model_runner == NULL)
        return NULL;
    tokens = given_or_null(given, 2, text_num_tokens);
    bs = given_or_null(given, 3, text_bs);
    outer = state_innermost(self->shared->state);
    if (outer != NULL && outer->kind == PAD_KIND && outer->subject == batch &&
        outer->title != NULL && PyUnicode_CheckExact(outer->title) &&
        PyUnicode_CompareWithASCIIString(outer->title, "prepare_mlp_sync_batch") == 0) {
        frame = outer; /* it completes that event */
    } else {
        outer = NULL;
        frame = PyErr_Occurred() ? NULL : pad_open(self, batch, model_runner);
    }
    if (frame != NULL) {
        frame->numbers[NUM_TOKENS] = size_code(tokens);
        frame->numbers[BS] = size_code(bs);
    }
    return outer == NULL ? frame : NULL;
}

/* ---- post_forward_mlp_sync_batch(logits_output) --------------------------------------------- */

#define LOGITS 0 /* numbers in the frame of an unpad */
#define HIDDEN 1

/* Rows of next_token_logits and of hidden_states; 0 with an exception. */
static int logits_rows(Shared *shared, PyObject *output, int64_t *rows)
{
    rows[LOGITS] = rows_attribute(shared, output, text_next_token_logits);
    if (FAILED(rows[LOGITS]))
        return 0;
    rows[HIDDEN] = rows_attribute(shared, output, text_hidden_states);
    return !FAILED(rows[HIDDEN]);
}

static Frame *unpad_enter(Probe *self, const Arguments *given)
{
    PyObject *batch = given_argument(given, 0, text_self), *output;
    Frame *frame;
    if (batch == NULL)
        return NULL;
    output = given_argument(given, 1, text_logits_output);
    if (output == NULL)
        return NULL;
    frame = probe_open(self, record_of(self->shared, batch, NULL), UNPAD_KIND, batch);
    if (frame == NULL)
        return NULL;
    frame->extra = Py_NewRef(output);
    frame->entry = (PyObject *)snap(self->shared, batch);
    if (frame->entry == NULL || !logits_rows(self->shared, output, frame->numbers))
        return probe_give_up(frame);
    return frame;
}

static int unpad_write(Probe *self, Frame *frame, int64_t exit_seq, Snapshot *after,
                       const int64_t *rows)
{
    Shared *shared = self->shared;
    int64_t own[6];
    own[0] = keep(shared, frame->entry);
    own[1] = keep(shared, (PyObject *)after);
    own[2] = frame->numbers[LOGITS];
    own[3] = rows[LOGITS];
    own[4] = frame->numbers[HIDDEN];
    own[5] = rows[HIDDEN];
    state_write(shared->state, UNPAD_KIND, frame, exit_seq, own, 6, NULL, 0);
    return !PyErr_Occurred();
}

static int unpad_leave(Probe *self, Frame *frame, PyObject *result)
{
    int64_t rows[2], exit_seq = state_close(self->shared->state, (PyObject *)frame);
    Snapshot *after = exit_seq < 0 ? NULL : snap(self->shared, frame->subject);
    int done;
    if (after == NULL)
        return 0;
    done = logits_rows(self->shared, frame->extra, rows) &&
           unpad_write(self, frame, exit_seq, after, rows);
    Py_DECREF(after);
    return done;
}

static int unpad_failed(Probe *self, Frame *frame, int observed)
{
    const int64_t rows[2] = {NOT_OBSERVED_CODE, NOT_OBSERVED_CODE};
    return unpad_write(self, frame, exit_number(self, observed), self->shared->unseen, rows);
}
