/* Producer.put_group: all records of a group, in one piece of the lane and committed by one store.
 *
 * Invariants:
 *  - Every argument of every sample is checked before room is claimed.
 *  - From the claim to the commit no code of Python's runs, and the interpreter lock is held: the
 *    records lie above the lane's `used`, where nobody sees them, until all are whole. */
#include "python/put/put_group.h"

#include "python/hooks.h"
#include "python/put/plan_fields.h"
#include "python/segment/split_labels.h"
#include "ring/cancelled.h"

struct whole_group {
    Py_ssize_t count;
    Py_ssize_t begun; /* arguments that have to be ended */
    struct put_arguments *samples;
    struct reservation *at;
    uint64_t bytes;
};

/* Names the sample in the exception that is set, where the message is one of ours. */
static void name_sample(Py_ssize_t index) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == PyExc_TypeError || type == PyExc_ValueError || type == hooks.too_large_error) {
        PyErr_NormalizeException(&type, &value, &traceback);
        PyErr_Format(type, "put_group: sample %zd: %S", index, value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    PyErr_Restore(type, value, traceback);
}

static bool read_samples(WriterObject *self, struct whole_group *group, PyObject *items) {
    for (Py_ssize_t i = 0; i < group->count; i++) {
        struct put_arguments *sample = &group->samples[i];
        py_arguments_begin(sample);
        group->begun = i + 1;
        if (!py_arguments_take_mapping(sample, PyList_GET_ITEM(items, i)) ||
            !py_arguments_finish(sample, &self->schemas, self->declared) ||
            (sample->list_count > 0 && !py_arguments_convert_lists(sample))) {
            name_sample(i);
            return false;
        }
        group->bytes += sample->spec.record_bytes;
    }
    return true;
}

static bool claim(WriterObject *self, struct whole_group *group, double timeout_s) {
    uint64_t limit = self->segment->c.record_limit;
    if (group->bytes > limit) {
        PyErr_Format(hooks.too_large_error,
                     "bus '%U': a group that is put whole takes at most %llu bytes, this one needs "
                     "%llu; put its samples with put_many and a round from next_round(), or "
                     "create the bus with a larger capacity (a group may take a quarter of it)",
                     self->segment->name, (unsigned long long)limit,
                     (unsigned long long)group->bytes);
        return false;
    }
    struct wanted_room wanted = py_writer_wants(self, &group->samples[0]);
    wanted.bytes = group->bytes;
    if (!py_writer_claim_room(self, &wanted, timeout_s, &group->at[0])) {
        return false;
    }
    struct reservation next = group->at[0];
    for (Py_ssize_t i = 0; i < group->count; i++) {
        next.bytes = group->samples[i].spec.record_bytes;
        group->at[i] = next;
        next.place.offset += next.bytes;
        next.record = (struct record_header *)(void *)((uint8_t *)next.record + next.bytes);
        next.admitted = 0; /* which the first says for all */
        if (!py_writer_find_split(self, &group->samples[i], &group->at[0])) {
            return false;
        }
    }
    return true;
}

static void publish(WriterObject *self, struct whole_group *group) {
    for (Py_ssize_t i = 0; i < group->count; i++) {
        py_writer_write_head(self, &group->samples[i], &group->at[i]);
        py_writer_fill(self, &group->samples[i], &group->at[i]);
    }
    writer_publish_all(&self->c, group->at, (uint32_t)group->count);
    self->bytes += group->bytes;
}

PyObject *py_writer_put_group(WriterObject *self, PyObject *args) {
    PyObject *items, *timeout;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &items, &timeout) ||
        !py_parse_timeout(timeout, &timeout_s) || !py_writer_usable(self)) {
        return NULL;
    }
    struct whole_group group = {.count = PyList_GET_SIZE(items)};
    if (group.count < 1 || group.count > (Py_ssize_t)SHMBUS_MAX_GROUP_SIZE) {
        PyErr_Format(PyExc_ValueError, "samples: expected 1 to %u, got %zd", SHMBUS_MAX_GROUP_SIZE,
                     group.count);
        return NULL;
    }
    group.samples = PyMem_Malloc((size_t)group.count * sizeof *group.samples);
    group.at = PyMem_Malloc((size_t)group.count * sizeof *group.at);
    bool done = group.samples != NULL && group.at != NULL;
    if (!done) {
        PyErr_NoMemory();
    }
    done = done && read_samples(self, &group, items) &&
           py_writer_usable(self) && /* encoding may have let another thread close it */
           claim(self, &group, timeout_s);
    if (done) {
        publish(self, &group);
    }
    for (Py_ssize_t i = 0; i < group.begun; i++) {
        py_arguments_end(&group.samples[i]);
    }
    PyMem_Free(group.samples);
    PyMem_Free(group.at);
    if (!done) {
        return NULL;
    }
    py_writer_tell_reader(self);
    Py_RETURN_NONE;
}

const char py_writer_cancelled_doc[] =
    "cancelled($self, instance_id, *, round, split=None)\n--\n\n"
    "Whether a group has ended without this sample, so that work on it can stop.\n\n"
    "That is so once a group has the samples that it needs (``need=`` below group_size), was\n"
    "given up for a failed sample, or has passed its deadline. A read of shared memory, of less\n"
    "than a microsecond: cheap enough to ask after each turn of a rollout.\n\n"
    "Parameters\n----------\n"
    "instance_id : str or int\n"
    "    The prompt's key, as for `put`.\n"
    "round : int or None\n"
    "    The group's round. A group without one is never cancelled: its key may begin again.\n"
    "split : str, optional\n"
    "    Who the group is for, as for `put`.\n\n"
    "Returns\n-------\n"
    "bool\n"
    "    True for the last 1,024 groups of the bus that ended so.\n\n"
    "Raises\n------\n"
    "TypeError, ValueError\n"
    "    As for `put`.\n"
    "BusClosedError\n"
    "    The producer is closed, or was made before a fork.";

PyObject *py_writer_cancelled(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"instance_id", "round", "split", NULL};
    PyObject *id, *round = NULL, *split = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OO", names, &id, &round, &split) ||
        !py_writer_usable(self)) {
        return NULL;
    }
    if (round == NULL) {
        PyErr_SetString(PyExc_TypeError, "missing the argument 'round'");
        return NULL;
    }
    uint32_t number = SHMBUS_SPLIT_TRAIN;
    if (split != Py_None) {
        number = py_split_check(split) ? py_split_number(self->segment, split) : SHMBUS_MAX_SPLITS;
    }
    const char *text;
    uint32_t bytes;
    int64_t number_of_round;
    if (number == SHMBUS_MAX_SPLITS || !py_parse_round(round, &number_of_round)) {
        return NULL;
    }
    PyObject *name = py_take_id(id, &text, &bytes);
    if (name == NULL) {
        return NULL;
    }
    bool found = round != Py_None &&
                 cancelled_has(&self->segment->c, group_key_hash(text, bytes, number_of_round, number));
    Py_DECREF(name);
    return PyBool_FromLong(found);
}
