/* Loader: sets the addresses that a graph's copy kernels work with in its next launch. */

#include "native.h"

typedef int (*set_params_t)(void *executable, void *node, const void *params);

typedef struct {
    PyObject_HEAD
    PyObject *table; /* owns the memory below, and the params; the graph owns executable and node */
    uint64_t *sizes, *sources, *targets;
    Py_ssize_t inputs, outputs;
    set_params_t set_params;
    void *executable, *node, *params;
} Loader;

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *table;
    unsigned long long sizes, sources, targets, set_params, executable, node, params;
    Py_ssize_t inputs, outputs;
    if (!PyArg_ParseTuple(args, "OKKKnnKKKK", &table, &sizes, &sources, &targets, &inputs, &outputs, &set_params,
                          &executable, &node, &params))
        return NULL;
    Loader *self = (Loader *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->table = Py_NewRef(table);
    self->sizes = (uint64_t *)(uintptr_t)sizes;
    self->sources = (uint64_t *)(uintptr_t)sources;
    self->targets = (uint64_t *)(uintptr_t)targets;
    self->inputs = inputs;
    self->outputs = outputs;
    self->set_params = (set_params_t)(uintptr_t)set_params;
    self->executable = (void *)(uintptr_t)executable;
    self->node = (void *)(uintptr_t)node;
    self->params = (void *)(uintptr_t)params;
    return (PyObject *)self;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((Loader *)self)->table);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *item_of(PyObject *sequence, Py_ssize_t position)
{
    return PyList_Check(sequence) ? PyList_GetItem(sequence, position) : PyTuple_GetItem(sequence, position);
}

/* Fills in the addresses of tensors; sizes, if given, are those that need memory. Returns 1 if one of them has none. */
static int fill(PyObject *tensors, Py_ssize_t count, uint64_t *addresses, const uint64_t *sizes)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = item_of(tensors, i);
        if (!tensor || address_of(tensor, &addresses[i]))
            return -1;
        if (!addresses[i] && sizes && sizes[i])
            return 1;
    }
    return 0;
}

static PyObject *load(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Loader *self = (Loader *)object;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "load takes inputs and outputs");
        return NULL;
    }
    for (int i = 0; i < 2; i++)
        if (!PyList_Check(args[i]) && !PyTuple_Check(args[i])) {
            PyErr_SetString(PyExc_TypeError, "load takes lists or tuples");
            return NULL;
        }
    Py_ssize_t inputs = PyObject_Size(args[0]), outputs = PyObject_Size(args[1]);
    if (inputs < 0 || outputs < 0)
        return NULL;
    if (inputs != self->inputs || (outputs && outputs != self->outputs)) {
        PyErr_Format(PyExc_ValueError, "%zd inputs and %zd outputs for %zd and %zd", inputs, outputs, self->inputs,
                     self->outputs);
        return NULL;
    }
    int starved = fill(args[0], inputs, self->sources, self->sizes);
    if (starved < 0)
        return NULL;
    if (starved)
        return PyLong_FromLong(-1);
    for (Py_ssize_t i = 0; i < self->outputs && !outputs; i++)
        self->targets[i] = 0;
    if (fill(args[1], outputs, self->targets, NULL))
        return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS /* as every call of the driver: it may wait for a thread that wants the interpreter */
    status = self->set_params(self->executable, self->node, self->params);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"load", (PyCFunction)(void (*)(void))load, METH_FASTCALL,
     "load(inputs, outputs): sets the table for these lists or tuples of tensors, outputs nowhere if empty. Returns the "
     "driver's status, 0 for success; or -1, with nothing told to it, though the table is half filled, if an input whose "
     "size is not 0 has no memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Loader(table, sizes, sources, targets, inputs, outputs, set_params, executable, node, params): table "
                "is kept; inputs and outputs are numbers of tensors, all others addresses."},
    {0, NULL},
};

PyType_Spec loader_spec = {"graphreplay_cuda._native.Loader", sizeof(Loader), 0, Py_TPFLAGS_DEFAULT, slots};
