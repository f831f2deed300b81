/* The hot classes of the recorder, compiled.
 *
 * Each class here does what one of ring_core.py, state_core.py, snapshots.py, hooks.py or probes/
 * does; those say what and why, and the tests run both. Everything runs under the GIL (a
 * build without it does not use this file, see native.py), so a store into the ring is one step for
 * every other thread and for signal handlers. A look at a batch is not: what it converts may run
 * code of Python, so it holds what it still needs. No pointer into the mapping outlives its buffer.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "native_c/numbers.h"
#include "native_c/ahead.h"
#include "native_c/snapshot.h"
#include "native_c/ring.h"
#include "native_c/state.h"
#include "native_c/tensors.h"
#include "native_c/looker.h"
#include "native_c/looks.h"
#include "native_c/arguments.h"
#include "native_c/probe.h"
#include "native_c/batches.h"
#include "native_c/pads.h"
#include "native_c/plans.h"
#include "native_c/forwards.h"
#include "native_c/hooks.h"
#include "native_c/launches.h"
#include "native_c/calls.h"

/* ---- the module -------------------------------------------------------------------------- */

static PyObject *crc_of(PyObject *module, PyObject *args)
{
    Py_buffer view;
    unsigned int start;
    uint32_t crc;
    if (!PyArg_ParseTuple(args, "y*I", &view, &start))
        return NULL;
    if (view.len % 8 || (uintptr_t)view.buf % 8) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "the checksum is of whole words");
        return NULL;
    }
    crc = crc_words((const int64_t *)view.buf, view.len / 8, start);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef module_methods[] = {
    {"crc32", crc_of, METH_VARARGS, "zlib.crc32 of whole words, for the tests."},
    {"stand_in", stand_in, METH_O, "Run the Call that a function of Python calls in its place."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "padtrace.record._native",
    .m_doc = "The hot classes of the recorder, compiled; see padtrace.record.native.",
    .m_size = -1,
    .m_methods = module_methods,
};

static int intern(PyObject **into, const char *text)
{
    *into = PyUnicode_InternFromString(text);
    return *into != NULL;
}

static int add_layout(PyObject *module)
{
    const long long numbers[] = {
        VERSION,
        SLOT_BYTES,
        HEAD_BYTES,
        COUNTERS_OFFSET,
        HOOKS_OFFSET,
        STATIC_OFFSET,
        MAX_HOOKS,
        MAX_CHAIN,
        MAX_SCALARS,
        EVENTS,
        UPDATES,
        REFUSED,
        FORWARDS,
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
        EXIT_SEQ,
        FORWARD_CAN_RUN_GRAPH,
        FORWARD_FAILED,
        GRAPH_VERDICT,
        GRAPH_ARGUMENT,
        GRAPH_BUCKET,
        LAUNCH_COUNT,
        LAUNCH_FAILED,
        LAUNCH_SPLITS,
        PLANNED_ROWS,
        SPLITS_BEYOND_ROWS,
        NONE_CODE,
        NO_ATTRIBUTE_CODE,
        NOT_OBSERVED_CODE,
    };
    const Py_ssize_t count = sizeof(numbers) / sizeof(numbers[0]);
    PyObject *layout = PyTuple_New(count);
    int done = -1;
    for (Py_ssize_t i = 0; layout != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(layout);
        else
            PyTuple_SET_ITEM(layout, i, number);
    }
    if (layout != NULL)
        done = PyModule_AddObject(module, "LAYOUT", layout);
    if (done < 0)
        Py_XDECREF(layout);
    return done;
}

#define TEXT_INTERN(name, text) &&intern(&text_##name, text)

static PyTypeObject *const types[] = {
    &SnapshotType, &RingCoreType, &BatchRecordType, &FrameType, &StateCoreType, &LookerType,
    &SharedType,   &ProbeType,    &HookCoreType,    &CallType,  &LaunchType,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module;
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "rings are little-endian");
        return NULL;
    }
    crc_fill();
    CRC_CHOOSE();
    if (!(1 TEXTS(TEXT_INTERN)))
        return NULL;
    module = PyModule_Create(&module_definition);
    if (module == NULL)
        return NULL;
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (PyModule_AddType(module, types[i]) < 0)
            goto bad;
    if (add_layout(module) < 0 || PyModule_AddIntMacro(module, ROWS) < 0 ||
        PyModule_AddIntMacro(module, INTEGER) < 0 || PyModule_AddIntMacro(module, NAME) < 0 ||
        PyModule_AddIntMacro(module, ANY) < 0 || PyModule_AddIntMacro(module, VECTOR) < 0 ||
        PyModule_AddIntMacro(module, COUNTED) < 0)
        goto bad;
    return module;
bad:
    Py_DECREF(module);
    return NULL;
}
