/* Steps of collectors and producers with retry requests: the calls of shmbus/stash/retries.py and
 * shmbus/handles/producer_requests.py, in their order, over a table of one entry.
 *
 * A taker's proof of life is the lock of its slot; its producer id is its slot's number. The ghost
 * holds the answer: a record's way into the ring has separate scenarios.
 *
 * Invariant: between two checkpoints an actor's whole knowledge lies in its heap. */
#include "actors.h"

#include <stddef.h>
#include <string.h>

#include "hooks_api.h"
#include "base/file_lock.h"
#include "ring/retry_table.h"

enum { ROW = 0, ID_BYTES = 250, REASON_BYTES = 150, NO_SUCH_PRODUCER = 77 };

struct actor {
    struct segment segment;
    uint64_t number; /* of its own request, or its taken request */
};

static struct actor *begin(void) {
    struct actor *self = memory_heap(running, sizeof *self);
    map_segment(&self->segment);
    return self;
}

/* ---- content of a request ---- */

static uint8_t text_of(uint64_t number) {
    return (uint8_t)('a' + number);
}

static void make_request(struct retry_entry *request, uint64_t number) {
    memset(request, 0, sizeof *request);
    request->number = number;
    request->round = (int64_t)number * 3;
    request->asked_ns = number * 5;
    request->group_size = SHMBUS_MAX_GROUP_SIZE;
    request->index = (uint32_t)number;
    request->attempt = (uint32_t)number * 7;
    request->id_bytes = ID_BYTES;
    request->reason_bytes = REASON_BYTES;
    memset(request->id, text_of(number), ID_BYTES);
    memset(request->reason, text_of(number), REASON_BYTES);
}

static bool read_request(struct actor *self, struct retry_entry *request) {
    if (!retry_read(&self->segment, ROW, request)) {
        return false;
    }
    struct retry_entry expected;
    make_request(&expected, request->number);
    expected.claim = request->claim;
    expected.crc = request->crc;
    if (memcmp(&expected, request, sizeof expected) != 0) {
        engine_fail("P%d reads a request %llu that nobody wrote so", running,
                    (unsigned long long)request->number);
    }
    return true;
}

/* ---- the asker ---- */

static void ask(struct actor *self) {
    struct retry_entry request;
    self->number = ghost_asks();
    make_request(&request, self->number);
    retry_publish(&self->segment, ROW, &request);
    engine_checkpoint();
}

/* Takes over an earlier collector's claimed request, withdraws an unclaimed. */
static void adopt(struct actor *self) {
    struct retry_entry request;
    if (read_request(self, &request) && request.claim != SHMBUS_RETRY_FREE) {
        self->number = request.number;
    } else {
        retry_withdraw(&self->segment, ROW);
    }
    engine_checkpoint();
}

static bool is_dead(struct actor *self, uint64_t producer_id) {
    if (producer_id >= self->segment.max_producers) {
        return true;
    }
    int64_t slot = SHMBUS_LOCK_SLOT + (int64_t)producer_id;
    if (file_lock_take(self->segment.fd, slot) != LOCK_TAKEN) {
        return false;
    }
    file_lock_drop(self->segment.fd, slot);
    return true;
}

/* Whether the current attempt failed: by its taker's death, or its time; in the end also for an
 * unreadable entry. */
static bool has_failed(struct actor *self) {
    struct retry_entry request;
    if (!read_request(self, &request) || request.number != self->number) {
        return true;
    }
    if (request.claim == SHMBUS_RETRY_FREE || !is_dead(self, request.claim - 1)) {
        return false;
    }
    /* An orderly leaver may have put it back since. */
    uint64_t claimant = request.claim;
    if (!read_request(self, &request) || request.claim != claimant) {
        return false;
    }
    ghost_counts_dead(self->number, claimant - 1);
    return true;
}

static bool is_wanted(void) {
    bool is = ghost_wants();
    engine_observe(is);
    return is;
}

void request_one(enum patience patience, uint8_t takers) {
    struct actor *self = begin();
    while (file_lock_take(self->segment.fd, SHMBUS_LOCK_COLLECTOR) != LOCK_TAKEN) {
        engine_pause(true);
    }
    adopt(self);
    if (self->number == 0 && is_wanted()) {
        ask(self);
    }
    if (patience == ASKS_AGAIN && is_wanted()) {
        ask(self);
    }
    while (is_wanted()) {
        bool last = are_finished(takers);
        if (has_failed(self)) {
            ask(self);
        } else if (last) {
            return;
        }
        engine_pause(true);
    }
    retry_withdraw(&self->segment, ROW);
}

/* ---- the taker ---- */

static bool take(struct actor *self) {
    struct retry_entry request;
    uint64_t me = (uint64_t)running;
    if (!read_request(self, &request) || request.claim != SHMBUS_RETRY_FREE ||
        !retry_claim(&self->segment, ROW, request.number, me, &request)) {
        return false;
    }
    ghost_handed(request.number);
    self->number = request.number;
    return true;
}

/* False after the end of every asker. */
static bool wait_for_one(struct actor *self, uint8_t askers) {
    while (!take(self)) {
        if (are_finished(askers)) {
            return false;
        }
        engine_pause(true);
    }
    engine_checkpoint();
    return true;
}

void take_request(enum deed deed, uint8_t askers) {
    struct actor *self = begin();
    if (file_lock_take(self->segment.fd, SHMBUS_LOCK_SLOT + running) != LOCK_TAKEN) {
        engine_fail("P%d has no slot", running);
    }
    ghost_takes();
    bool has = wait_for_one(self, askers);
    if (has && deed == GIVES_BACK) {
        ghost_gives_back(self->number);
        retry_unclaim(&self->segment, ROW, self->number, (uint64_t)running);
        has = wait_for_one(self, askers);
    }
    if (has) {
        ghost_answered();
    }
}

/* ---- the scribbler ---- */

void scribble(enum part part) {
    struct actor *self = begin();
    struct retry_entry *row = &self->segment.retries[ROW];
    switch (part) {
    case A_TEXT:
        model_store(&row->id[ID_BYTES / 2], 1, '?', memory_order_relaxed, "(scribbles)");
        break;
    case A_NUMBER:
        model_store(&row->number, sizeof row->number, 1, memory_order_relaxed, "(scribbles)");
        break;
    case A_CLAIM:
        model_store(&row->claim, sizeof row->claim, NO_SUCH_PRODUCER, memory_order_relaxed,
                    "(scribbles)");
        break;
    case A_BUSY_CLAIM:
        model_store(&row->claim, sizeof row->claim, SHMBUS_RETRY_BUSY, memory_order_relaxed,
                    "(scribbles)");
        break;
    }
}

/* ---- the auditor: the next collector, and a taking producer ---- */

void audit_retries(const struct segment *segment) {
    struct actor *self = memory_heap(running, sizeof *self);
    struct retry_entry request;
    self->segment = *segment;
    if (world.control.ghost.retry.asked == 0) {
        return;
    }
    adopt(self);
    if (self->number == 0 || has_failed(self)) {
        ask(self);
    }
    if (!read_request(self, &request) || request.number != self->number || !take(self)) {
        engine_fail("a request made after all is over is not handed out");
    }
}
