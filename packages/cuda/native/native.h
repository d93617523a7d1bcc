/* The part of a replay that is asked of every tensor, in C. It needs no header of torch, CUDA or one Python version. */

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

/* Where the bytes of a tensor begin, 0 if it has none. Returns -1 with an exception set if it is no tensor. */
int address_of(PyObject *tensor, uint64_t *address);

/* An item of a list or tuple, borrowed. */
PyObject *item_of(PyObject *sequence, Py_ssize_t position);

/* Adds a type to the module. */
int add_sight(PyObject *module);
int add_loader(PyObject *module);

/* Has sights be told of changed dicts by CPython's watchers, from Python 3.12 on; see sight.c. */
typedef int (*watch_t)(int watcher, PyObject *dict);
typedef int (*on_change_t)(int event, PyObject *dict, PyObject *key, PyObject *value);
typedef int (*add_watcher_t)(on_change_t on_change);
int watch_by(add_watcher_t add_watcher, watch_t watch, watch_t unwatch);
