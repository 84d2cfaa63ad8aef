/* The workers' and the collector's side of requests.h. */
#include "requests.h"

#include "base/checksum.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "lead.h"
#include "retry_table.h"

/* Passes over the lane for totals of one instant, despite concurrent feeders. */
#define TOTAL_TRIES 16

static _Atomic uint64_t *claim_at(const struct segment *segment, uint32_t cell) {
    return &segment->requests.cells[cell].claim;
}

static bool swap(_Atomic uint64_t *word, uint64_t from, uint64_t to) {
    /* SYNC: request-claimed. */
    return EXCHANGE(*word, from, to, memory_order_acq_rel);
}

/* ---- taking ---- */

/* Marks a row with possibly open samples. The row's word precedes the lane's: a worker that clears
 * the lane's word then looks at the rows. */
static void mark_returned(struct segment *segment, uint32_t row) {
    struct request_parts *parts = &segment->requests;
    atomic_store_explicit(&parts->rows[row].returned, 1, memory_order_seq_cst);
    atomic_store_explicit(&parts->lane->returned, 1, memory_order_seq_cst);
}

struct taker {
    struct segment *segment;
    uint64_t producer_id;
    uint32_t slot;
    bool too_far;
    struct request_claim *claim;
};

static bool claim_cell(const struct taker *self, uint32_t index, uint64_t number,
                       const struct request_row *row, uint32_t sample) {
    uint64_t mine = request_claim_word(CELL_IS_CLAIMED, self->producer_id + 1, number);
    uint32_t cell = row->first_cell + sample;
    if (!swap(claim_at(self->segment, cell), request_open_word(number), mine)) {
        return false;
    }
    FAILPOINT("request-claimed");
    *self->claim = (struct request_claim){
        .number = number, .word = mine, .row = index, .cell = cell, .index = sample};
    return true;
}

/* Returns true if all samples of a row were handed out or closed, or the row ended. */
static bool is_over(const struct segment *segment, uint32_t index, uint64_t number,
                    const struct request_row *row) {
    uint64_t next = RELAXED(segment->requests.rows[index].next);
    uint64_t end = request_next_word(number, row->group_size);
    return next >> 32 != end >> 32 || next >= end;
}

/* Admits a group with its first sample, for the whole group. */
static bool admit(struct taker *self, uint32_t index, uint64_t number,
                  const struct request_row *row) {
    struct segment *segment = self->segment;
    _Atomic uint32_t *admitted = &segment->requests.rows[index].admitted;
    if (RELAXED(*admitted) != 0) {
        return true;
    }
    if (!lead_is_bounded(segment)) {
        SET_RELEASE(*admitted, 1);
        return true;
    }
    const char *id =
        (const char *)segment->requests.units + (uint64_t)row->first_unit * SHMBUS_REQUEST_UNIT;
    uint64_t key = lead_key(id, row->id_bytes, row->round, row->split);
    enum lead_verdict verdict = lead_admit(segment, key, self->slot, row->group_size - 1u);
    if (verdict == LEAD_FULL) {
        self->too_far = true;
        return false;
    }
    if (verdict == LEAD_CLAIMED) {
        /* SYNC: group-closed. The claim precedes the look: a group that another worker began, and
         * the trainer took meanwhile, keeps no place. */
        bell_fence(admitted);
        if (is_over(segment, index, number, row)) {
            lead_withdraw(segment, key, self->slot);
            return true;
        }
    }
    SET_RELEASE(*admitted, 1);
    if (verdict == LEAD_CLAIMED) {
        /* The row of the lane stands for the group from now on. */
        lead_settle(segment, key, self->slot);
    }
    request_ring(segment, row->group_size - 1u);
    return true;
}

/* A no-op if the row belongs to another request by now. */
static void raise_next(struct segment *segment, uint32_t index, uint64_t number, uint32_t to) {
    _Atomic uint64_t *next = &segment->requests.rows[index].next;
    uint64_t word = request_next_word(number, to);
    uint64_t now = RELAXED(*next);
    while (now >> 32 == word >> 32 && now < word &&
           !EXCHANGE(*next, now, word, memory_order_relaxed)) {
    }
}

enum from_row { ROW_GAVE, ROW_IS_OVER, ROW_WAITS };

/* Takes the next new sample of a row. */
static enum from_row take_new(struct taker *self, uint32_t index, uint64_t number) {
    struct request_row row;
    if (!request_copy_row(self->segment, index, number, &row)) {
        return ROW_IS_OVER;
    }
    uint64_t next = RELAXED(self->segment->requests.rows[index].next);
    uint32_t sample = (uint32_t)next;
    if (sample >= row.group_size) {
        return ROW_IS_OVER;
    }
    if (!admit(self, index, number, &row)) {
        return ROW_WAITS;
    }
    for (; sample < row.group_size; sample++) {
        if (claim_cell(self, index, number, &row, sample)) {
            raise_next(self->segment, index, number, sample + 1);
            return ROW_GAVE;
        }
    }
    raise_next(self->segment, index, number, row.group_size);
    return ROW_IS_OVER;
}

/* Takes a returned sample. The flag is cleared first: samples returned meanwhile set it again. An
 * untouched row keeps its turn in order. */
static bool take_returned_of(struct taker *self, uint32_t index, uint64_t number) {
    struct request_row row;
    struct request_row *shared = &self->segment->requests.rows[index];
    if (atomic_exchange_explicit(&shared->returned, 0, memory_order_seq_cst) == 0) {
        return false;
    }
    if (!request_copy_row(self->segment, index, number, &row)) {
        mark_returned(self->segment, index); /* another request by now */
        return false;
    }
    if (ACQUIRE(shared->admitted) == 0) {
        return false;
    }
    for (uint32_t sample = 0; sample < row.group_size; sample++) {
        if (claim_cell(self, index, number, &row, sample)) {
            mark_returned(self->segment, index);
            return true;
        }
    }
    return false;
}

static bool take_returned(struct taker *self) {
    struct request_parts *parts = &self->segment->requests;
    if (RELAXED(parts->lane->returned) == 0) {
        return false;
    }
    atomic_store_explicit(&parts->lane->returned, 0, memory_order_seq_cst);
    FAILPOINT("request-searching");
    for (uint32_t level = SHMBUS_REQUEST_LEVELS; level-- > 0;) {
        for (uint32_t index = 0; index < parts->row_count; index++) {
            uint64_t number = request_open_row(self->segment, index);
            if (number != 0 && parts->rows[index].level == level &&
                atomic_load_explicit(&parts->rows[index].returned, memory_order_seq_cst) != 0 &&
                take_returned_of(self, index, number)) {
                /* Later rows may hold returned samples too. */
                atomic_store_explicit(&parts->lane->returned, 1, memory_order_seq_cst);
                return true;
            }
        }
    }
    return false;
}

/* Takes a new sample after damage to the order: scans the rows themselves. */
static bool take_in_any_order(struct taker *self, uint32_t level) {
    const struct request_parts *parts = &self->segment->requests;
    for (uint32_t index = 0; index < parts->row_count; index++) {
        uint64_t number = request_open_row(self->segment, index);
        if (number != 0 && parts->rows[index].level == level) {
            enum from_row from = take_new(self, index, number);
            if (from != ROW_IS_OVER) {
                return from == ROW_GAVE;
            }
        }
    }
    return false;
}

/* Visits the rows of a priority in order, from the first row with a possible sample. */
static bool take_in_order(struct taker *self, uint32_t level) {
    struct request_parts *parts = &self->segment->requests;
    _Atomic uint64_t *head = &parts->lane->heads[level];
    uint64_t place = ACQUIRE(*head);
    bool first = true;
    for (uint32_t looked = 0; looked <= parts->row_count; looked++, place++) {
        /* SYNC: request-offered. */
        uint64_t tail = ACQUIRE(parts->lane->tails[level]);
        if (place == tail) {
            return false;
        }
        if (tail - place > parts->row_count) {
            /* Other workers moved the head meanwhile, or a word was overwritten. */
            uint64_t now = ACQUIRE(*head);
            if (tail - now > parts->row_count) {
                return take_in_any_order(self, level);
            }
            place = now - 1;
            first = true;
            continue;
        }
        uint32_t index = RELAXED(parts->order[level * parts->row_count + place % parts->row_count]);
        enum from_row from = ROW_IS_OVER;
        if (index < parts->row_count) {
            uint64_t number = request_open_row(self->segment, index);
            if (number != 0 && parts->rows[index].place == place &&
                parts->rows[index].level == level) {
                from = take_new(self, index, number);
            }
        }
        if (from == ROW_GAVE) {
            return true;
        }
        if (from == ROW_WAITS) {
            return false; /* the later rows wait for their turn */
        }
        first = first && swap(head, place, place + 1);
    }
    return false;
}

enum request_take request_take(struct segment *segment, uint64_t producer_id, uint32_t slot,
                               struct request_claim *claim) {
    struct taker self = {segment, producer_id, slot, false, claim};
    if (!requests_are_used(segment) || producer_id + 1 >= REQUEST_NOBODY) {
        return REQUEST_NONE;
    }
    bool found = take_returned(&self);
    for (uint32_t level = SHMBUS_REQUEST_LEVELS; !found && level-- > 0;) {
        found = take_in_order(&self, level);
    }
    if (found) {
        SET_RELAXED(segment->requests.lane->taken_ns, clock_monotonic_ns());
        return REQUEST_TAKEN;
    }
    return self.too_far ? REQUEST_TOO_FAR_AHEAD : REQUEST_NONE;
}

bool request_read(const struct segment *segment, uint32_t index, uint64_t number,
                  struct request_row *copy, uint8_t *data) {
    const uint32_t room = data == NULL ? 0 : copy->data_bytes;
    if (!request_copy_row(segment, index, number, copy)) {
        return false;
    }
    if (data == NULL) {
        return true;
    }
    if (copy->data_bytes != room) {
        return false;
    }
    memcpy(data, segment->requests.units + (uint64_t)copy->first_unit * SHMBUS_REQUEST_UNIT, room);
    return shmbus_crc32c(0, data, room) == copy->data_crc &&
           request_open_row(segment, index) == number;
}

uint64_t request_find(const struct segment *segment, const char *id, uint32_t id_bytes,
                      int64_t round, uint32_t split, uint32_t *found) {
    const struct request_parts *parts = &segment->requests;
    uint64_t oldest = 0;
    for (uint32_t index = 0; index < parts->row_count; index++) {
        struct request_row row;
        uint64_t number = request_open_row(segment, index);
        if (number != 0 && (oldest == 0 || number < oldest) &&
            request_copy_row(segment, index, number, &row) && row.round == round &&
            row.split == split && row.id_bytes == id_bytes &&
            memcmp(parts->units + (uint64_t)row.first_unit * SHMBUS_REQUEST_UNIT, id, id_bytes) ==
                0) {
            oldest = number;
            *found = index;
        }
    }
    return oldest;
}

/* ---- ending a claim ---- */

bool request_is_held(const struct segment *segment, const struct request_claim *claim) {
    if (claim->cell == REQUEST_IS_RETRY) {
        return retry_is_held(segment, claim->row, claim->number, claim->word);
    }
    /* SYNC: request-claimed. */
    return request_open_row(segment, claim->row) == claim->number &&
           ACQUIRE(*claim_at(segment, claim->cell)) == claim->word;
}

/* Opens a claimed cell again; the count of an earlier commit goes first. */
static bool reopen(struct segment *segment, uint32_t row, uint32_t cell, uint64_t word,
                   uint64_t number) {
    if (!swap(claim_at(segment, cell), word, request_open_word(number))) {
        return false;
    }
    FAILPOINT("request-reopened");
    mark_returned(segment, row);
    return true;
}

bool request_give_back(struct segment *segment, const struct request_claim *claim) {
    if (claim->cell == REQUEST_IS_RETRY) {
        return retry_unclaim(segment, claim->row, claim->number, claim->word);
    }
    if (!reopen(segment, claim->row, claim->cell, claim->word, claim->number)) {
        return false;
    }
    request_ring(segment, 1);
    return true;
}

uint32_t request_revoke(struct segment *segment, uint32_t index, uint64_t number) {
    struct request_row row;
    uint32_t revoked = 0;
    if (request_copy_row(segment, index, number, &row)) {
        for (uint32_t cell = row.first_cell; cell < row.first_cell + row.group_size; cell++) {
            uint64_t word = ACQUIRE(*claim_at(segment, cell));
            revoked += request_kind_of(word) == CELL_IS_CLAIMED &&
                       request_producer_of(word) != REQUEST_NOBODY &&
                       reopen(segment, index, cell, word, number);
        }
    }
    request_ring(segment, revoked);
    return revoked;
}

/* The new word of a claimed cell during its owner's commit of the answer. */
static uint64_t answered_word(uint64_t claimed) {
    return request_claim_word(CELL_IS_DONE, request_producer_of(claimed), claimed);
}

bool request_answer(struct segment *segment, const struct request_claim *claim, uint64_t count) {
    if (claim->cell == REQUEST_IS_RETRY) {
        return retry_answer(segment, claim->row, claim->number, claim->word);
    }
    struct request_cell *cell = &segment->requests.cells[claim->cell];
    if (!request_is_held(segment, claim)) {
        return false;
    }
    uint64_t tag = (claim->number & REQUEST_NUMBER_MASK) << (64 - REQUEST_NUMBER_BITS);
    SET_RELAXED(cell->commit, tag | (count & REQUEST_COUNT_MASK));
    FAILPOINT("request-intended");
    if (!swap(&cell->claim, claim->word, answered_word(claim->word))) {
        return false;
    }
    FAILPOINT("request-committing");
    return true;
}

void request_answered(struct segment *segment, const struct request_claim *claim) {
    FAILPOINT("request-answering");
    if (claim->cell != REQUEST_IS_RETRY) {
        swap(claim_at(segment, claim->cell), answered_word(claim->word),
             request_claim_word(CELL_IS_DONE, 0, claim->number));
    }
    FAILPOINT("request-answered");
}

/* Ends a first attempt for good; false if already answered. */
static bool end_first_try(struct segment *segment, uint32_t index, uint64_t number,
                          uint32_t sample) {
    struct request_row row;
    if (!request_copy_row(segment, index, number, &row) || sample >= row.group_size) {
        return true; /* the group has ended, as the retry table will tell */
    }
    _Atomic uint64_t *claim = claim_at(segment, row.first_cell + sample);
    uint64_t over = request_claim_word(CELL_IS_DONE, REQUEST_NOBODY, number);
    uint64_t word;
    do {
        word = ACQUIRE(*claim);
        if (request_kind_of(word) == CELL_IS_DONE) {
            return word == over;
        }
    } while (!swap(claim, word, over));
    return true;
}

bool request_claim_retry(struct segment *segment, uint32_t at, uint64_t number,
                         uint64_t producer_id) {
    struct retry_entry retry;
    if (!retry_claim(segment, at, number, producer_id, &retry)) {
        return false;
    }
    uint32_t row;
    uint64_t first = retry.late == 0 ? 0
                                     : request_find(segment, retry.id, retry.id_bytes, retry.round,
                                                    retry.split, &row);
    if (first == 0 || end_first_try(segment, row, first, retry.index)) {
        return true;
    }
    retry_unclaim(segment, at, number, producer_id);
    return false;
}

/* ---- after a death ---- */

/* Returns true if the owner of a claim had committed the answer. */
static bool was_answered(uint64_t commit, uint64_t number, uint64_t committed) {
    return commit >> (64 - REQUEST_NUMBER_BITS) == (number & REQUEST_NUMBER_MASK) && (commit & REQUEST_COUNT_MASK) != 0 &&
           (commit & REQUEST_COUNT_MASK) <= (committed & REQUEST_COUNT_MASK);
}

static bool reap_cell(struct segment *segment, uint32_t row, uint64_t number, uint32_t cell,
                      const uint64_t owner_and_count[2]) {
    struct request_cell *at = &segment->requests.cells[cell];
    uint64_t word = ACQUIRE(at->claim);
    uint64_t claimed = request_claim_word(CELL_IS_CLAIMED, owner_and_count[0] + 1, number);
    if (word != claimed && word != answered_word(claimed)) {
        return false;
    }
    uint64_t commit = RELAXED(at->commit);
    if (was_answered(commit, number, owner_and_count[1])) {
        swap(&at->claim, word, request_claim_word(CELL_IS_DONE, 0, number));
        return false;
    }
    SET_RELAXED(at->commit, 0);
    FAILPOINT("request-reaping");
    return reopen(segment, row, cell, word, number);
}

void request_reap(struct segment *segment, uint64_t producer_id, uint64_t committed) {
    struct request_parts *parts = &segment->requests;
    if (!requests_are_used(segment)) {
        return;
    }
    const uint64_t dead[2] = {producer_id, committed};
    uint32_t given_back = 0;
    for (uint32_t index = 0; index < parts->row_count; index++) {
        struct request_row row;
        uint64_t number = request_open_row(segment, index);
        if (number == 0 || !request_copy_row(segment, index, number, &row)) {
            continue;
        }
        for (uint32_t i = 0; i < row.group_size; i++) {
            given_back += reap_cell(segment, index, number, row.first_cell + i, dead);
        }
        /* The dead worker may have cleared a flag that no other process sets again. */
        mark_returned(segment, index);
    }
    request_ring(segment, given_back > 0 ? given_back : 1);
}

/* ---- the collector ---- */

bool request_count(const struct segment *segment, uint32_t index, uint64_t number,
                   struct request_counts *counts) {
    struct request_row row;
    *counts = (struct request_counts){0};
    if (!request_copy_row(segment, index, number, &row)) {
        return false;
    }
    uint64_t done = request_claim_word(CELL_IS_DONE, 0, number);
    uint64_t over = request_claim_word(CELL_IS_DONE, REQUEST_NOBODY, number);
    for (uint32_t i = 0; i < row.group_size; i++) {
        uint64_t claim = ACQUIRE(*claim_at(segment, row.first_cell + i));
        bool answering = request_kind_of(claim) == CELL_IS_DONE && claim != done && claim != over;
        counts->open += request_kind_of(claim) == CELL_IS_OPEN;
        counts->claimed += request_kind_of(claim) == CELL_IS_CLAIMED || answering;
        counts->answering += answering;
        counts->done += claim == done;
    }
    counts->given_up = row.group_size - counts->open - counts->claimed - counts->done;
    return request_open_row(segment, index) == number;
}

void request_close(struct segment *segment, uint32_t index, uint64_t number) {
    struct request_row row;
    if (!request_copy_row(segment, index, number, &row)) {
        return;
    }
    raise_next(segment, index, number, row.group_size);
    for (uint32_t i = 0; i < row.group_size; i++) {
        swap(claim_at(segment, row.first_cell + i), request_open_word(number),
             request_claim_word(CELL_IS_DONE, REQUEST_NOBODY, number));
    }
}

void request_end(struct segment *segment, uint32_t index, uint64_t number) {
    struct request_row row;
    if (!request_copy_row(segment, index, number, &row)) {
        return;
    }
    struct request_counts counts;
    request_close(segment, index, number);
    request_count(segment, index, number, &counts);
    struct request_row *shared = &segment->requests.rows[index];
    shared->ended_done = counts.done + counts.answering;
    shared->ended_given_up = row.group_size - shared->ended_done;
    FAILPOINT("request-ending");
    /* SYNC: request-ended. The counts of the samples precede a feeder's free of the row. */
    request_change_word(&segment->requests, index, number << 2 | REQUEST_OPEN,
                        number << 2 | REQUEST_ENDED);
    bell_ring(&segment->requests.lane->room, 1);
}

uint32_t request_send(struct segment *segment, uint32_t index, uint64_t number) {
    struct request_row row;
    uint64_t sent = request_claim_word(CELL_IS_CLAIMED, REQUEST_NOBODY, number);
    uint32_t count = 0, new = 0;
    if (request_copy_row(segment, index, number, &row)) {
        for (uint32_t i = 0; i < row.group_size; i++) {
            _Atomic uint64_t *claim = claim_at(segment, row.first_cell + i);
            new += swap(claim, request_open_word(number), sent);
            count += ACQUIRE(*claim) == sent;
        }
        raise_next(segment, index, number, row.group_size);
    }
    if (new > 0) {
        SET_RELAXED(segment->requests.lane->taken_ns, clock_monotonic_ns());
    }
    return count;
}

void request_arrived(struct segment *segment, uint32_t index, uint64_t number, uint32_t sample) {
    struct request_row row;
    if (request_copy_row(segment, index, number, &row) && sample < row.group_size) {
        swap(claim_at(segment, row.first_cell + sample),
             request_claim_word(CELL_IS_CLAIMED, REQUEST_NOBODY, number),
             request_claim_word(CELL_IS_DONE, 0, number));
    }
}

/* One pass over the lane. */
static void add_up(const struct segment *segment, struct request_totals *totals) {
    const struct request_parts *parts = &segment->requests;
    const struct request_lane *lane = parts->lane;
    memset(totals, 0, sizeof *totals);
    totals->offered = ACQUIRE(lane->offered);
    totals->done = ACQUIRE(lane->done);
    totals->given_up = ACQUIRE(lane->given_up);
    for (uint32_t index = 0; index < parts->row_count; index++) {
        const struct request_row *row = &parts->rows[index];
        uint64_t word = ACQUIRE(row->word);
        struct request_counts counts;
        if (request_state_of(word) == REQUEST_OPEN &&
            request_count(segment, index, request_number_of(word), &counts)) {
            totals->open += counts.open;
            totals->claimed += counts.claimed;
            totals->done += counts.done;
            totals->given_up += counts.given_up;
            totals->groups++;
            continue;
        }
        word = ACQUIRE(row->word);
        if (request_state_of(word) == REQUEST_ENDED) {
            totals->done += row->ended_done;
            totals->given_up += row->ended_given_up;
        }
    }
}

void request_total(const struct segment *segment, struct request_totals *totals) {
    _Atomic uint32_t *feeding = &segment->requests.lane->feeding;
    for (int tries = 0; tries < TOTAL_TRIES; tries++) {
        uint32_t before = ACQUIRE(*feeding);
        add_up(segment, totals);
        atomic_thread_fence(memory_order_acquire);
        if (before % 2 == 0 && before == RELAXED(*feeding)) {
            return;
        }
    }
}
