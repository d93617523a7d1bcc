/* Looks: what tensors look like, soon compared; see looks_of in graphreplay.looks. */

#include "native.h"

#include <stdlib.h>
#include <string.h>

#define FEW 64 /* objects that fit into a table on the stack */
#define SLOTS 256 /* 8 bits of a hash */

typedef struct {
    PyObject *type;
    uint64_t keys;
    int32_t dtype, device_type, device_index;
    int64_t dim;
    int64_t *sizes; /* and the strides behind them; memory of this object */
} Look;

typedef struct {
    PyObject_HEAD
    PyObject *check;  /* of torch's guards, called with some of the tensors, or None */
    PyObject *firsts; /* their positions, a tuple */
    Py_ssize_t count, kept; /* kept: how many of the looks have a type */
    Look *looks;
    PyObject **sorted; /* room for more than that */
} Looks;

/* What a tensor looks like, but for its type; its sizes and strides stay torch's. Returns 0, or 1 if it has no such. */
static int look_at(void *handle, Look *look, int64_t **strides)
{
    look->keys = keys_of(handle);
    return torch.get_dtype(handle, &look->dtype) || torch.get_device_type(handle, &look->device_type) ||
           torch.get_device_index(handle, &look->device_index) || torch.get_dim(handle, &look->dim) ||
           torch.get_sizes(handle, &look->sizes) || torch.get_strides(handle, strides);
}

static int keep(Looks *self, PyObject *tensor)
{
    Look *look = &self->looks[self->kept];
    int64_t *strides, *own;
    void *handle = handle_of(tensor);
    if (!handle)
        return -1;
    if (look_at(handle, look, &strides)) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor without sizes and strides");
        return -1;
    }
    size_t bytes = look->dim * sizeof(int64_t);
    own = PyMem_Malloc(2 * bytes + 1);
    if (own) {
        memcpy(own, look->sizes, bytes);
        memcpy(own + look->dim, strides, bytes);
    }
    look->sizes = own;
    if (!own) {
        PyErr_NoMemory();
        return -1;
    }
    look->type = Py_NewRef((PyObject *)Py_TYPE(tensor));
    self->kept++;
    return 0;
}

static int is_like(PyObject *tensor, const Look *kept)
{
    Look look;
    int64_t *strides;
    void *handle = (PyObject *)Py_TYPE(tensor) == kept->type ? handle_of(tensor) : NULL;
    if (!handle || keys_of(handle) != kept->keys || look_at(handle, &look, &strides))
        return 0;
    size_t bytes = kept->dim * sizeof(int64_t);
    return look.dtype == kept->dtype && look.device_type == kept->device_type &&
           look.device_index == kept->device_index && look.dim == kept->dim &&
           !memcmp(look.sizes, kept->sizes, bytes) && !memcmp(strides, kept->sizes + kept->dim, bytes);
}

static int by_address(const void *a, const void *b)
{
    uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
    return (x > y) - (x < y);
}

static int are_apart(Looks *self, PyObject *const *objects)
{
    if (self->count <= FEW) {
        PyObject *slots[SLOTS] = {0};
        for (Py_ssize_t i = 0; i < self->count; i++) {
            /* Fibonacci hashing: the high bits of a product with 2^64 over the golden ratio */
            size_t slot = (uint64_t)(uintptr_t)objects[i] * 0x9E3779B97F4A7C15u >> 56;
            for (; slots[slot]; slot = (slot + 1) % SLOTS)
                if (slots[slot] == objects[i])
                    return 0;
            slots[slot] = objects[i];
        }
        return 1;
    }
    memcpy(self->sorted, objects, self->count * sizeof *objects);
    qsort(self->sorted, self->count, sizeof *objects, by_address);
    for (Py_ssize_t i = 1; i < self->count; i++)
        if (self->sorted[i] == self->sorted[i - 1])
            return 0;
    return 1;
}

static PyObject *alike(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Looks *self = (Looks *)object;
    int same = count == self->count;
    for (Py_ssize_t i = 0; same && i < count; i++)
        same = is_like(args[i], &self->looks[i]);
    if (!same || !are_apart(self, args))
        return PyBool_FromLong(0); /* no Py_RETURN_FALSE, see sight.c */
    if (self->check == Py_None)
        return PyBool_FromLong(1);
    Py_ssize_t firsts = PyTuple_Size(self->firsts);
    PyObject *chosen = PyTuple_New(firsts), *answer = NULL;
    for (Py_ssize_t i = 0; chosen && i < firsts; i++) {
        Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GetItem(self->firsts, i));
        PyTuple_SetItem(chosen, i, Py_NewRef(args[position]));
    }
    if (chosen)
        answer = PyObject_Call(self->check, chosen, NULL);
    Py_XDECREF(chosen);
    return answer;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tensors, *firsts, *check;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &tensors, &PyTuple_Type, &firsts, &check))
        return NULL;
    Looks *self = (Looks *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->check = Py_NewRef(check);
    self->firsts = Py_NewRef(firsts);
    self->count = PyTuple_Size(tensors);
    self->looks = PyMem_Calloc(self->count + 1, sizeof(Look));
    if (self->count > FEW)
        self->sorted = PyMem_Calloc(self->count, sizeof(PyObject *));
    int failed = 0;
    if (!self->looks || (self->count > FEW && !self->sorted)) {
        PyErr_NoMemory();
        failed = 1;
    }
    for (Py_ssize_t i = 0; !failed && i < self->count; i++)
        failed = keep(self, PyTuple_GetItem(tensors, i));
    for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(firsts); i++) {
        Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GetItem(firsts, i));
        failed = position < 0 || position >= self->count;
        if (failed && !PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "no such tensor");
    }
    if (failed) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Looks *self = (Looks *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->check);
    for (Py_ssize_t i = 0; i < self->kept; i++)
        Py_VISIT(self->looks[i].type);
    return 0;
}

static void dealloc(PyObject *object)
{
    Looks *self = (Looks *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; i < self->kept; i++) {
        Py_DECREF(self->looks[i].type);
        PyMem_Free(self->looks[i].sizes);
    }
    PyMem_Free(self->looks);
    PyMem_Free(self->sorted);
    Py_XDECREF(self->check);
    Py_XDECREF(self->firsts);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"alike", (PyCFunction)(void (*)(void))alike, METH_FASTCALL,
     "alike(*tensors): whether as many look like those that this was made of, and no two are one object."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Looks(tensors, firsts, check): a tuple of tensors, positions of some, and what has to return True of those, "
                "or None."},
    {0, NULL},
};

PyType_Spec looks_spec = {
    "graphreplay_cuda._native.Looks", sizeof(Looks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
