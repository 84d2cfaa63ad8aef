/* Where the fields of trajectories lie: found and checked in one place, for all that reads them.
 *
 * Invariant: what py_find_sources has filled in is within the segment, and stays there for as long
 * as the trajectories are leased. */
#ifndef SHMBUS_PYTHON_FIELD_LOOKUP_H
#define SHMBUS_PYTHON_FIELD_LOOKUP_H

#include "python/record/trajectory.h"

enum { FIELD_TOKENS, FIELD_MASK, FIELD_LOGPROBS, FIELD_ADVANTAGES, FIELDS };

/* Where one trajectory's fields lie; NULL for a field that it does not have. */
struct source {
    TrajectoryObject *trajectory;
    const uint8_t *data[FIELDS];
    uint64_t length;
    uint8_t kinds[FIELDS];
};

/* Raises ValueError for a field of a trajectory; `got` is taken, NULL with its own exception. */
bool py_field_error(const TrajectoryObject *t, PyObject *name, const char *expected,
                    PyObject *got);

/* Whether int32 borders can index so many tokens; false with an exception. */
bool py_batch_fits(uint64_t tokens);

/* What was found out for the trajectory before; all zeros at first. */
struct lookup {
    const SchemaObject *schema;
    const HolderObject *holder;
    uint16_t shape_at[FIELDS]; /* NO_FIELD where the schema has none */
    uint8_t kinds[FIELDS];
    bool to_check; /* payload of these kinds may not do */
    uint32_t signature; /* which fields there are, and their kinds; 0xff for none, tokens first */
    /* Of all trajectories so far; a bit for each field. */
    uint8_t has, lacks;
    bool rows; /* whether one has row lengths, and so is several sequences */
    PyObject *field_names; /* NULL, or a list that gets the names of each schema, borrowed */
};
#define NO_FIELD UINT16_MAX

/* The slow ways of py_find_source: a trajectory of another holder or schema than the one before, or
 * none; kinds whose payload has to be checked; a field of another length than the tokens. Each is
 * false with an exception that names what does not fit. */
bool py_look_closer(struct lookup *lookup, PyObject *item, PyObject *const *names);
bool py_check_payload(const struct source *source, PyObject *const *names);
bool py_length_error(const struct source *source, uint64_t length, PyObject *name);

/* Where one trajectory's fields lie; false with an exception. What holds for one trajectory holds
 * for the next of the same holder and the same schema, so here is only what is left to do for each
 * of thousands. The caller keeps the item alive. */
static inline bool py_find_source(struct lookup *lookup, PyObject *item, PyObject *const *names,
                                  struct source *source) {
    TrajectoryObject *t = (TrajectoryObject *)item;
    if ((!Py_IS_TYPE(item, &TrajectoryType) || lookup->schema != t->schema ||
         lookup->holder != t->holder || t->released) &&
        !py_look_closer(lookup, item, names)) {
        return false;
    }
    const uint8_t *bytes = py_trajectory_bytes(t);
    source->trajectory = t;
    source->length = t->shape[lookup->shape_at[FIELD_TOKENS] + 1];
    for (int f = 0; f < FIELDS; f++) {
        source->kinds[f] = lookup->kinds[f];
        source->data[f] = NULL;
        if (lookup->shape_at[f] != NO_FIELD) {
            const uint64_t *shape = t->shape + lookup->shape_at[f];
            if (shape[1] != source->length) {
                return py_length_error(source, shape[1], names[f]);
            }
            source->data[f] = bytes + shape[0];
        }
    }
    return !lookup->to_check || py_check_payload(source, names);
}

/* As many sources as the list has trajectories; the lookup is new. */
bool py_find_sources(struct lookup *lookup, PyObject *items, PyObject *const *names,
                     struct source *sources);
void py_prefetch_trajectory(const PyObject *item);

bool py_field_lookup_add_functions(PyObject *module);

#endif
