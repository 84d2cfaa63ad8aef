/* A sample's key and place, from a Trajectory, a head, or the attributes of another object.
 *
 * Invariant: equal keys have equal hashes, whatever object they were read from. */
#include "python/group/arrival.h"

#include "python/record/origin_head.h"
#include "python/record/trajectory.h"

static struct {
    PyObject *key, *group_size, *need, *index, *nbytes, *failed;
} attribute;

static bool hash_key(struct group_key *key, PyObject *id, long long round, uint32_t split) {
    Py_ssize_t length = PyUnicode_GET_LENGTH(id) * (Py_ssize_t)PyUnicode_KIND(id);
    Py_hash_t hash = PyObject_Hash(id);
    if (length > UINT16_MAX) {
        PyErr_Format(PyExc_ValueError, "key: expected at most %d bytes, got %zd", UINT16_MAX,
                     length);
        return false;
    }
    key->bytes = PyUnicode_DATA(id);
    key->length = (uint16_t)length;
    key->kind = (uint8_t)((uint32_t)PyUnicode_KIND(id) | split << KEY_KIND_BITS);
    key->tag = round;
    /* An odd multiplier spreads rounds over all bits; the string's hash is keyed and well mixed. */
    key->hash = (uint64_t)hash ^ ((uint64_t)round * UINT64_C(0x9E3779B97F4A7C15)) ^
                ((uint64_t)split * UINT64_C(0xD1B54A32D192ED03));
    return true;
}

bool py_key_read(struct group_key *at, PyObject *key) {
    PyObject *id = key, *number = Py_None;
    long long round = SHMBUS_NO_ROUND;
    unsigned long split = SHMBUS_SPLIT_TRAIN;
    Py_ssize_t parts = PyTuple_CheckExact(key) ? PyTuple_GET_SIZE(key) : 1;
    if (parts == 2 || parts == 3) {
        id = PyTuple_GET_ITEM(key, 0);
        number = PyTuple_GET_ITEM(key, 1);
    }
    if (number != Py_None || parts == 2) {
        round = PyLong_AsLongLong(number);
    }
    if (parts == 3) {
        split = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(key, 2));
    }
    if (PyErr_Occurred()) {
        return false;
    }
    if (!PyUnicode_Check(id) || split >= SHMBUS_MAX_SPLITS) {
        PyErr_Format(PyExc_TypeError,
                     "key: expected a str, (str, int) or (str, int or None, int below %u), got %R",
                     SHMBUS_MAX_SPLITS, key);
        return false;
    }
    return hash_key(at, id, round, (uint32_t)split);
}

static bool take_number(PyObject *sample, PyObject *name, uint64_t limit, uint64_t *number) {
    PyObject *value = PyObject_GetAttr(sample, name);
    if (value == NULL) {
        return false;
    }
    *number = PyLong_AsUnsignedLongLong(value);
    bool good = !(*number == UINT64_MAX && PyErr_Occurred());
    if (good && *number > limit) {
        PyErr_Format(PyExc_ValueError, "%U: expected at most %llu, got %R", name,
                     (unsigned long long)limit, value);
        good = false;
    }
    Py_DECREF(value);
    return good;
}

PyObject *py_key_of(PyObject *sample) {
    if (Py_IS_TYPE(sample, &TrajectoryType)) {
        return Py_NewRef(((TrajectoryObject *)sample)->key);
    }
    return Py_IS_TYPE(sample, &OriginHeadType) ? Py_NewRef(((OriginHeadObject *)sample)->key)
                                               : PyObject_GetAttr(sample, attribute.key);
}

bool py_arrival_read(struct arrival *to, PyObject *sample, bool count_bytes) {
    to->sample = sample;
    to->leased = false;
    to->key = py_key_of(sample);
    if (to->key == NULL) {
        return false;
    }
    if (Py_IS_TYPE(sample, &TrajectoryType)) {
        const TrajectoryObject *t = (const TrajectoryObject *)sample;
        to->width = (uint32_t)PyLong_AsUnsignedLong(t->group_size);
        to->need = to->width == 0 ? 0 : t->need;
        to->cell = (uint32_t)PyLong_AsUnsignedLong(t->index);
        to->nbytes = t->ref.bytes;
        to->failed = t->failed;
        to->leased = t->leased != 0;
        if (!hash_key(&to->at, t->instance_id, t->round, t->split)) {
            Py_CLEAR(to->key);
            return false;
        }
        return true;
    }
    if (Py_IS_TYPE(sample, &OriginHeadType)) {
        const OriginHeadObject *head = (const OriginHeadObject *)sample;
        to->width = head->group_size;
        to->need = head->need;
        to->cell = head->index;
        to->nbytes = head->nbytes;
        to->failed = head->reason != Py_None;
        if (!hash_key(&to->at, head->instance_id, head->round, SHMBUS_SPLIT_TRAIN)) {
            Py_CLEAR(to->key);
            return false;
        }
        return true;
    }
    uint64_t width, need, cell, failed;
    to->nbytes = 0;
    if (!py_key_read(&to->at, to->key) ||
        !take_number(sample, attribute.group_size, SHMBUS_MAX_GROUP_SIZE, &width) ||
        !take_number(sample, attribute.need, width, &need) ||
        !take_number(sample, attribute.index, SHMBUS_MAX_GROUP_SIZE, &cell) ||
        !take_number(sample, attribute.failed, 1, &failed) ||
        (count_bytes && !take_number(sample, attribute.nbytes, INT64_MAX, &to->nbytes))) {
        Py_CLEAR(to->key);
        return false;
    }
    to->width = (uint32_t)width;
    to->need = (uint32_t)need;
    to->cell = (uint32_t)cell;
    to->failed = failed != 0;
    return true;
}

bool py_sum_bytes(PyObject *samples, uint64_t *total) {
    *total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
        PyObject *sample = PyList_GET_ITEM(samples, i);
        uint64_t nbytes;
        if (Py_IS_TYPE(sample, &TrajectoryType)) {
            nbytes = ((TrajectoryObject *)sample)->ref.bytes;
        } else if (!take_number(sample, attribute.nbytes, INT64_MAX, &nbytes)) {
            return false;
        }
        *total += nbytes;
    }
    return true;
}

bool py_arrival_init(void) {
    const struct word_note words[] = {
        {&attribute.key, "key"},
        {&attribute.group_size, "group_size"},
        {&attribute.need, "need"},
        {&attribute.index, "index"},
        {&attribute.nbytes, "nbytes"},
        {&attribute.failed, "failed"},
    };
    return INTERN_WORDS(words);
}
