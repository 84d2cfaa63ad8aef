/* Room for a record in a producer's lane, and the record's contents: shared by put, put_many and
 * reserve.
 *
 * Invariant: the interpreter lock serialises calls on a lane. It is released only during a wait for
 * space, during a copy into a record already reserved, and at the end of a call, to let the reader
 * run. */
#define _GNU_SOURCE
#include "python/put/put.h"

#include <sched.h>

#include "base/clock.h"
#include "base/copy.h"
#include "ring/lead.h"
#include "ring/recovery.h"
#include "ring/observe.h"

/* Copies above this size let other threads run. */
#define RELEASE_LOCK_BYTES (UINT64_C(256) << 10)
/* Group size above which the next record's place has left every cache, because so many bytes were
 * written since. At this distance ordinary and non-temporal stores are equally fast on a machine
 * with a 480 MiB cache behind a core's own; farther out ordinary stores fall to half the speed. */
#define FAR_GROUP_BYTES (UINT64_C(64) << 20)
/* First retry interval of a waiting producer, in case a space notice was lost. Waits double up to
 * SPACE_SLICE_NS. */
#define FIRST_SLICE_NS INT64_C(2000000)
/* Reader silence after which handing over the processor costs little in comparison. */
#define LONG_SILENCE_NS UINT64_C(100000)

bool py_writer_usable(WriterObject *self) {
    if (!self->attached || self->closing) {
        return py_refuse(hooks.closed_error, "this Producer is closed; make a new one");
    }
    return py_segment_usable(self->segment, "Producer");
}

static bool is_paused(const WriterObject *self) {
    return ACQUIRE(self->segment->c.header->paused) != 0;
}

/* True if the last claim failed because its group may not begin yet. */
static bool is_too_far(const WriterObject *self) {
    return (self->waits_for & SPACE_ADMITS) != 0;
}

uint32_t py_writer_want_room(WriterObject *self, SegmentObject *here) {
    if (!is_too_far(self)) {
        /* The reader can free a sealed run. A put that waits to begin a group keeps the run. */
        writer_seal(&self->c);
    }
    uint32_t ticket = bell_announce(&here->c.header->space_bell);
    doorbell_ring(here->c.header);
    return ticket;
}

struct wanted_room py_writer_wants(const WriterObject *self,
                                   const struct put_arguments *arguments) {
    const struct record_spec *spec = &arguments->spec;
    struct wanted_room wanted = {.bytes = spec->record_bytes,
                                 .siblings = spec->group_size - 1,
                                 .split_object = arguments->split_object};
    /* A failure report needs no admission; a request's admission covers its answers. */
    bool admitted =
        arguments->answers.number != 0 && arguments->answers.cell != REQUEST_IS_RETRY;
    if (lead_is_bounded(&self->segment->c) && (spec->flags & SHMBUS_FLAG_FAILED) == 0 &&
        !admitted) {
        wanted.begins = lead_key(spec->id, spec->id_bytes, spec->round, SHMBUS_SPLIT_TRAIN);
    }
    return wanted;
}

enum writer_status py_writer_try_claim(WriterObject *self, const struct wanted_room *wanted,
                                       struct reservation *at) {
    self->waits_for = SPACE_FREED;
    if (is_paused(self) && wanted->bytes <= self->segment->c.record_limit) {
        return WRITER_FULL;
    }
    enum writer_status status = writer_claim(&self->c, wanted->bytes, at);
    if (wanted->begins == 0 || status != WRITER_OK) {
        return status;
    }
    uint64_t key = wanted->begins;
    if (wanted->split_object != NULL) {
        uint32_t split = py_split_number(self->segment, wanted->split_object);
        if (split == SHMBUS_MAX_SPLITS) {
            PyErr_Clear(); /* py_writer_find_split raises the error; no group begins */
            return WRITER_OK;
        }
        key = lead_key_of_split(key, split);
    }
    /* Admit after claiming space: claimed space stays invisible and needs no return. */
    enum lead_verdict verdict = lead_admit(&self->segment->c, key, self->c.slot_index, wanted->siblings);
    at->admitted = verdict == LEAD_CLAIMED ? key : 0;
    if (verdict == LEAD_FULL) {
        self->waits_for = lead_waiters(key);
        return WRITER_FULL;
    }
    return WRITER_OK;
}

bool py_writer_go_on(WriterObject *self, double timeout_s) {
    if (self->follow == NULL) {
        py_segment_raise_removed(self->segment);
        return false;
    }
    return self->follow(self, timeout_s);
}

/* A call's wait for space, across bus successors. */
struct wait {
    uint64_t start_ns;
    double timeout_s; /* negative: for ever */
    double next_watch_s;
    int64_t longest_ns; /* of a slice */
};

static double waited_s(const struct wait *self) {
    return (double)(clock_monotonic_ns() - self->start_ns) / 1e9;
}

static double left_s(const struct wait *self) {
    double left = self->timeout_s - waited_s(self);
    return self->timeout_s < 0 ? -1.0 : left < 0 ? 0.0 : left;
}

static bool refuse_too_large(const WriterObject *self, uint64_t bytes) {
    return py_refuse(
        hooks.too_large_error,
        "bus '%U': a record takes at most %llu bytes, this one needs %llu; create the "
        "bus with a larger capacity (a record may take a quarter of it) or split the "
        "trajectory",
        self->segment->name, U64(self->segment->c.record_limit), U64(bytes));
}

void py_writer_sleep(WriterObject *self, SegmentObject *here, uint32_t kinds, uint32_t ticket,
                     int64_t longest_ns) {
    enum shmbus_wait what = is_paused(self)       ? SHMBUS_WAIT_PAUSED
                            : is_too_far(self) ? SHMBUS_WAIT_AHEAD
                                               : SHMBUS_WAIT_SPACE;
    uint32_t slot = self->c.slot_index;
    Py_BEGIN_ALLOW_THREADS
    uint64_t began_ns = clock_monotonic_ns();
    bell_wait_for(&here->c.header->space_bell, kinds, ticket, longest_ns);
    waits_add(&here->c, slot, what, clock_monotonic_ns() - began_ns);
    Py_END_ALLOW_THREADS
}

/* Sleep until this segment may have space; false with an exception. */
static bool sleep_for_space(WriterObject *self, SegmentObject *here, uint32_t ticket,
                            struct wait *wait) {
    int64_t slice_ns = wait->longest_ns;
    wait->longest_ns =
        wait->longest_ns * 2 < SPACE_SLICE_NS ? wait->longest_ns * 2 : SPACE_SLICE_NS;
    double left = left_s(wait);
    if (left >= 0 && left * 1e9 < (double)slice_ns) {
        slice_ns = (int64_t)(left * 1e9) + 1;
    }
    /* During the wait a thread or a signal handler may close the writer, or move it to a successor
     * bus. */
    py_writer_sleep(self, here, self->waits_for, ticket, slice_ns);
    if (Py_MakePendingCalls() < 0) {
        return false;
    }
    double waited = waited_s(wait);
    return (waited < wait->next_watch_s ||
            py_watch_call(&self->watch, waited, &wait->next_watch_s)) &&
           py_writer_usable(self);
}

/* Wait for room in this segment. Return 1 with room; 0 if the bus was removed or the writer moved
 * to a successor; -1 with an exception. */
static int await_room(WriterObject *self, SegmentObject *here, const struct wanted_room *wanted,
                      struct wait *wait, struct reservation *at) {
    for (;;) {
        uint32_t ticket = py_writer_want_room(self, here);
        if (py_writer_try_claim(self, wanted, at) == WRITER_OK) {
            return 1;
        }
        if (wait->timeout_s >= 0 && waited_s(wait) >= wait->timeout_s) {
            py_raise_hook(hooks.full_error,
                          Py_BuildValue("(OKd)", here, U64(is_too_far(self) ? 0 : wanted->bytes),
                                        waited_s(wait)));
            return -1;
        }
        if (!sleep_for_space(self, here, ticket, wait)) {
            return -1;
        }
        if (self->segment != here || removal_note(&here->c)) {
            return 0;
        }
    }
}

bool py_writer_claim_room(WriterObject *self, const struct wanted_room *wanted, double timeout_s,
                          struct reservation *at) {
    enum writer_status status = py_writer_try_claim(self, wanted, at);
    if (status == WRITER_OK) {
        return true;
    }
    struct wait wait = {clock_monotonic_ns(), timeout_s, py_watch_first_s(&self->watch),
                        FIRST_SLICE_NS};
    int found = 0;
    while (found == 0) {
        if (removal_happened(&self->segment->c)) {
            if (!py_writer_go_on(self, left_s(&wait))) {
                return false;
            }
            status = py_writer_try_claim(self, wanted, at);
        }
        if (status == WRITER_OK) {
            return true;
        }
        if (status == WRITER_TOO_LARGE) {
            return refuse_too_large(self, wanted->bytes);
        }
        self->full_waits++;
        SegmentObject *here = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
        found = await_room(self, here, wanted, &wait, at);
        Py_DECREF(here);
        if (found == 0) {
            status = py_writer_try_claim(self, wanted, at);
        }
    }
    return found > 0;
}

/* On a shared processor a woken or lagging reader may wait until the producers' time slices end.
 * The producer therefore yields: at a wake-up after a long silence, and at the end of a run if the
 * reader has not looked for a while. On an uncontended processor the yield costs one short system
 * call. Yielding at every wake-up would bounce a shared processor between the two for every
 * record. */
void py_writer_tell_reader(WriterObject *self) {
    struct bus_header *header = self->segment->c.header;
    bool woken = doorbell_ring(header);
    if (woken) {
        uint64_t seen_ns = RELAXED(header->collector_seen_ns);
        woken = clock_monotonic_ns() - seen_ns > LONG_SILENCE_NS;
    }
    if (woken || self->c.ahead) {
        self->c.ahead = false;
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
    }
}

/* True if ordinary stores would be slower; false with a checksum, because it rereads every byte. */
static bool copies_non_temporally(const WriterObject *self, const struct record_spec *spec) {
    if ((self->flags & SHMBUS_FLAG_PAYLOAD_CRC) != 0) {
        return false;
    }
    return RELAXED(self->segment->c.header->consumer_packs) != 0 ||
           spec->record_bytes * spec->group_size >= FAR_GROUP_BYTES;
}

void py_writer_fill(const WriterObject *self, const struct put_arguments *arguments,
                    const struct reservation *at) {
    const struct record_spec *spec = &arguments->spec;
    uint8_t *record = (uint8_t *)at->record;
    const bool non_temporal = copies_non_temporally(self, spec);
    if (spec->meta_bytes > 0) {
        memcpy(record + spec->meta_offset, PyBytes_AS_STRING(arguments->meta_encoded),
               spec->meta_bytes);
    }
    const uint64_t *shape = spec->shape;
    for (uint32_t i = 0; i < arguments->array_count; i++) {
        const void *data = PyArray_DATA(arguments->arrays[i]);
        if (non_temporal) {
            copy_non_temporal(record + shape[0], data, arguments->field_bytes[i]);
        } else {
            memcpy(record + shape[0], data, arguments->field_bytes[i]);
        }
        shape += 1 + arguments->field_ndim[i];
    }
    if (non_temporal) {
        copy_fence();
    }
}

bool py_writer_find_split(WriterObject *self, struct put_arguments *arguments,
                          const struct reservation *at) {
    if (arguments->split_object == NULL) {
        return true;
    }
    arguments->spec.split = py_split_number(self->segment, arguments->split_object);
    if (arguments->spec.split < SHMBUS_MAX_SPLITS) {
        return true;
    }
    py_writer_leave_room(self, at);
    return false;
}

void py_writer_write_head(WriterObject *self, const struct put_arguments *arguments,
                          const struct reservation *at) {
    record_write_frame(at->record, &at->place, at->bytes, self->c.producer_id, self->c.slot_index,
                       self->flags | arguments->spec.flags);
    record_write_body(at->record, &arguments->spec);
}

/* Copy while other threads run; `busy` keeps the writer open until the end. */
static void copy_unlocked(WriterObject *self, const struct put_arguments *arguments,
                          const struct reservation *at) {
    self->busy++;
    Py_BEGIN_ALLOW_THREADS
    py_writer_fill(self, arguments, at);
    Py_END_ALLOW_THREADS
    self->busy--;
}

void py_writer_fill_reserved(WriterObject *self, const struct put_arguments *arguments,
                             const struct reservation *at) {
    if (at->bytes < RELEASE_LOCK_BYTES) {
        py_writer_fill(self, arguments, at);
    } else {
        copy_unlocked(self, arguments, at);
    }
}

void py_writer_leave_room(WriterObject *self, const struct reservation *at) {
    if (at->admitted != 0) {
        lead_withdraw(&self->segment->c, at->admitted, self->c.slot_index);
    }
}

/* Claim room for finished arguments, after converting their lists. */
static bool claim_converted(WriterObject *self, struct put_arguments *arguments,
                            struct reservation *at) {
    struct wanted_room wanted = py_writer_wants(self, arguments);
    struct segment *segment = &self->segment->c;
    /* Refuse before building an array. */
    if (wanted.bytes > segment->record_limit && !removal_happened(segment)) {
        return refuse_too_large(self, wanted.bytes);
    }
    /* Element code may run. */
    return py_arguments_convert_lists(arguments) && py_writer_usable(self) &&
           py_writer_claim_room(self, &wanted, arguments->timeout_s, at);
}

bool py_writer_put_one(WriterObject *self, struct put_arguments *arguments) {
    struct reservation at;
    uint64_t bytes = arguments->spec.record_bytes;
    if (!claim_converted(self, arguments, &at) ||
        !py_writer_find_split(self, arguments, &at)) {
        return false;
    }
    at.answers = arguments->answers;
    py_writer_write_head(self, arguments, &at);
    if (bytes < RELEASE_LOCK_BYTES) {
        py_writer_fill(self, arguments, &at);
        arguments->unwanted = !writer_publish(&self->c, &at);
        if (arguments->unwanted) {
            py_writer_leave_room(self, &at);
        }
    } else {
        /* Reserve first: another thread's record can then follow during the copy. */
        writer_reserve(&self->c, &at);
        copy_unlocked(self, arguments, &at);
        arguments->unwanted = !writer_commit(&self->c, &at);
        if (arguments->unwanted) {
            writer_abort(&self->c, &at);
        }
    }
    self->bytes += arguments->unwanted ? 0 : at.bytes;
    return true;
}

/* ---- A worker's side of the request lane: taking a sample, and ending its claim without an
 * answer.
 *
 * Invariant: before returning, a call gives back every claim not held by a Python object. */
/* Claim and text of a sample just taken, in the form of _take_requests; None if its row ended or is
 * damaged, leaving the sample unowned. `known`: request number whose text the caller already
 * holds. */
static PyObject *describe(WriterObject *self, const struct request_claim *claim, uint64_t known) {
    struct segment *segment = &self->segment->c;
    bool again = claim->number == known && request_open_row(segment, claim->row) == claim->number;
    PyObject *text = again ? Py_NewRef(Py_None)
                           : py_describe_request(self->segment, claim->row, claim->number);
    if (text == NULL || (text == Py_None && !again)) {
        return text;
    }
    return Py_BuildValue("((KKIII)N)", U64(claim->number), U64(claim->word), claim->row,
                         claim->cell, claim->index, text);
}

/* Give back every claim of a list; keep the current exception. */
static void give_back_all(WriterObject *self, PyObject *found) {
    PyObject *error = py_set_aside_error();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); i++) {
        struct request_claim claim;
        if (py_take_claim(self, PyTuple_GET_ITEM(PyList_GET_ITEM(found, i), 0), &claim)) {
            request_give_back(&self->segment->c, &claim);
        }
    }
    py_restore_error(error);
}

/* _take_requests(known, limit) -> list of (claim, text), up to `limit` samples available now.
 * `text` is None for a sample of the same request as the item before, or of the request `known`,
 * whose text the caller holds. `claim` is (number, word, row, cell, index). */
PyObject *py_writer_take_requests(WriterObject *self, PyObject *args) {
    unsigned long long known;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "Kn", &known, &limit) || !py_writer_usable(self)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    while (found != NULL && PyList_GET_SIZE(found) < limit) {
        struct request_claim claim;
        if (request_take(&self->segment->c, self->c.producer_id, self->c.slot_index, &claim) !=
            REQUEST_TAKEN) {
            break;
        }
        PyObject *item = describe(self, &claim, known);
        if (item == Py_None) {
            Py_DECREF(item);
            continue;
        }
        if (!py_append(found, item)) {
            request_give_back(&self->segment->c, &claim);
            give_back_all(self, found);
            Py_CLEAR(found);
            break;
        }
        known = claim.number;
    }
    return found;
}

bool py_take_claim(const WriterObject *self, PyObject *object, struct request_claim *claim) {
    unsigned long long number, word;
    NEVER(!PyTuple_Check(object), false);
    if (!PyArg_ParseTuple(object, "KKIII", &number, &word, &claim->row, &claim->cell,
                          &claim->index)) {
        return false;
    }
    const struct request_parts *parts = &self->segment->c.requests;
    bool fits = claim->cell == REQUEST_IS_RETRY
                    ? claim->row < SHMBUS_RETRY_ENTRIES
                    : claim->row < parts->row_count &&
                          claim->cell < parts->block_count * SHMBUS_REQUEST_CELLS_A_BLOCK;
    NEVER(!fits, false);
    claim->number = number;
    claim->word = word;
    return true;
}

PyObject *py_writer_give_back_request(WriterObject *self, PyObject *object) {
    struct request_claim claim;
    if (!py_writer_usable(self) || !py_take_claim(self, object, &claim)) {
        return NULL;
    }
    return PyBool_FromLong(request_give_back(&self->segment->c, &claim));
}

/* _holds_request(claim) -> bool: True while the request still expects this producer's answer. */
PyObject *py_writer_holds_request(WriterObject *self, PyObject *object) {
    struct request_claim claim;
    if (!py_writer_usable(self) || !py_take_claim(self, object, &claim)) {
        return NULL;
    }
    return PyBool_FromLong(request_is_held(&self->segment->c, &claim));
}

/* _recover_dead() -> bool: True if this worker was elected to find dead workers and give back their
 * claims. */
PyObject *py_writer_recover_dead(WriterObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_writer_usable(self)) {
        return NULL;
    }
    bool elected = recovery_elect(&self->segment->c);
    if (elected) {
        recover_dead(&self->segment->c, self->c.slot_index, RECOVERY_SHARE);
    }
    return PyBool_FromLong(elected);
}
