/* The module: what it needs to know of torch and of CPython, which native.py tells it once, and tries. */

#include "native.h"

#include <string.h>

Torch torch;
static Py_ssize_t tensor_offset; /* of the at::Tensor within its Python object */
static Py_ssize_t keys_offset;   /* of the dispatch keys within what an at::Tensor points to */
static PyTypeObject *tensor_base;

void *handle_of(PyObject *tensor)
{
    if (PyType_IsSubtype(Py_TYPE(tensor), tensor_base))
        return (char *)tensor + tensor_offset;
    PyErr_SetString(PyExc_TypeError, "not a tensor");
    return NULL;
}

uint64_t keys_of(void *handle)
{
    return *(uint64_t *)(*(char **)handle + keys_offset);
}

int address_of(PyObject *tensor, uint64_t *address)
{
    void *handle = handle_of(tensor), *data = NULL;
    int64_t bytes = 0;
    if (!handle)
        return -1;
    if (torch.get_data_ptr(handle, &data) || torch.get_storage_size(handle, &bytes)) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor whose memory has no address");
        return -1;
    }
    *address = bytes ? (uint64_t)(uintptr_t)data : 0; /* a view of freed memory points to its offset */
    return 0;
}

static PyObject *bind(PyObject *module, PyObject *args)
{
    PyObject *functions, *base;
    uintptr_t addresses[sizeof torch / sizeof(uintptr_t)];
    Py_ssize_t count = sizeof addresses / sizeof *addresses;
    if (!PyArg_ParseTuple(args, "O!nnO!", &PyTuple_Type, &functions, &tensor_offset, &keys_offset, &PyType_Type, &base))
        return NULL;
    if (PyTuple_Size(functions) != count)
        return PyErr_Format(PyExc_ValueError, "%zd functions, not %zd", PyTuple_Size(functions), count);
    for (Py_ssize_t i = 0; i < count; i++)
        addresses[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(functions, i));
    if (PyErr_Occurred())
        return NULL;
    memcpy(&torch, addresses, sizeof torch);
    tensor_base = (PyTypeObject *)Py_NewRef(base);
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

static PyObject *read_versions(PyObject *module, PyObject *offset)
{
    read_versions_at(PyLong_AsSsize_t(offset));
    return PyErr_Occurred() ? NULL : Py_BuildValue("");
}

static PyObject *address(PyObject *module, PyObject *tensor)
{
    uint64_t found;
    return address_of(tensor, &found) ? NULL : PyLong_FromUnsignedLongLong(found);
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(functions, tensor_offset, keys_offset, tensor_base): comes before all else. The functions are addresses."},
    {"watch", watch, METH_VARARGS,
     "watch(add_watcher, watch, unwatch): comes before the first Sight where this Python has watchers of dicts, by these "
     "addresses of functions."},
    {"read_versions", read_versions, METH_O,
     "read_versions(offset): comes in place of watch() where dicts have a version at an offset."},
    {"address", address, METH_O, "The address of a tensor's bytes, as data_ptr() gives it; 0 if its storage was freed."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "graphreplay_cuda._native", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyType_Spec *specs[] = {&looks_spec, &sight_spec, &loader_spec};
    PyObject *module = PyModule_Create(&definition);
    int failed = !module || PyModule_AddIntMacro(module, INTERFACE);
    for (size_t i = 0; !failed && i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
        Py_XDECREF(type);
    }
    if (failed)
        Py_CLEAR(module);
    return module;
}
