/* Sight: what tensors, dicts and objects are like, soon compared; see sight_of in graphreplay.looks.
 *
 * Dicts that change are told of by CPython's watchers from Python 3.12 on; Python 3.11 has a number in each dict that
 * changes with it. All of it happens with the interpreter's lock held. */

#include "native.h"

#include <stdlib.h>

#define VERSION_OFFSET 24 /* of ma_version_tag in PyDictObject of Python 3.11 */

typedef struct Sight {
    PyObject_HEAD
    PyObject *look_alike; /* the check of torch's guards */
    PyObject *tensors, *objects, *dicts; /* tuples */
    Py_ssize_t n_tensors, n_objects, n_dicts;
    uint64_t *addresses;
    PyTypeObject **classes;
    PyObject **watched; /* the dicts, by address */
    uint64_t *versions; /* of the dicts, where there are no watchers */
    int touched;
    struct Sight *next, *previous;
} Sight;

static int watcher = -1;
static watch_t watch, unwatch;
static Sight *sights; /* those whose dicts are watched */

static int by_address(const void *a, const void *b)
{
    uintptr_t x = *(uintptr_t *)a, y = *(uintptr_t *)b;
    return (x > y) - (x < y);
}

static int has(Sight *sight, PyObject *dict)
{
    return bsearch(&dict, sight->watched, sight->n_dicts, sizeof dict, by_address) != NULL;
}

/* Called by CPython as a watched dict is about to change. */
static int on_change(int event, PyObject *dict, PyObject *key, PyObject *value)
{
    for (Sight *sight = sights; sight; sight = sight->next)
        if (!sight->touched && has(sight, dict))
            sight->touched = 1;
    return 0;
}

int watch_by(add_watcher_t add_watcher, watch_t watch_function, watch_t unwatch_function)
{
    watch = watch_function;
    unwatch = unwatch_function;
    watcher = add_watcher(on_change);
    return watcher < 0 ? -1 : 0;
}

static uint64_t version_of(PyObject *dict)
{
    return *(uint64_t *)((char *)dict + VERSION_OFFSET);
}

/* Notes what all of it is like. Watching comes first, so that no change is missed. */
static int note(Sight *self)
{
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
        self->watched[i] = PyTuple_GetItem(self->dicts, i);
        if (!PyDict_Check(self->watched[i])) {
            PyErr_SetString(PyExc_TypeError, "not a dict");
            return -1;
        }
    }
    qsort(self->watched, self->n_dicts, sizeof *self->watched, by_address);
    if (watcher >= 0) {
        self->next = sights;
        if (sights)
            sights->previous = self;
        sights = self;
    }
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
        if (watcher < 0)
            self->versions[i] = version_of(self->watched[i]);
        else if (watch(watcher, self->watched[i]))
            return -1;
    }
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        self->classes[i] = Py_TYPE(PyTuple_GetItem(self->objects, i));
    for (Py_ssize_t i = 0; i < self->n_tensors; i++)
        if (address_of(PyTuple_GetItem(self->tensors, i), &self->addresses[i]))
            return -1;
    return 0;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *look_alike, *tensors, *dicts, *objects;
    if (!PyArg_ParseTuple(args, "OO!O!O!", &look_alike, &PyTuple_Type, &tensors, &PyTuple_Type, &dicts, &PyTuple_Type,
                          &objects))
        return NULL;
    Sight *self = (Sight *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->look_alike = Py_NewRef(look_alike);
    self->tensors = Py_NewRef(tensors);
    self->dicts = Py_NewRef(dicts);
    self->objects = Py_NewRef(objects);
    self->n_tensors = PyTuple_Size(tensors);
    self->n_dicts = PyTuple_Size(dicts);
    self->n_objects = PyTuple_Size(objects);
    /* One block: an answer reads it from end to end. */
    Py_ssize_t words = self->n_tensors + self->n_objects + 2 * self->n_dicts;
    self->addresses = PyMem_Calloc(words + 1, sizeof(uint64_t));
    if (!self->addresses) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->classes = (PyTypeObject **)(self->addresses + self->n_tensors);
    self->versions = (uint64_t *)(self->classes + self->n_objects);
    self->watched = (PyObject **)(self->versions + self->n_dicts);
    if (note(self)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *lasts(PyObject *object, PyObject *nothing)
{
    Sight *self = (Sight *)object;
    if (self->touched)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < self->n_dicts && watcher < 0; i++)
        if (version_of(self->watched[i]) != self->versions[i])
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        if (Py_TYPE(PyTuple_GetItem(self->objects, i)) != self->classes[i])
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < self->n_tensors; i++) {
        uint64_t address;
        if (address_of(PyTuple_GetItem(self->tensors, i), &address)) {
            PyErr_Clear(); /* it had one */
            Py_RETURN_FALSE;
        }
        if (address != self->addresses[i])
            Py_RETURN_FALSE;
    }
    return PyObject_Call(self->look_alike, self->tensors, NULL);
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Sight *self = (Sight *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->look_alike);
    Py_VISIT(self->tensors);
    Py_VISIT(self->dicts);
    Py_VISIT(self->objects);
    return 0;
}

static void dealloc(PyObject *object)
{
    Sight *self = (Sight *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (sights == self || self->previous) { /* in the list of those whose dicts are watched */
        if (self->next)
            self->next->previous = self->previous;
        if (self->previous)
            self->previous->next = self->next;
        else
            sights = self->next;
        for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
            Sight *other = sights;
            while (other && !has(other, self->watched[i]))
                other = other->next;
            if (!other)
                unwatch(watcher, self->watched[i]);
        }
    }
    PyMem_Free(self->addresses);
    Py_XDECREF(self->look_alike);
    Py_XDECREF(self->tensors);
    Py_XDECREF(self->dicts);
    Py_XDECREF(self->objects);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"lasts", lasts, METH_NOARGS, "Whether all of it is so still."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Sight(look_alike, tensors, dicts, objects): a function that is called with the tensors, and tuples."},
    {0, NULL},
};

static PyType_Spec spec = {
    "graphreplay_cuda._native.Sight", sizeof(Sight), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

int add_sight(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    return type ? PyModule_AddObject(module, "Sight", type) : -1;
}
