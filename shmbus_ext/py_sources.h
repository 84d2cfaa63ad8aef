/* Where the fields of trajectories lie: found and checked in one place, for all that reads them.
 *
 * Invariant: what find_sources has filled in is within the segment, and stays there for as long as
 * the trajectories are leased. */
#ifndef SHMBUS_PY_SOURCES_H
#define SHMBUS_PY_SOURCES_H

#include "pyapi.h"

enum { FIELD_TOKENS, FIELD_MASK, FIELD_LOGPROBS, FIELD_ADVANTAGES, FIELDS };

/* Where one trajectory's fields lie; NULL for a field that it does not have. */
struct source {
    TrajectoryObject *trajectory;
    const uint8_t *data[FIELDS];
    uint64_t length;
    uint8_t kinds[FIELDS];
};

/* Whether int32 borders can index so many tokens; false with an exception. */
bool batch_fits(uint64_t tokens);

/* One source a trajectory of the list; false with an exception that names what does not fit. */
bool find_sources(PyObject *items, PyObject *const *names, struct source *sources);

/* Elements of an array; 0 of anything else, which check_array refuses. */
uint64_t array_elements(PyObject *object);

/* Whether it is a contiguous array of one dimension, of a numpy type and so many elements: then
 * where its data is; false with an exception that names it. */
bool check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                 void *data);

#endif
