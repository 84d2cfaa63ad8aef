/* Records for Python: schemas, trajectories and the views that they lend. */
#ifndef SHMBUS_PYTHON_RECORD_RECORD_H
#define SHMBUS_PYTHON_RECORD_RECORD_H

#include "python/binding.h"
#include "batch/convert.h"
#include "batch/element.h"
#include "python/segment/segment.h"
#include "ring/segment.h"
#include "ring/record.h"
#include "ring/writer.h"

/* ---- Schemas: which fields a record has, encoded once by a producer, parsed once by a consumer. */
/* Encoded schemas of what this process puts, by identity of names and dtypes. */
struct schema_cache_entry {
    uint32_t count;
    PyObject *names[SHMBUS_MAX_FIELDS];
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    PyObject *encoded; /* bytes */
};
#define SCHEMA_CACHE_ENTRIES 8
struct schema_cache {
    struct schema_cache_entry entries[SCHEMA_CACHE_ENTRIES];
    unsigned next;
};
void py_schema_cache_clear(struct schema_cache *cache);
/* A new reference to the bytes that spec.schema then points into: the entry may go any time. */
PyObject *py_schema_cache_find(struct schema_cache *cache, struct record_spec *spec,
                               PyObject *const *names, PyArray_Descr *const *dtypes,
                               const uint8_t *ndim);

/* The fields of a record: parsed once for all records that look alike. */
typedef struct schema_object {
    PyObject_HEAD
    PyObject *encoded;
    PyObject *names; /* tuple of str */
    uint32_t count;
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    uint16_t shape_at[SHMBUS_MAX_FIELDS]; /* word of the field's offset; its sizes follow */
    PyObject *dtype_names[SHMBUS_MAX_FIELDS];
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS]; /* resolved when first asked for */
    uint8_t kinds[SHMBUS_MAX_FIELDS];         /* enum element_kind */
} SchemaObject;
extern PyTypeObject SchemaType;
SchemaObject *py_schema_parse(const uint8_t *encoded, uint32_t bytes, uint32_t count);
/* -1 where there is no such field. */
int py_schema_find(const SchemaObject *self, PyObject *name);
/* The place of a name among the first of a tuple's, by identity and then by value; -1 for none. */
int py_find_name(PyObject *names, uint32_t count, PyObject *name);
/* The dtype that these bytes describe, of elements of so many bytes; NULL with an exception. */
PyArray_Descr *py_decode_dtype(PyObject *name, PyObject *encoded, uint32_t itemsize);
PyArray_Descr *py_schema_dtype(SchemaObject *self, int field);
/* Whether they are one dtype; those that stand in for what NumPy lacks are so by their names. */
bool py_same_dtype(PyArray_Descr *one, PyArray_Descr *other);
/* As people read it, so that what stands in for bfloat16 is called that; NULL with an exception. */
PyObject *py_dtype_text(PyArray_Descr *dtype);

/* ---- What trajectories are made by: a Reader, or the Borrower of a process that a daemon serves. */
/* Groups arrive together: a small table keyed by checksum finds the string of the one before. */
#define ID_TABLE 4096u

struct holder_kind;
#define HOLDER_HEAD                                                                              \
    PyObject_HEAD SegmentObject *segment;                                                        \
    const struct holder_kind *kind;                                                              \
    PyObject **ids;    /* recently read instance ids, so that a group shares one string */       \
    PyObject *schemas; /* bytes -> Schema */                                                     \
    struct schema_object *last_schema;                                                           \
    uint64_t orphans; /* records read and neither released nor in anybody's hands */             \
    bool packs; /* has packed a batch of what it read */                                         \
    bool attached;

typedef struct {
    HOLDER_HEAD
} HolderObject;

/* How either keeps a record's space, beyond what a trajectory holds from its birth. */
struct holder_kind {
    bool counts; /* a trajectory holds its record's space from its birth */
    /* All of them, or false with an exception. */
    bool (*hold)(HolderObject *self, const struct record_ref *refs, Py_ssize_t count);
    void (*let_go)(HolderObject *self, const struct record_ref *refs, Py_ssize_t count);
    /* A ClientLease whose group died on its way to the caller; NULL where there are none. */
    void (*take_back)(HolderObject *self, PyObject *lease);
};
bool py_holder_init(HolderObject *self, SegmentObject *segment, const struct holder_kind *kind);
void py_holder_clear(HolderObject *self);
/* Notes in the segment that batches are packed, where it may write there. */
void py_holder_note_packing(HolderObject *self);

/* ---- What stands behind arrays of the ring: a Keeper where they are written, a Pin where read. */
/* The exporter behind the writable views of one reservation. */
typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    struct reservation at;
    struct view view;
    bool pinned; /* kept out of everybody's way until the last view is gone */
} KeeperObject;
extern PyTypeObject KeeperType;
KeeperObject *py_keeper_new(SegmentObject *segment, const struct reservation *at);

/* What holds a record's space while arrays look at it. */
typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    HolderObject *holder; /* NULL once that is closed */
    struct view view;
} PinObject;
extern PyTypeObject PinType;
/* Where a trajectory holds its space from its birth, the pin takes that over. */
PinObject *py_pin_new(HolderObject *holder, const struct record_ref *ref);

/* ---- Trajectory: one record as the consumer sees it. */
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
/* ValueError: its record is not what it was when it was read. */
void py_trajectory_raise_changed(const TrajectoryObject *t);
/* Whether its producer gave a score, or its reader has set one. */
static inline bool py_trajectory_has_score(const TrajectoryObject *self) {
    return !self->unscored || !isnan(self->score);
}
static inline const uint8_t *py_trajectory_bytes(const TrajectoryObject *self) {
    return segment_extent(&self->holder->segment->c, self->ref.place.extent) +
           self->ref.place.offset;
}

/* ---- A declared schema, as what is put is checked against it. */
/* What numbers are stored as in arrays of a dtype. */
enum stored_kind py_stored_kind(PyArray_Descr *dtype);

typedef struct {
    PyObject_HEAD
    PyObject *encoded; /* bytes: what `parsed` points into */
    PyObject *names;   /* tuple of str, interned */
    PyObject *dimension_names; /* tuple of str */
    uint64_t required;         /* a bit a field */
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint8_t kinds[SHMBUS_MAX_FIELDS]; /* enum stored_kind */
    uint64_t any_shape;               /* a bit a field */
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    int64_t *dimensions[SHMBUS_MAX_FIELDS]; /* as parsed, in `room` */
    int64_t *room;
    struct declared_fields parsed;
} DeclaredSchemaObject;
extern PyTypeObject DeclaredSchemaType;

/* For a name that is not at its own place: its field, -1 with an exception. */
int py_declared_find(const DeclaredSchemaObject *self, PyObject *name);
bool py_declared_refuse_missing(const DeclaredSchemaObject *self, uint64_t missing);

/* In place of a declared field: the row lengths, which every schema has room for. */
#define DECLARED_BY_THE_CORE 0xff
_Static_assert(SHMBUS_MAX_FIELDS <= DECLARED_BY_THE_CORE, "it is no field's number");

/* Which declared field each name is; false with an exception for one unknown or missing. */
static inline bool py_declared_match(const DeclaredSchemaObject *self, PyObject *const *names,
                                     uint32_t count, uint8_t *fields) {
    uint64_t given = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* Mostly in the order of the declaration. */
        bool in_place = i < self->parsed.count && PyTuple_GET_ITEM(self->names, i) == names[i];
        int field = in_place ? (int)i : py_declared_find(self, names[i]);
        if (field < 0) {
            return false;
        }
        fields[i] = (uint8_t)field;
        given |= field == DECLARED_BY_THE_CORE ? 0 : UINT64_C(1) << field;
    }
    uint64_t missing = self->required & ~given;
    return missing == 0 || py_declared_refuse_missing(self, missing);
}

/* The sizes that names of dimensions have in one record. */
struct declared_bindings {
    uint64_t bound; /* a bit a name */
    uint64_t sizes[SHMBUS_MAX_DIMENSION_NAMES];
    uint8_t fields[SHMBUS_MAX_DIMENSION_NAMES]; /* that said so */
};
bool py_declared_refuse_shape(const DeclaredSchemaObject *self,
                              const struct declared_bindings *bindings, uint32_t field, int ndim,
                              const uint64_t *sizes);
/* Whether a field may have these sizes beside those before it; false with an exception. */
static inline bool py_declared_fits(const DeclaredSchemaObject *self,
                                    struct declared_bindings *bindings, uint32_t field, int ndim,
                                    const uint64_t *sizes) {
    if (self->any_shape >> field & 1) {
        return true;
    }
    bool fits = ndim == self->ndim[field];
    for (int d = 0; fits && d < ndim; d++) {
        int64_t wanted = self->dimensions[field][d];
        if (wanted >= 0) {
            fits = sizes[d] == (uint64_t)wanted;
        } else if (wanted <= SHMBUS_DIMENSION_NAMED) {
            int64_t name = SHMBUS_DIMENSION_NAMED - wanted;
            if (bindings->bound >> name & 1) {
                fits = sizes[d] == bindings->sizes[name];
            } else {
                bindings->bound |= UINT64_C(1) << name;
                bindings->sizes[name] = sizes[d];
                bindings->fields[name] = (uint8_t)field;
            }
        }
    }
    return fits || py_declared_refuse_shape(self, bindings, field, ndim, sizes);
}
/* The sizes of an empty list, of which its first is known: of the others what is declared. */
int py_declared_complete(const DeclaredSchemaObject *self, uint32_t field, int ndim,
                         uint64_t sizes[SHMBUS_MAX_NDIM]);

/* The key of a group; NULL with an exception. */
PyObject *py_make_key(PyObject *instance_id, int64_t round, uint32_t split);

/* ---- OriginHead: what a relay knows of a record that lies elsewhere, and heads as bytes. */
typedef struct {
    PyObject_HEAD
    PyObject *origin; /* bytes, as ring/segment.h has them */
    PyObject *instance_id;
    PyObject *key;
    PyObject *reason; /* why its sample failed: str; None of a sample */
    int64_t round;
    int64_t policy_version;
    int64_t made_ns;
    int64_t clock_ns;
    uint64_t nbytes;
    double score;
    uint32_t check;
    uint16_t group_size, need, index, split;
} OriginHeadObject;
extern PyTypeObject OriginHeadType;

/* ---- The score of a trajectory: what its producer gave, or, where that left it open, what its reader sets.
 *
 * Invariant: what is set is of one object in one process. The record keeps what its producer said,
 * so whoever reads it after a death scores it anew. */
/* False with an exception for a sample that was put without a score, and has none since. */
bool py_trajectory_require_score(const TrajectoryObject *self);

/* What module.c adds. */
extern PyMethodDef py_declared_functions[];
extern PyMethodDef py_export_functions[];
extern const struct named_value py_export_constants[];
extern PyMethodDef py_origin_head_functions[];

#endif
