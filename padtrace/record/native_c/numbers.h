/* The layout of a ring, its checksum, and Python integers as int64. Part of _native.c. */

/* ---- what ring_format.py and recording/absent.py say; native.py compares ------------------- */

#define VERSION 5 /* of what is offered to Python: a stale build is then not used */
#define SLOT_BYTES 256
#define HEAD_BYTES 24
#define PAYLOAD (SLOT_BYTES - HEAD_BYTES)
#define COUNTERS_OFFSET 1024
#define HOOKS_OFFSET 4096
#define STATIC_OFFSET 8192
#define MAX_HOOKS 256
#define MAX_CHAIN 4096
#define MAX_SCALARS 65535
#define MAX_VALUES 16777215
#define EVENTS 1
#define UPDATES 2
#define REFUSED 3
#define FORWARDS 8
enum {
    FORWARD_KIND,
    BATCH_KIND,
    SYNC_KIND,
    PLAN_KIND,
    READY_KIND,
    PAD_KIND,
    GRAPH_KIND,
    LAUNCH_KIND,
    UNPAD_KIND,
    ERROR_KIND,
    SNAPSHOT_KIND,
};
#define RECORD_EVENT 1
#define RECORD_UPDATE 2
/* Columns of updates: their places in schema.event_columns. */
#define EXIT_SEQ 8
#define FORWARD_CAN_RUN_GRAPH 14
#define FORWARD_FAILED 15
#define GRAPH_VERDICT 20
#define GRAPH_ARGUMENT 21
#define GRAPH_BUCKET 22
#define LAUNCH_COUNT 24
#define LAUNCH_FAILED 25
#define LAUNCH_SPLITS 15
#define SPLITS_BEYOND_ROWS 1 /* contracts.rows.num_splits_expected(0) */
#define PLANNED_ROWS 0       /* place among the numbers in the frame of a plan */
#define NONE_CODE (INT64_MIN)
#define NO_ATTRIBUTE_CODE (INT64_MIN + 1)
#define NOT_OBSERVED_CODE (INT64_MIN + 2)
#define SHORT_MIRROR 64

/* The names that are looked up: `text_<first>` is the interned string. */
#define TEXTS(X)                                                                                   \
    X(abandon, "_abandon")                                                                         \
    X(around_error, "_around_error")                                                               \
    X(bad_event, "_bad_event")                                                                     \
    X(batch, "batch")                                                                              \
    X(batch_size, "batch_size")                                                                    \
    X(bs, "bs")                                                                                    \
    X(cache_seqlens, "cache_seqlens")                                                              \
    X(can_run_decode_cuda_graph, "can_run_decode_cuda_graph")                                      \
    X(can_run_dp_cuda_graph, "can_run_dp_cuda_graph")                                              \
    X(can_run_graph, "can_run_graph")                                                              \
    X(dict, "__dict__")                                                                            \
    X(draft_global_num_tokens, "draft_global_num_tokens")                                          \
    X(draft_global_num_tokens_for_logprob, "draft_global_num_tokens_for_logprob")                  \
    X(dtype, "dtype")                                                                              \
    X(extend_logprob_start_lens_cpu, "extend_logprob_start_lens_cpu")                              \
    X(extend_prefix_lens_cpu, "extend_prefix_lens_cpu")                                            \
    X(extend_seq_lens_cpu, "extend_seq_lens_cpu")                                                  \
    X(flashmla_metadata, "flashmla_metadata")                                                      \
    X(forward_batch, "forward_batch")                                                              \
    X(forward_metadata, "forward_metadata")                                                        \
    X(forward_metadata_planned_bs, "forward_metadata_planned_bs")                                  \
    X(forward_metadata_planned_num_tokens, "forward_metadata_planned_num_tokens")                  \
    X(forward_metadata_replan_equivalent, "forward_metadata_replan_equivalent")                    \
    X(global_num_tokens, "global_num_tokens")                                                      \
    X(global_num_tokens_cpu, "global_num_tokens_cpu")                                              \
    X(global_num_tokens_for_logprob, "global_num_tokens_for_logprob")                              \
    X(global_num_tokens_for_logprob_cpu, "global_num_tokens_for_logprob_cpu")                      \
    X(hidden_states, "hidden_states")                                                              \
    X(is_cpu, "is_cpu")                                                                            \
    X(is_draft_worker, "is_draft_worker")                                                          \
    X(logits_output, "logits_output")                                                              \
    X(lora_ids, "lora_ids")                                                                        \
    X(lose, "lose")                                                                                \
    X(model_runner, "model_runner")                                                                \
    X(next_token_logits, "next_token_logits")                                                      \
    X(num_splits, "num_splits")                                                                    \
    X(num_tokens, "num_tokens")                                                                    \
    X(original_global_num_tokens_cpu, "original_global_num_tokens_cpu")                            \
    X(padtrace, "_padtrace")                                                                       \
    X(result, "result")                                                                            \
    X(self, "self")                                                                                \
    X(set_phase, "_set_phase")                                                                     \
    X(shape, "shape")                                                                              \
    X(skip_attn_backend_init, "skip_attn_backend_init")                                            \
    X(tbo_parent_token_range, "tbo_parent_token_range")                                            \
    X(tile_scheduler_metadata, "tile_scheduler_metadata")                                          \
    X(tolist, "tolist")

#define TEXT_DECLARE(name, text) static PyObject *text_##name;
TEXTS(TEXT_DECLARE)

/* ---- checksum: that of zlib -------------------------------------------------------------- */

static uint32_t crc_table[8][256];

static void crc_fill(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[0][i] = c;
    }
    for (int i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            crc_table[t][i] = crc_table[0][crc_table[t - 1][i] & 0xFF] ^ (crc_table[t - 1][i] >> 8);
}

/* The register after `count` int64, as they lie in a little-endian file. */
static uint32_t crc_by_table(const int64_t *words, Py_ssize_t count, uint32_t c)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t w = (uint64_t)words[i] ^ c;
        c = crc_table[7][w & 0xFF] ^ crc_table[6][w >> 8 & 0xFF] ^ crc_table[5][w >> 16 & 0xFF] ^
            crc_table[4][w >> 24 & 0xFF] ^ crc_table[3][w >> 32 & 0xFF] ^
            crc_table[2][w >> 40 & 0xFF] ^ crc_table[1][w >> 48 & 0xFF] ^ crc_table[0][w >> 56];
    }
    return c;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define FOLDED_WORDS 16 /* shorter ones are as fast by table */

/* Both halves of a lane carried on by some bytes: multiplied with what x to that power leaves when
 * it is divided by the polynomial of zlib. */
__attribute__((target("pclmul"))) static inline __m128i crc_carry(__m128i lane, __m128i factors)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(lane, factors, 0x00),
                         _mm_clmulepi64_si128(lane, factors, 0x11));
}

/* The same register without the tables, which after other work are in no cache: four lanes are
 * folded 64 bytes at a time, then into one, which has the checksum of all before it. */
__attribute__((target("pclmul"))) static uint32_t crc_by_folding(const int64_t *words,
                                                                 Py_ssize_t count, uint32_t c)
{
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i *block = (const __m128i *)words;
    const Py_ssize_t blocks = count / 8 * 4;
    __m128i lanes[4], whole;
    int64_t rest[2];
    for (int i = 0; i < 4; i++)
        lanes[i] = _mm_loadu_si128(block + i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)c));
    for (Py_ssize_t at = 4; at < blocks; at += 4)
        for (int i = 0; i < 4; i++)
            lanes[i] = _mm_xor_si128(crc_carry(lanes[i], by_64), _mm_loadu_si128(block + at + i));
    whole = lanes[0];
    for (int i = 1; i < 4; i++)
        whole = _mm_xor_si128(crc_carry(whole, by_16), lanes[i]);
    _mm_storeu_si128((__m128i *)rest, whole);
    c = crc_by_table(rest, 2, 0);
    return crc_by_table(words + blocks * 2, count - blocks * 2, c);
}

static int crc_folds;
#define CRC_CHOOSE() (crc_folds = __builtin_cpu_supports("pclmul") != 0)
#else
#define FOLDED_WORDS PY_SSIZE_T_MAX
#define crc_folds 0
#define crc_by_folding crc_by_table
#define CRC_CHOOSE() ((void)0)
#endif

/* zlib.crc32 of `count` int64, starting from the checksum of what came before. */
static uint32_t crc_words(const int64_t *words, Py_ssize_t count, uint32_t start)
{
    if (crc_folds && count >= FOLDED_WORDS)
        return ~crc_by_folding(words, count, ~start);
    return ~crc_by_table(words, count, ~start);
}

static PyObject *none_or_raise(void)
{
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Forget what our own code raised; what is no Exception (KeyboardInterrupt, SystemExit of a signal
 * handler) is the server's and stays set. 1 if nothing is set any more. */
static int forgive(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return 0;
    PyErr_Clear();
    return 1;
}

/* ---- numbers ----------------------------------------------------------------------------- */

/* An int64 of an int; no code of the object runs. -1 with an exception set. */
static int64_t int64_of(PyObject *value)
{
    int overflow = 0;
    long long number;
    if (!PyLong_Check(value)) {
        PyErr_Format(PyExc_TypeError, "required argument is not an integer: %.80s",
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) {
        PyErr_SetString(PyExc_TypeError, "a number is no int64");
        return -1;
    }
    return number;
}

static int is_sequence(PyObject *value)
{
    if (PyList_Check(value) || PyTuple_Check(value))
        return 1;
    PyErr_SetString(PyExc_TypeError, "numbers come as a list or a tuple");
    return 0;
}

/* Copy the ints of a list or tuple; their number, or -1 with an exception set. */
static Py_ssize_t copy_numbers(PyObject *sequence, int64_t *into)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    PyObject **items = PySequence_Fast_ITEMS(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = int64_of(items[i]);
        if (into[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return count;
}

static PyObject *list_of(const int64_t *numbers, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}
