/* The part of a replay that is asked of every tensor, in C. It needs no header of torch, CUDA or one Python version. */

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

/* Goes up, here and in native.py, with each change of what this part takes, or does: an older build may lie about. */
#define INTERFACE 5

/* Functions of AOTInductor's C interface, which torch keeps stable, in the order in which native.py names them. A handle
 * is the address of an at::Tensor; 0 means success. */
typedef struct {
    int32_t (*get_data_ptr)(void *handle, void **data);
    int32_t (*get_storage_size)(void *handle, int64_t *bytes);
    int32_t (*get_dtype)(void *handle, int32_t *dtype);
    int32_t (*get_device_type)(void *handle, int32_t *type);
    int32_t (*get_device_index)(void *handle, int32_t *index);
    int32_t (*get_dim)(void *handle, int64_t *dim);
    int32_t (*get_sizes)(void *handle, int64_t **sizes);
    int32_t (*get_strides)(void *handle, int64_t **strides);
} Torch;

extern Torch torch;

/* The handle of a tensor, or NULL with an exception set if it is none. */
void *handle_of(PyObject *tensor);

/* The bits by which operators choose their kernels for a tensor: its backend, layout, lazy bits, whether it was made under
 * inference mode, and the like. */
uint64_t keys_of(void *handle);

/* Where the bytes of a tensor begin, 0 if it has none, or its storage was freed. Returns -1 with an exception set if it
 * is no tensor, or one without a storage, as sparse ones are. */
int address_of(PyObject *tensor, uint64_t *address);

/* The types of the module. */
extern PyType_Spec looks_spec, sight_spec, loader_spec;

/* Watching dicts, from Python 3.12 on; see watched.c. The first names the functions of CPython for it, and the others
 * set a flag once a dict changes, as long as that is watched. Those that return -1 have set an exception. */
typedef int (*watch_t)(int watcher, PyObject *dict);
typedef int (*on_change_t)(int event, PyObject *dict, PyObject *key, PyObject *value);
typedef int (*add_watcher_t)(on_change_t on_change);
int watch_by(add_watcher_t add_watcher, watch_t watch, watch_t unwatch);
int dicts_are_watched(void);
void read_versions_at(Py_ssize_t offset); /* on Python 3.11, whose dicts have a number that changes with them */
int watch_dict(PyObject *dict, int *touched);
void unwatch_dict(PyObject *dict, int *touched);
