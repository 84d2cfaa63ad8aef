/* Records for Python: schemas, trajectories and their views. */
#pragma once

#include "python/binding.h"
#include "batch/convert.h"
#include "batch/element.h"
#include "python/segment/segment.h"
#include "ring/segment.h"
#include "ring/record.h"
#include "ring/writer.h"

/* Limit of a score: the difference of two scores stays finite in float32. */
#define MAX_SCORE 1e38

/* ---- Schemas: the fields of a record, encoded once by a producer, parsed once by a consumer. */
/* Cache of encoded schemas of this process's puts, by identity of names and dtypes. */
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
/* Return a new reference to the bytes behind spec.schema: the cache may drop its entry at every
 * time. */
PyObject *py_schema_cache_find(struct schema_cache *cache, struct record_spec *spec,
                               PyObject *const *names, PyArray_Descr *const *dtypes,
                               const uint8_t *ndim);

/* The fields of a record: parsed once for records of equal layout. */
typedef struct schema_object {
    PyObject_HEAD
    PyObject *encoded;
    PyObject *names; /* tuple of str */
    uint32_t count;
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    uint16_t shape_at[SHMBUS_MAX_FIELDS]; /* word of the field's offset, followed by its sizes */
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS]; /* resolved at first use */
    uint8_t kinds[SHMBUS_MAX_FIELDS];         /* enum element_kind */
} SchemaObject;
extern PyTypeObject SchemaType;
SchemaObject *py_schema_parse(const uint8_t *encoded, uint32_t bytes, uint32_t count);
/* -1 for an unknown field. */
int py_schema_find(const SchemaObject *self, PyObject *name);
/* Index of a name among the first `count` of a tuple, by identity and then by value; -1 if
 * missing. */
int py_find_name(PyObject *names, uint32_t count, PyObject *name);
/* Decode a dtype and check its itemsize; NULL with an exception. */
PyArray_Descr *py_decode_dtype(PyObject *name, const void *text, uint32_t bytes,
                               uint32_t itemsize);
PyArray_Descr *py_schema_dtype(SchemaObject *self, int field);
/* True for equal dtypes; substitutes for types unknown to NumPy compare by name. */
bool py_same_dtype(PyArray_Descr *one, PyArray_Descr *other);
/* Readable name of a dtype, "bfloat16" for its substitute; NULL with an exception. */
PyObject *py_dtype_text(PyArray_Descr *dtype);

/* ---- The makers of trajectories: a Reader, or the Borrower of a process served by a daemon. */
/* Groups arrive together: a small table keyed by checksum finds the previous sample's string. */
#define ID_TABLE 4096u

struct holder_kind;
#define HOLDER_HEAD                                                                              \
    PyObject_HEAD SegmentObject *segment;                                                        \
    const struct holder_kind *kind;                                                              \
    PyObject **ids;    /* recently read instance ids, shared by a group */       \
    PyObject *schemas; /* bytes -> Schema */                                                     \
    struct schema_object *last_schema;                                                           \
    uint64_t orphans; /* records read but neither released nor held by an object */             \
    bool packs; /* packed a batch of its records before */                                         \
    bool attached;

typedef struct {
    HOLDER_HEAD
} HolderObject;

/* Keeping a record's space, beyond a trajectory's initial hold. */
struct holder_kind {
    bool counts; /* a trajectory holds its record's space from creation */
    /* Hold every record, or false with an exception. */
    bool (*hold)(HolderObject *self, const struct record_ref *refs, Py_ssize_t count);
    void (*let_go)(HolderObject *self, const struct record_ref *refs, Py_ssize_t count);
    /* Take back a ClientLease whose group died on its way to the caller; may be NULL. */
    void (*take_back)(HolderObject *self, PyObject *lease);
};
bool py_holder_init(HolderObject *self, SegmentObject *segment, const struct holder_kind *kind);
void py_holder_clear(HolderObject *self);
/* False with BusClosedError for a closed or inherited holder. */
bool py_holder_usable(HolderObject *self);
/* Announce packing in the segment, if writable. */
void py_holder_note_packing(HolderObject *self);

/* ---- Base objects of arrays in the ring: a Keeper for writable arrays, a Pin for read-only
 * arrays. */
/* The exporter behind the writable views of one reservation. */
typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    struct reservation at;
    struct view view;
    bool pinned; /* kept apart until the last view is gone */
} KeeperObject;
extern PyTypeObject KeeperType;
KeeperObject *py_keeper_new(SegmentObject *segment, const struct reservation *at);

/* Holds a record's space during the life of its arrays. */
typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    HolderObject *holder; /* NULL after the holder's close */
    struct view view;
} PinObject;
extern PyTypeObject PinType;
/* Takes over the space of a trajectory holding its space from creation. */
PinObject *py_pin_new(HolderObject *holder, const struct record_ref *ref);

/* ---- Trajectory: one record, on the consumer's side. */
#define INLINE_SHAPE_WORDS 8

/* The fields read by packing come first, in the fewest cache lines. */
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
    bool held;     /* counts among the live records of its run */
    bool released; /* acknowledged or dropped */
    bool failed;   /* a failure report instead of a sample */
    bool unscored; /* put without a score; a reader may have set one since */
    uint16_t need;  /* samples of a complete group */
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
    uint32_t leased; /* state of a lease by an earlier collector; or 0 */
} TrajectoryObject;
extern PyTypeObject TrajectoryType;
/* The item as a trajectory, borrowed; NULL with a TypeError. */
TrajectoryObject *py_as_trajectory(PyObject *item);
TrajectoryObject *py_trajectory_new(HolderObject *holder, const struct record_copy *copy,
                                    const struct record_ref *ref);
/* A tuple of sizes. */
PyObject *py_sizes(const uint64_t *sizes, int ndim);
/* An array over `data`, kept alive by `base`, which is not stolen; in new memory without `data`. */
PyObject *py_array_over(PyArray_Descr *dtype, int ndim, const uint64_t *sizes, void *data,
                        int flags, PyObject *base);
/* False with an exception once the space may belong to a newer record. */
bool py_trajectory_readable(const TrajectoryObject *self);
/* Raise ValueError: the record changed after reading. */
void py_trajectory_raise_changed(const TrajectoryObject *t);
/* True if the producer gave, or the reader set, a score. */
static inline bool py_trajectory_has_score(const TrajectoryObject *self) {
    return !self->unscored || !isnan(self->score);
}
static inline const uint8_t *py_trajectory_bytes(const TrajectoryObject *self) {
    return segment_extent(&self->holder->segment->c, self->ref.place.extent) +
           self->ref.place.offset;
}

/* ---- A declared schema, used to check every put. */
/* Storage kind of numbers in arrays of a dtype. */
enum stored_kind py_stored_kind(PyArray_Descr *dtype);

typedef struct {
    PyObject_HEAD
    PyObject *encoded; /* bytes behind `parsed` */
    PyObject *names;   /* tuple of str, interned */
    PyObject *dimension_names; /* tuple of str */
    uint64_t required;         /* a bit per field */
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint8_t kinds[SHMBUS_MAX_FIELDS]; /* enum stored_kind */
    struct declared_fields parsed;
} DeclaredSchemaObject;
extern PyTypeObject DeclaredSchemaType;

/* Find the field of a name out of order; -1 with an exception. */
int py_declared_find(const DeclaredSchemaObject *self, PyObject *name);
bool py_declared_refuse_missing(const DeclaredSchemaObject *self, uint64_t missing);

/* Marks the row lengths, accepted by every schema, in place of a declared field. */
#define DECLARED_BY_THE_CORE 0xff
_Static_assert(SHMBUS_MAX_FIELDS <= DECLARED_BY_THE_CORE, "it is no field's number");

/* Match names to declared fields; false with an exception for an unknown or missing field. */
static inline bool py_declared_match(const DeclaredSchemaObject *self, PyObject *const *names,
                                     uint32_t count, uint8_t *fields) {
    uint64_t given = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* Usually in the order of the declaration. */
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

/* Sizes bound to dimension names in one record. */
struct declared_bindings {
    uint64_t bound; /* a bit per name */
    uint64_t sizes[SHMBUS_MAX_DIMENSION_NAMES];
    uint8_t fields[SHMBUS_MAX_DIMENSION_NAMES]; /* the binding fields */
};
/* `at`: the refused dimension; -1 for a wrong number of dimensions. */
bool py_declared_refuse_shape(const DeclaredSchemaObject *self,
                              const struct declared_bindings *bindings, uint32_t field, int ndim,
                              const uint64_t *sizes, int at);
/* Check a field's sizes together with the fields before; false with an exception. */
static inline bool py_declared_fits(const DeclaredSchemaObject *self,
                                    struct declared_bindings *bindings, uint32_t field, int ndim,
                                    const uint64_t *sizes) {
    const struct declared_field *declared = &self->parsed.fields[field];
    if (declared->flags & SHMBUS_DECLARED_ANY_SHAPE) {
        return true;
    }
    if (ndim != declared->ndim) {
        return py_declared_refuse_shape(self, bindings, field, ndim, sizes, -1);
    }
    for (int d = 0; d < ndim; d++) {
        int64_t wanted = declared_schema_dimension(declared, (uint32_t)d);
        bool fits = wanted < 0 || sizes[d] == (uint64_t)wanted;
        if (wanted <= SHMBUS_DIMENSION_NAMED) {
            int64_t name = SHMBUS_DIMENSION_NAMED - wanted;
            if (bindings->bound >> name & 1) {
                fits = sizes[d] == bindings->sizes[name];
            } else {
                bindings->bound |= UINT64_C(1) << name;
                bindings->sizes[name] = sizes[d];
                bindings->fields[name] = (uint8_t)field;
            }
        }
        if (!fits) {
            return py_declared_refuse_shape(self, bindings, field, ndim, sizes, d);
        }
    }
    return true;
}
/* Sizes of an empty list: the first known from the list, the others from the declaration. */
int py_declared_complete(const DeclaredSchemaObject *self, uint32_t field, int ndim,
                         uint64_t sizes[SHMBUS_MAX_NDIM]);

/* The key of a group; NULL with an exception. */
PyObject *py_make_key(PyObject *instance_id, int64_t round, uint32_t split);

/* ---- OriginHead: a relay's knowledge of a record on a different bus, and heads as bytes. */
typedef struct {
    PyObject_HEAD
    PyObject *origin; /* bytes, in the form of ring/segment.h */
    PyObject *instance_id;
    PyObject *key;
    PyObject *reason; /* failure reason: str; None for a sample */
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

/* Registered by module.c. */
PyObject *py_declared_bytes(PyObject *module, PyObject *source);
extern PyMethodDef py_export_functions[];
extern PyMethodDef py_origin_head_functions[];
