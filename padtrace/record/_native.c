/* The hot classes of the recorder, compiled.
 *
 * Each class here does what the class of the same name does in ring_core.py, state_core.py and
 * snapshots.py; those say what and why, and the tests run both. Everything runs under the GIL (a
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

#include "native_c/numbers.h"
#include "native_c/ring.h"
#include "native_c/state.h"
#include "native_c/looker.h"
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
    PyObject *layout = Py_BuildValue(
        "(iiiiiiiiiiiiiiiiLLL)", VERSION, SLOT_BYTES, HEAD_BYTES, COUNTERS_OFFSET, HOOKS_OFFSET, STATIC_OFFSET,
        MAX_HOOKS, MAX_CHAIN, MAX_SCALARS, EVENTS, UPDATES, REFUSED, FORWARDS, FORWARD_KIND,
        ERROR_KIND, SNAPSHOT_KIND, (long long)NONE_CODE, (long long)NO_ATTRIBUTE_CODE,
        (long long)NOT_OBSERVED_CODE);
    int done = layout == NULL ? -1 : PyModule_AddObject(module, "LAYOUT", layout);
    if (done < 0)
        Py_XDECREF(layout);
    return done;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module;
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "rings are little-endian");
        return NULL;
    }
    crc_fill();
    if (!intern(&text_dict, "__dict__") || !intern(&text_bad_event, "_bad_event") ||
        !intern(&text_around_error, "_around_error") || !intern(&text_set_phase, "_set_phase") ||
        !intern(&text_abandon, "_abandon") || !intern(&text_worker, "worker") ||
        !intern(&text_number, "number") || !intern(&text_draft_step, "draft_step") ||
        !intern(&text_is_cpu, "is_cpu") || !intern(&text_tolist, "tolist") ||
        !intern(&text_lose, "lose") || !intern(&text_shape, "shape") || !intern(&text_q, "q") ||
        !intern(&text_indices, "indices") || !intern(&text_num_splits, "num_splits") ||
        !intern(&text_cache_seqlens, "cache_seqlens"))
        return NULL;
    module = PyModule_Create(&module_definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddType(module, &SnapshotType) < 0 || PyModule_AddType(module, &RingCoreType) < 0 ||
        PyModule_AddType(module, &FrameType) < 0 || PyModule_AddType(module, &StateCoreType) < 0 ||
        PyModule_AddType(module, &LookerType) < 0 || PyModule_AddType(module, &HookCoreType) < 0 ||
        PyModule_AddType(module, &CallType) < 0 || PyModule_AddType(module, &RepeatsType) < 0 || add_layout(module) < 0 ||
        PyModule_AddIntMacro(module, ROWS) < 0 || PyModule_AddIntMacro(module, INTEGER) < 0 ||
        PyModule_AddIntMacro(module, NAME) < 0 || PyModule_AddIntMacro(module, ANY) < 0 ||
        PyModule_AddIntMacro(module, VECTOR) < 0 || PyModule_AddIntMacro(module, COUNTED) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
