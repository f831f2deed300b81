/* The layout of a ring, its checksum, and Python integers as int64. Part of _native.c. */

/* ---- what ring_format.py and recording/absent.py say; native.py compares ------------------- */

#define VERSION 1 /* of what is offered to Python: a stale build is then not used */
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
#define FORWARD_KIND 0
#define ERROR_KIND 9
#define SNAPSHOT_KIND 10
#define RECORD_EVENT 1
#define RECORD_UPDATE 2
#define NONE_CODE (INT64_MIN)
#define NO_ATTRIBUTE_CODE (INT64_MIN + 1)
#define NOT_OBSERVED_CODE (INT64_MIN + 2)
#define SHORT_MIRROR 64

static PyObject *text_dict, *text_bad_event, *text_around_error, *text_set_phase, *text_abandon;
static PyObject *text_lose, *text_shape, *text_q, *text_indices, *text_num_splits;
static PyObject *text_cache_seqlens, *text_worker, *text_number, *text_draft_step, *text_is_cpu, *text_tolist;

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
            crc_table[t][i] =
                crc_table[0][crc_table[t - 1][i] & 0xFF] ^ (crc_table[t - 1][i] >> 8);
}

/* Of `count` int64, as they lie in a little-endian file. */
static uint32_t crc_words(const int64_t *words, Py_ssize_t count, uint32_t start)
{
    uint32_t c = ~start;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t w = (uint64_t)words[i] ^ c;
        c = crc_table[7][w & 0xFF] ^ crc_table[6][w >> 8 & 0xFF] ^ crc_table[5][w >> 16 & 0xFF] ^
            crc_table[4][w >> 24 & 0xFF] ^ crc_table[3][w >> 32 & 0xFF] ^
            crc_table[2][w >> 40 & 0xFF] ^ crc_table[1][w >> 48 & 0xFF] ^ crc_table[0][w >> 56];
    }
    return ~c;
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
