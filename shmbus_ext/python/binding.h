/* The one door to Python and numpy: only the files of this folder come through it.
 *
 * Invariants: every object that points into a segment holds a reference to its SegmentObject, and
 * the mapping goes away with the last of them, whatever was closed before. Every entry point looks
 * at fork_generation first: a child never uses its parent's slot, lock or cursor. */
#ifndef SHMBUS_PYTHON_BINDING_H
#define SHMBUS_PYTHON_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL shmbus_numpy_api
#ifndef SHMBUS_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <structmember.h>

#include "batch/convert.h"
#include "ring/reader.h"
#include "stash/group_table.h"
#include "ring/segment.h"
#include "ring/writer.h"

/* What Python gives the core once, at import: exceptions, codecs, messages. */
struct hooks {
    PyObject *closed_error;      /* exception types */
    PyObject *too_large_error;
    PyObject *full_error;        /* (segment, bytes, waited_s) -> exception */
    PyObject *busy_error;        /* (segment, what) -> exception */
    PyObject *removed_error;     /* (segment, unix_ns or 0) -> exception */
    PyObject *layout_error;      /* (name, status, found, expected) -> exception */
    PyObject *space_error;       /* (name, bytes) -> exception */
    PyObject *memory_error;      /* (name, bytes) -> exception */
    PyObject *encode_meta;       /* object -> bytes */
    PyObject *decode_meta;       /* buffer -> object */
    PyObject *encode_dtype;      /* numpy.dtype -> bytes */
    PyObject *decode_dtype;      /* bytes -> numpy.dtype */
    PyObject *as_array;          /* (name, object) -> numpy.ndarray */
};
extern struct hooks hooks;
/* Raises what a hook that makes exceptions returns. */
void py_raise_hook(PyObject *hook, PyObject *arguments);

/* Takes the exception that is set, and sets it again. */
PyObject *py_set_aside_error(void);
void py_restore_error(PyObject *error);

extern uint32_t fork_generation;

struct keeper;
struct pin;

typedef struct segment_object {
    PyObject_HEAD
    struct segment c;
    PyObject *name;
    uint32_t generation;
    int pid;
    bool handle_closed;
    struct keeper *keepers; /* writable views that are out */
    struct pin *pins;       /* records that views hold */
    struct segment_copies pinned_at_fork, kept_at_fork; /* of both, while this process forks */
    struct segment_object *previous, *next; /* all of this process, for fork */
} SegmentObject;

/* Sets an exception when the handle is closed or was made before a fork. */
bool py_segment_usable(SegmentObject *self, const char *what);
/* Raises BusRemovedError. */
void py_raise_removed(SegmentObject *self);
/* Whether the bus has a name still; false with BusRemovedError. A system call. */
bool py_segment_exists(SegmentObject *self);
/* Maps the segment for views; false with an exception. */
bool py_segment_map_views(SegmentObject *self);
/* Gives views copies of their own and closes the file description: locks are dropped. */
void py_segment_release_handle(SegmentObject *self);

/* The exporter behind the writable views of one reservation. */
typedef struct keeper {
    PyObject_HEAD
    SegmentObject *segment;
    struct reservation at;
    bool pinned;
    struct keeper *previous, *next;
} KeeperObject;
KeeperObject *py_keeper_new(SegmentObject *segment, const struct reservation *at);

/* A text that Python code looks up again and again, and where it is kept. */
struct word_note {
    PyObject **at;
    const char *text;
};
static inline bool intern_words(const struct word_note *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        *words[i].at = PyUnicode_InternFromString(words[i].text);
        if (*words[i].at == NULL) {
            return false;
        }
    }
    return true;
}
#define INTERN_WORDS(words) intern_words(words, sizeof(words) / sizeof *(words))

/* In a setter: false with a TypeError where the attribute was to be deleted. */
static inline bool is_given(const PyObject *value, const char *name) {
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%s cannot be deleted", name);
    }
    return value != NULL;
}

/* What trajectories are made by: a Reader, or the Borrower of a process that a daemon serves. */
struct holder_kind;
#define HOLDER_HEAD                                                                              \
    PyObject_HEAD SegmentObject *segment;                                                        \
    const struct holder_kind *kind;                                                              \
    PyObject **ids;    /* recently read instance ids, so that a group shares one string */       \
    PyObject *schemas; /* bytes -> Schema */                                                     \
    struct schema_object *last_schema;                                                           \
    bool gathers; /* has packed a batch of what it read */                                       \
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
};
bool py_holder_init(HolderObject *self, SegmentObject *segment, const struct holder_kind *kind);
void py_holder_clear(HolderObject *self);
/* A borrower cannot write into the segment; whoever lent it is told by its client. */
void py_holder_note_packing(HolderObject *self);

typedef struct {
    HOLDER_HEAD
    struct reader c;
    bool wakes_often; /* the last sleep was short: producers are at work */
} ReaderObject;

/* How a place travels from the daemon to a client: native numbers, one host. */
struct wire_place {
    uint32_t extent;
    uint32_t generation;
    uint64_t offset;
    uint64_t bytes;
};

/* What holds a record's space while arrays look at it. */
typedef struct pin {
    PyObject_HEAD
    SegmentObject *segment;
    HolderObject *reader; /* NULL once the reader is closed */
    struct record_ref ref;
    struct pin *previous, *next;
} PinObject;

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
SchemaObject *py_schema_parse(const uint8_t *encoded, uint32_t bytes, uint32_t count);
/* -1 where there is no such field. */
int py_schema_find(const SchemaObject *self, PyObject *name);
PyArray_Descr *py_schema_dtype(SchemaObject *self, int field);
enum element_kind py_kind_of_dtype(const PyArray_Descr *dtype);

#define INLINE_SHAPE_WORDS 8

/* What packing reads comes first, in as few cache lines as it takes. */
typedef struct {
    PyObject_HEAD
    HolderObject *reader;
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
    uint64_t inline_shape[INLINE_SHAPE_WORDS];
    PinObject *pin;
    PyObject *index;
    PyObject *group_size;
    PyObject *key;
    PyObject *meta;
    int64_t epoch;
    uint64_t sequence;
    uint64_t producer_id;
    uint64_t committed_ns;
    uint64_t payload_bytes;
} TrajectoryObject;
TrajectoryObject *py_trajectory_new(HolderObject *reader, const struct record_copy *copy,
                                    const struct record_ref *ref);
/* Sets an exception once the space may belong to somebody else. */
bool py_trajectory_readable(const TrajectoryObject *self);
static inline const uint8_t *py_trajectory_bytes(const TrajectoryObject *self) {
    return segment_extent(&self->reader->segment->c, self->ref.place.extent) +
           self->ref.place.offset;
}

/* What a producer hands over, between Python and a record. */
struct put_arguments {
    PyObject *id_object;
    PyObject *meta_object; /* NULL for none */
    PyObject *values[SHMBUS_MAX_FIELDS];
    PyObject *names[SHMBUS_MAX_FIELDS];
    PyArrayObject *arrays[SHMBUS_MAX_FIELDS]; /* owned, contiguous */
    PyObject *meta_encoded;                   /* owned */
    PyObject *schema;                         /* owned: the bytes that spec.schema points into */
    double timeout_s;                         /* negative: for ever */
    uint32_t array_count;
    bool has_group_size, has_index;
    uint64_t shape[SHMBUS_MAX_SHAPE_WORDS];
    uint64_t field_bytes[SHMBUS_MAX_FIELDS];
    uint8_t field_ndim[SHMBUS_MAX_FIELDS];
    struct record_spec spec;
};

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

void py_arguments_begin(struct put_arguments *self);
void py_arguments_end(struct put_arguments *self);
/* One keyword; name is a str. False with an exception set. */
bool py_arguments_take(struct put_arguments *self, PyObject *name, PyObject *value);
/* Every entry of a dict; false with an exception. */
bool py_arguments_take_mapping(struct put_arguments *self, PyObject *item);
bool py_arguments_take_id(struct put_arguments *self, PyObject *value);
/* After all were taken: checks, converts the arrays, and plans the record. */
bool py_arguments_finish(struct put_arguments *self, struct schema_cache *cache);
/* Whether a field of so many dimensions fits behind so many words of shapes; false with an exception. */
bool py_arguments_shape_fits(PyObject *name, uint32_t words, Py_ssize_t ndim);
bool py_arguments_finish_head(struct put_arguments *self);
bool py_parse_timeout(PyObject *value, double *timeout_s);
bool py_parse_score(PyObject *value, double *score);
bool py_parse_policy_version(PyObject *value, int64_t *version);
bool py_arguments_init(void);

extern PyTypeObject SegmentType, WriterType, KeeperType, ReaderType, BorrowerType,
    ClientLeaseType, PinType, TrajectoryType, SchemaType, GroupTableType, GroupEntryType, GroupBaseType, RecursiveLockType,
    IntakeType, ConsumerBaseType;
bool py_group_table_add_constants(PyObject *module);
bool py_group_add_functions(PyObject *module);
bool py_gather_plan_add_functions(PyObject *module);
bool py_baseline_add_functions(PyObject *module);
bool py_take_add_words(void);
bool py_pack_add_functions(PyObject *module);
bool py_meta_search_add_functions(PyObject *module);
bool py_client_lease_add_functions(PyObject *module);
bool py_inspect_add_functions(PyObject *module);
bool py_retry_add_functions(PyObject *module);
extern PyTypeObject RestorerType;

#endif
