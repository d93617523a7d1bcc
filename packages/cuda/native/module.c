/* The module: what it needs to know of torch and of CPython, which native.py tells it once, and has tried before. */

#include "native.h"

/* Of AOTInductor's C interface, which torch keeps stable: a handle is the address of an at::Tensor. */
typedef int32_t (*get_data_ptr_t)(void *tensor, void **data);
typedef int32_t (*get_storage_size_t)(void *tensor, int64_t *bytes);

static get_data_ptr_t get_data_ptr;
static get_storage_size_t get_storage_size;
static Py_ssize_t tensor_offset; /* of the at::Tensor within its Python object */
static PyTypeObject *tensor_base;

int address_of(PyObject *tensor, uint64_t *address)
{
    void *handle = (char *)tensor + tensor_offset, *data = NULL;
    int64_t bytes = 0;
    if (!PyType_IsSubtype(Py_TYPE(tensor), tensor_base)) {
        PyErr_SetString(PyExc_TypeError, "not a tensor");
        return -1;
    }
    if (get_data_ptr(handle, &data) || get_storage_size(handle, &bytes)) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor whose memory has no address");
        return -1;
    }
    *address = bytes ? (uint64_t)(uintptr_t)data : 0; /* a view of freed memory points to its offset */
    return 0;
}

PyObject *item_of(PyObject *sequence, Py_ssize_t position)
{
    return PyList_Check(sequence) ? PyList_GetItem(sequence, position) : PyTuple_GetItem(sequence, position);
}

static PyObject *bind(PyObject *module, PyObject *args)
{
    unsigned long long data_ptr, storage_size;
    PyObject *base;
    if (!PyArg_ParseTuple(args, "KKnO!", &data_ptr, &storage_size, &tensor_offset, &PyType_Type, &base))
        return NULL;
    get_data_ptr = (get_data_ptr_t)(uintptr_t)data_ptr;
    get_storage_size = (get_storage_size_t)(uintptr_t)storage_size;
    Py_INCREF(base);
    tensor_base = (PyTypeObject *)base;
    return Py_BuildValue("");
}

static PyObject *watch(PyObject *module, PyObject *args)
{
    unsigned long long add_watcher, watch, unwatch;
    if (!PyArg_ParseTuple(args, "KKK", &add_watcher, &watch, &unwatch))
        return NULL;
    if (watch_by((add_watcher_t)(uintptr_t)add_watcher, (watch_t)(uintptr_t)watch, (watch_t)(uintptr_t)unwatch))
        return NULL;
    return Py_BuildValue("");
}

static PyObject *address(PyObject *module, PyObject *tensor)
{
    uint64_t found;
    return address_of(tensor, &found) ? NULL : PyLong_FromUnsignedLongLong(found);
}

static PyObject *word(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "On", &object, &offset))
        return NULL;
    return PyLong_FromUnsignedLongLong(*(uint64_t *)((char *)object + offset));
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(get_data_ptr, get_storage_size, tensor_offset, tensor_base): comes before all else; functions are addresses."},
    {"watch", watch, METH_VARARGS,
     "watch(add_watcher, watch, unwatch): comes before the first Sight where this Python has watchers of dicts, by these "
     "addresses of functions."},
    {"address", address, METH_O, "The address of a tensor's bytes, as data_ptr() gives it; 0 if its storage was freed."},
    {"word", word, METH_VARARGS, "word(object, offset): the eight bytes of an object at an offset within it."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "graphreplay_cuda._native", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && (add_sight(module) || add_loader(module) || PyModule_AddIntMacro(module, INTERFACE))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
