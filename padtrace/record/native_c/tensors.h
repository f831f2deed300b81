/* Sizes and host values of tensors, without an object of Python for each. Part of _native.c.
 *
 * DLPack's exchange table, which torch has as `torch.Tensor.__dlpack_c_exchange_api__` since 2.10:
 * https://dmlc.github.io/dlpack/latest/. It describes a tensor without touching its device. Where
 * it is not there, and for tensors it has no words for, Python is asked. It knows no negated views
 * (`torch._neg_view`) and makes a copy-on-write tensor (`torch._lazy_clone`) an own one; no release
 * of SGLang uses either. */

#define EXCHANGE_MAJOR 1
#define DEVICE_CPU 1
#define CODE_INT 0

/* DLTensor */
typedef struct {
    void *data;
    int32_t device_type, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} TensorView;

/* DLPackExchangeAPI */
typedef struct ExchangeTable {
    uint32_t major, minor;
    struct ExchangeTable *older;
    void *allocate, *to_managed, *from_managed;
    int (*view)(void *tensor, TensorView *into);
    void *current_stream;
} ExchangeTable;

typedef int (*TensorViewer)(void *tensor, TensorView *into);

/* What tells the sizes of tensors of this class; NULL where nothing does. No exception is left. */
static TensorViewer viewer_of(PyObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    ExchangeTable *table = NULL;
    if (capsule != NULL && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* the table is a part of torch, which stays */
    PyErr_Clear();
    while (table != NULL && table->major != EXCHANGE_MAJOR)
        table = table->older;
    return table == NULL ? NULL : table->view;
}

#define MAX_SUMMED 65536

/* Largest and sum of the integers of a one-dimensional tensor on the host; 0 without an exception
 * where that is not what it is. */
static int summed(const TensorView *view, int64_t *largest, int64_t *sum)
{
    const int64_t count = view->dimensions == 1 ? view->shape[0] : 0;
    const int64_t step = view->dimensions == 1 && view->strides != NULL ? view->strides[0] : 1;
    const char *data = (const char *)view->data + view->byte_offset;
    if (view->device_type != DEVICE_CPU || view->code != CODE_INT || view->lanes != 1 ||
        (view->bits != 64 && view->bits != 32) || view->data == NULL || count <= 0 ||
        count > MAX_SUMMED)
        return 0;
    *largest = INT64_MIN;
    *sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t one = view->bits == 64 ? ((const int64_t *)data)[i * step]
                                             : ((const int32_t *)data)[i * step];
        *largest = one > *largest ? one : *largest;
        if (__builtin_add_overflow(*sum, one, sum))
            return 0;
    }
    return 1;
}
