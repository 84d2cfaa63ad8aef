/* Trajectory: one record as the consumer sees it. */
#ifndef SHMBUS_PYTHON_TRAJECTORY_H
#define SHMBUS_PYTHON_TRAJECTORY_H

#include "python/record/views.h"

#define INLINE_SHAPE_WORDS 8

/* What packing reads comes first, in as few cache lines as it takes. */
typedef struct {
    PyObject_HEAD
    HolderObject *holder;
    struct record_ref ref;
    SchemaObject *schema;
    PyObject *instance_id;
    double score;
    int64_t policy_version;
    uint64_t *shape;
    uint32_t meta_offset;
    uint32_t meta_bytes;
    bool held;     /* counts in its run's live */
    bool released; /* acknowledged or dropped */
    bool failed;   /* a report that its sample failed, not a sample */
    bool unscored; /* its producer gave no score; a reader may have set one since */
    uint16_t need;  /* samples that complete its group */
    uint16_t split; /* its number */
    uint32_t version_span;
    uint64_t inline_shape[INLINE_SHAPE_WORDS];
    PinObject *pin;
    PyObject *index;
    PyObject *group_size;
    PyObject *key;
    PyObject *meta;
    int64_t round;
    uint64_t sequence;
    uint64_t producer_id;
    uint64_t committed_ns;
    uint64_t payload_bytes;
    uint32_t leased; /* its state where an earlier collector had leased its group; or 0 */
} TrajectoryObject;
extern PyTypeObject TrajectoryType;
TrajectoryObject *py_trajectory_new(HolderObject *holder, const struct record_copy *copy,
                                    const struct record_ref *ref);
/* False with an exception once the space may belong to another record. */
bool py_trajectory_readable(const TrajectoryObject *self);
/* Whether its producer gave a score, or its reader has set one (score.h). */
static inline bool py_trajectory_has_score(const TrajectoryObject *self) {
    return !self->unscored || !isnan(self->score);
}
/* A read-only array of one field, of a trajectory that is readable. */
PyObject *py_trajectory_view(TrajectoryObject *self, int field);
static inline const uint8_t *py_trajectory_bytes(const TrajectoryObject *self) {
    return segment_extent(&self->holder->segment->c, self->ref.place.extent) +
           self->ref.place.offset;
}

#endif
