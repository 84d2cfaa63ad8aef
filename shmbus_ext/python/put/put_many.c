/* Producer.put_many: a list of records, committed together if the bus has room for the whole list.
 *
 * Invariant: until the first commit, an exception leaves the bus unchanged. Uncommitted
 * reservations are in the writer's `batches`, and closing the writer aborts them. */
#include "python/put/put.h"

#include "base/clock.h"
#include "ring/observe.h"

/* Set `accepted` of the current exception: the number of committed items. */
static void note_accepted(Py_ssize_t done) {
    PyObject *error = py_set_aside_error();
    PyObject *accepted = PyLong_FromSsize_t(done);
    if (accepted == NULL || PyObject_SetAttrString(error, "accepted", accepted) < 0) {
        PyErr_Clear();
    }
    Py_XDECREF(accepted);
    py_restore_error(error);
}

struct batch {
    struct reservation *at; /* items reserved and filled but not committed */
    Py_ssize_t open;        /* number of open entries in `at` */
    Py_ssize_t committed;
    struct batch *next; /* of the same writer, in a second thread or a signal handler */
};

static void batch_commit(WriterObject *self, struct batch *batch) {
    for (Py_ssize_t i = 0; i < batch->open; i++) {
        writer_commit(&self->c, &batch->at[i]);
        self->bytes += batch->at[i].bytes;
    }
    batch->committed += batch->open;
    batch->open = 0;
}

static void batch_abort(WriterObject *self, struct batch *batch) {
    for (Py_ssize_t i = 0; i < batch->open; i++) {
        writer_abort(&self->c, &batch->at[i]);
    }
    batch->open = 0;
}

/* Name the item or sample in the current exception, if its message comes from shmbus. */
static void name_place(const char *what, Py_ssize_t at) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == PyExc_TypeError || type == PyExc_ValueError || type == hooks.too_large_error) {
        PyErr_NormalizeException(&type, &value, &traceback);
        PyErr_Format(type, "%s %zd: %S", what, at, value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    PyErr_Restore(type, value, traceback);
}

static bool parse_item(WriterObject *self, struct put_arguments *arguments,
                       struct put_fields *fields, PyObject *items, Py_ssize_t at) {
    py_arguments_begin(arguments, fields);
    struct reservation unused;
    struct wanted_room wanted = {0};
    bool good = py_arguments_take_mapping(arguments, PyList_GET_ITEM(items, at)) &&
                py_arguments_finish(arguments, &self->schemas, self->declared) &&
                py_writer_usable(self) && (wanted.bytes = arguments->spec.record_bytes) != 0 &&
                (wanted.bytes <= self->segment->c.record_limit ||
                 py_writer_claim_room(self, &wanted, 0.0, &unused)) &&
                py_arguments_convert_lists(arguments) && py_writer_usable(self);
    if (!good) {
        name_place("put_many: item", at);
    }
    return good;
}

static bool check_items(WriterObject *self, PyObject *items, Py_ssize_t from) {
    bool good = true;
    for (Py_ssize_t i = from; good && i < PyList_GET_SIZE(items); i++) {
        struct put_fields fields;
        struct put_arguments arguments;
        good = parse_item(self, &arguments, &fields, items, i);
        py_arguments_end(&arguments);
    }
    return good;
}

static double seconds_until(double deadline_s) {
    if (deadline_s < 0) {
        return -1.0;
    }
    double left_s = deadline_s - (double)clock_monotonic_ns() / 1e9;
    return left_s < 0 ? 0 : left_s;
}

/* With a full bus, space can appear only after committing the reserved items. A bad item must leave
 * the bus unchanged, so check the items after `at` before the first commit. */
static bool commit_and_wait(WriterObject *self, struct batch *batch, PyObject *items, Py_ssize_t at,
                            const struct wanted_room *wanted, double deadline_s) {
    if (removal_happened(&self->segment->c)) {
        /* The removed bus lost its reader: start these items again in the successor. */
        batch_abort(self, batch);
    } else if (batch->committed == 0) {
        if (!check_items(self, items, at + 1)) {
            return false;
        }
        batch_commit(self, batch);
        doorbell_ring(self->segment->c.header);
    }
    batch_commit(self, batch);
    return py_writer_claim_room(self, wanted, seconds_until(deadline_s), &batch->at[0]);
}

static bool batch_add(WriterObject *self, struct batch *batch, PyObject *items, Py_ssize_t at,
                      double deadline_s) {
    struct put_fields fields;
    struct put_arguments arguments;
    bool added = parse_item(self, &arguments, &fields, items, at);
    /* If the writer moved to a successor meanwhile, restart its items. */
    if (added && batch->committed + batch->open == at) {
        struct wanted_room wanted = py_writer_wants(self, &arguments);
        added = py_writer_try_claim(self, &wanted, &batch->at[batch->open]) == WRITER_OK ||
                commit_and_wait(self, batch, items, at, &wanted, deadline_s);
    }
    if (!added || batch->committed + batch->open != at) {
        goto end;
    }
    added = py_writer_find_split(self, &arguments, &batch->at[batch->open]);
    if (!added) {
        goto end;
    }
    struct reservation *to = &batch->at[batch->open++];
    py_writer_write_head(self, &arguments, to);
    writer_reserve(&self->c, to);
    py_writer_fill_reserved(self, &arguments, to);
end:
    py_arguments_end(&arguments);
    return added;
}

static void forget_batch(WriterObject *self, const struct batch *batch) {
    struct batch **place = &self->batches;
    while (*place != batch) {
        place = &(*place)->next;
    }
    *place = batch->next;
}

void py_writer_abort_batches(WriterObject *self) {
    for (struct batch *batch = self->batches; batch != NULL; batch = batch->next) {
        batch_abort(self, batch);
    }
}

PyObject *py_writer_put_many(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"items", "timeout", NULL};
    PyObject *sequence, *timeout = Py_None;
    double timeout_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O", names, &sequence, &timeout) ||
        !py_parse_timeout(timeout, &timeout_s) || !py_writer_usable(self)) {
        return NULL;
    }
    if (Py_TYPE(sequence)->tp_iter == NULL && !PySequence_Check(sequence)) {
        return PyErr_Format(
            PyExc_TypeError,
            "put_many: expected an iterable of dicts of put's arguments, got %.100s",
            Py_TYPE(sequence)->tp_name);
    }
    PyObject *items = PySequence_List(sequence);
    if (items == NULL) {
        return NULL;
    }
    double deadline_s = timeout_s < 0 ? -1.0 : (double)clock_monotonic_ns() / 1e9 + timeout_s;
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct batch batch = {PyMem_Malloc((size_t)(count + 1) * sizeof *batch.at), 0, 0,
                          self->batches};
    bool good = batch.at != NULL;
    if (!good) {
        PyErr_NoMemory();
    }
    self->batches = &batch;
    /* Items reserved in a removed bus leave `open` and come again. */
    while (good && batch.committed + batch.open < count) {
        good = batch_add(self, &batch, items, batch.committed + batch.open, deadline_s);
    }
    forget_batch(self, &batch);
    bool alive = self->attached && !self->segment->handle_closed;
    if (good || (alive && batch.committed > 0)) {
        batch_commit(self, &batch);
    } else if (alive) {
        batch_abort(self, &batch);
    }
    if (alive) {
        py_writer_tell_reader(self);
    }
    PyMem_Free(batch.at);
    Py_DECREF(items);
    if (!good) {
        note_accepted(batch.committed);
        return NULL;
    }
    return PyLong_FromSsize_t(batch.committed);
}

/* ---- Producer.put_group: every record of a group, in one piece of the lane and committed by one
 * store.
 *
 * Invariants:
 *  - Every argument of every sample is checked before the claim of room.
 *  - From claim to commit no Python code runs and the interpreter lock is held: the records lie
 *    above the lane's `used`, invisible until complete. */
struct whole_group {
    Py_ssize_t count;
    Py_ssize_t begun; /* number of arguments to end */
    struct put_arguments *samples;
    struct reservation *at;
    uint64_t bytes;
};

static bool read_samples(WriterObject *self, struct whole_group *group, PyObject *items) {
    struct put_fields fields;
    for (Py_ssize_t i = 0; i < group->count; i++) {
        struct put_arguments *sample = &group->samples[i];
        py_arguments_begin(sample, &fields);
        group->begun = i + 1;
        if (!py_arguments_take_mapping(sample, PyList_GET_ITEM(items, i)) ||
            !py_arguments_finish(sample, &self->schemas, self->declared) ||
            !py_arguments_convert_lists(sample) || !py_arguments_keep(sample)) {
            name_place("put_group: sample", i);
            return false;
        }
        group->bytes += sample->spec.record_bytes;
    }
    return true;
}

static bool fits(const WriterObject *self, const struct whole_group *group) {
    uint64_t limit = self->segment->c.record_limit;
    return group->bytes <= limit ||
           py_refuse(
               hooks.too_large_error,
               "bus '%U': a group that is put whole takes at most %llu bytes, this one needs "
               "%llu; put its samples with put_many and a round from next_round(), or "
               "create the bus with a larger capacity (a group may take a quarter of it)",
               self->segment->name, U64(limit), U64(group->bytes));
}

static bool claim(WriterObject *self, struct whole_group *group, double timeout_s) {
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
        next.admitted = 0; /* held by the first record for the group */
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
    int checks_only = 0;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "O!O|p", &PyList_Type, &items, &timeout, &checks_only) ||
        !py_parse_timeout(timeout, &timeout_s) || !py_writer_usable(self)) {
        return NULL;
    }
    struct whole_group group = {.count = PyList_GET_SIZE(items)};
    if (group.count < 1 || group.count > (Py_ssize_t)SHMBUS_MAX_GROUP_SIZE) {
        return PyErr_Format(PyExc_ValueError, "samples: expected 1 to %u, got %zd",
                            SHMBUS_MAX_GROUP_SIZE, group.count);
    }
    group.samples = PyMem_Malloc((size_t)group.count * sizeof *group.samples);
    group.at = PyMem_Malloc((size_t)group.count * sizeof *group.at);
    bool done = group.samples != NULL && group.at != NULL;
    if (!done) {
        PyErr_NoMemory();
    }
    done = done && read_samples(self, &group, items) &&
           py_writer_usable(self) && /* a second thread may close the writer during encoding */
           fits(self, &group) && (checks_only || claim(self, &group, timeout_s));
    if (done && !checks_only) {
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
    if (!checks_only) {
        py_writer_tell_reader(self);
    }
    Py_RETURN_NONE;
}

PyObject *py_writer_cancelled(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"instance_id", "round", "split", NULL};
    PyObject *id, *round = NULL, *split = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OO", names, &id, &round, &split) ||
        !py_writer_usable(self)) {
        return NULL;
    }
    if (round == NULL) {
        return PyErr_Format(PyExc_TypeError, "missing the argument 'round'");
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
