/* Sight: what tensors, dicts and objects are like, soon compared; see sight_of in graphreplay.looks.
 *
 * Dicts that change are told of from Python 3.12 on; Python 3.11 has a number in each dict that changes with it. All of
 * it happens with the interpreter's lock held. */

#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *look_alike; /* called with the tensors */
    PyObject *tensors, *dicts, *objects; /* tuples */
    Py_ssize_t n_tensors, n_dicts, n_objects;
    Py_ssize_t n_watched, n_classes; /* how many of them are watched, or kept, by now */
    uint64_t *addresses;
    PyObject **classes; /* of the objects */
    uint64_t *versions; /* of the dicts, where they are not watched */
    int touched;
} Sight;

static Py_ssize_t version_offset; /* of ma_version_tag in PyDictObject */

void read_versions_at(Py_ssize_t offset)
{
    version_offset = offset;
}

static uint64_t version_of(PyObject *dict)
{
    return *(uint64_t *)((char *)dict + version_offset);
}

/* Notes what all of it is like. Watching comes first, so that no change is missed. */
static int note(Sight *self)
{
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
        PyObject *dict = PyTuple_GetItem(self->dicts, i);
        if (!PyDict_Check(dict)) {
            PyErr_SetString(PyExc_TypeError, "not a dict");
            return -1;
        }
        if (!dicts_are_watched())
            self->versions[i] = version_of(dict);
        else if (watch_dict(dict, &self->touched))
            return -1;
        else
            self->n_watched++;
    }
    for (; self->n_classes < self->n_objects; self->n_classes++)
        self->classes[self->n_classes] =
            Py_NewRef((PyObject *)Py_TYPE(PyTuple_GetItem(self->objects, self->n_classes)));
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
    Py_ssize_t words = self->n_tensors + self->n_objects + self->n_dicts;
    self->addresses = PyMem_Calloc(words + 1, sizeof(uint64_t));
    if (!self->addresses) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->classes = (PyObject **)(self->addresses + self->n_tensors);
    self->versions = (uint64_t *)(self->classes + self->n_objects);
    if (note(self)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int is_as_noted(Sight *self)
{
    if (self->touched)
        return 0;
    for (Py_ssize_t i = 0; i < self->n_dicts && !dicts_are_watched(); i++)
        if (version_of(PyTuple_GetItem(self->dicts, i)) != self->versions[i])
            return 0;
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        if ((PyObject *)Py_TYPE(PyTuple_GetItem(self->objects, i)) != self->classes[i])
            return 0;
    for (Py_ssize_t i = 0; i < self->n_tensors; i++) {
        uint64_t address;
        if (address_of(PyTuple_GetItem(self->tensors, i), &address)) {
            PyErr_Clear(); /* it had one */
            return 0;
        }
        if (address != self->addresses[i])
            return 0;
    }
    return 1;
}

static PyObject *lasts(PyObject *object, PyObject *nothing)
{
    Sight *self = (Sight *)object;
    /* No Py_RETURN_FALSE: as built for 3.11 it counts a reference to what 3.12 takes for immortal. */
    return is_as_noted(self) ? PyObject_Call(self->look_alike, self->tensors, NULL) : PyBool_FromLong(0);
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Sight *self = (Sight *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->look_alike);
    Py_VISIT(self->tensors);
    Py_VISIT(self->dicts);
    Py_VISIT(self->objects);
    for (Py_ssize_t i = 0; i < self->n_classes; i++)
        Py_VISIT(self->classes[i]);
    return 0;
}

static void dealloc(PyObject *object)
{
    Sight *self = (Sight *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; i < self->n_watched; i++)
        unwatch_dict(PyTuple_GetItem(self->dicts, i), &self->touched);
    for (Py_ssize_t i = 0; i < self->n_classes; i++)
        Py_DECREF(self->classes[i]);
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

PyType_Spec sight_spec = {
    "graphreplay_cuda._native.Sight", sizeof(Sight), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
