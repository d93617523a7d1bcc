/* Which dicts are watched, and for whom. CPython tells of each change to one, from Python 3.12 on. */

#include "native.h"

#include <search.h>
#include <stdlib.h>

typedef struct {
    PyObject *dict; /* kept by those who watch it */
    Py_ssize_t count, room;
    int **touched; /* what to set once it changes */
} Watched;

static int watcher = -1;
static watch_t watch, unwatch;
static void *all; /* a tree by the address of the dict */

static int by_dict(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)((const Watched *)a)->dict, y = (uintptr_t)((const Watched *)b)->dict;
    return (x > y) - (x < y);
}

static Watched *find(PyObject *dict)
{
    Watched key = {.dict = dict};
    Watched **found = tfind(&key, &all, by_dict);
    return found ? *found : NULL;
}

/* Called as a watched dict is about to change. */
static int on_change(int event, PyObject *dict, PyObject *key, PyObject *value)
{
    Watched *watched = find(dict);
    for (Py_ssize_t i = 0; watched && i < watched->count; i++)
        *watched->touched[i] = 1;
    return 0;
}

int watch_by(add_watcher_t add_watcher, watch_t watch_function, watch_t unwatch_function)
{
    watch = watch_function;
    unwatch = unwatch_function;
    if (watcher < 0)
        watcher = add_watcher(on_change);
    return watcher < 0 ? -1 : 0;
}

int dicts_are_watched(void)
{
    return watcher >= 0;
}

static void drop(Watched *watched)
{
    tdelete(watched, &all, by_dict);
    free(watched->touched);
    free(watched);
}

int watch_dict(PyObject *dict, int *touched)
{
    Watched *watched = find(dict);
    if (!watched) {
        watched = calloc(1, sizeof *watched);
        if (watched) {
            watched->dict = dict;
            if (!tsearch(watched, &all, by_dict)) {
                free(watched);
                watched = NULL;
            }
        }
    }
    if (watched && watched->count == watched->room) {
        Py_ssize_t room = watched->room ? 2 * watched->room : 1;
        int **grown = realloc(watched->touched, room * sizeof *grown);
        if (grown) {
            watched->touched = grown;
            watched->room = room;
        } else {
            if (!watched->count)
                drop(watched);
            watched = NULL;
        }
    }
    if (!watched) {
        PyErr_NoMemory();
        return -1;
    }
    if (!watched->count && watch(watcher, dict)) {
        drop(watched);
        return -1;
    }
    watched->touched[watched->count++] = touched;
    return 0;
}

void unwatch_dict(PyObject *dict, int *touched)
{
    Watched *watched = find(dict);
    Py_ssize_t i = 0;
    while (watched && i < watched->count && watched->touched[i] != touched)
        i++;
    if (!watched || i == watched->count)
        return;
    watched->touched[i] = watched->touched[--watched->count];
    if (!watched->count) {
        if (unwatch(watcher, dict))
            PyErr_Clear(); /* then it tells of changes that nobody asks for */
        drop(watched);
    }
}
