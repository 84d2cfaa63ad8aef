/* Offering requests (see requests.h). */
#include "requests.h"

#include "base/checksum.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "base/file_lock.h"

#define NOWHERE UINT32_MAX

/* ---- room, by bits ---- */

static bool bit_is_set(const uint64_t *bits, uint32_t at) {
    return (bits[at / 64] >> at % 64 & 1) != 0;
}

static void set_bits(uint64_t *bits, uint32_t from, uint32_t count, bool on) {
    for (uint32_t at = from; at < from + count; at++) {
        uint64_t bit = UINT64_C(1) << at % 64;
        bits[at / 64] = on ? bits[at / 64] | bit : bits[at / 64] & ~bit;
    }
}

/* The first `wanted` free neighbours in [from, end), or NOWHERE. */
static uint32_t find_run(const uint64_t *bits, uint32_t from, uint32_t end, uint32_t wanted) {
    uint32_t have = 0;
    for (uint32_t at = from; at < end; at++) {
        if (at % 64 == 0 && bits[at / 64] == UINT64_MAX) {
            at += 63;
            have = 0;
            continue;
        }
        have = bit_is_set(bits, at) ? 0 : have + 1;
        if (have == wanted) {
            return at + 1 - wanted;
        }
    }
    return NOWHERE;
}

/* From the hint on, then from the start: prompts come and go mostly in order. */
static uint32_t take_run(uint64_t *bits, uint32_t count, uint32_t wanted, uint32_t *hint) {
    uint32_t from = *hint < count ? *hint : 0;
    uint32_t at = find_run(bits, from, count, wanted);
    if (at == NOWHERE && from > 0) {
        at = find_run(bits, 0, count, wanted);
    }
    if (at != NOWHERE) {
        set_bits(bits, at, wanted, true);
        *hint = at + wanted;
    }
    return at;
}

static uint32_t blocks_of(uint32_t group_size) {
    return (group_size + SHMBUS_REQUEST_CELLS_A_BLOCK - 1) / SHMBUS_REQUEST_CELLS_A_BLOCK;
}

static uint32_t units_of(uint32_t data_bytes) {
    return (data_bytes + SHMBUS_REQUEST_UNIT - 1) / SHMBUS_REQUEST_UNIT;
}

/* Copies a row and validates its numbers as bounds; a damaged row costs its room until the bus
 * ends. */
static bool copy_sane_row(const struct request_parts *parts, uint32_t index,
                          struct request_row *row) {
    memcpy(&row->place, &parts->rows[index].place,
           sizeof *row - offsetof(struct request_row, place));
    return row->crc == request_row_crc(row) &&
           row->first_cell / SHMBUS_REQUEST_CELLS_A_BLOCK + (uint64_t)blocks_of(row->group_size) <=
               parts->block_count &&
           row->first_unit + (uint64_t)units_of(row->data_bytes) <= parts->unit_count &&
           row->level < SHMBUS_REQUEST_LEVELS;
}

static void set_room_of(struct request_parts *parts, const struct request_row *row, bool on) {
    set_bits(parts->block_bits, row->first_cell / SHMBUS_REQUEST_CELLS_A_BLOCK,
             blocks_of(row->group_size), on);
    set_bits(parts->unit_bits, row->first_unit, units_of(row->data_bytes), on);
}

/* ---- freeing ended rows ---- */

static uint64_t counted(const _Atomic uint64_t *total) {
    return RELAXED(*total);
}

/* The idempotent second half of the free. */
static void finish_freeing(struct request_lane *lane, struct request_row *row) {
    SET_RELEASE(row->word, REQUEST_FREE);
    SET_RELAXED(lane->done, lane->freeing_done);
    SET_RELEASE(lane->given_up, lane->freeing_given_up);
    FAILPOINT("feed-freed");
    SET_RELEASE(lane->freeing, 0);
}

static void free_row(struct request_parts *parts, uint32_t index) {
    struct request_lane *lane = parts->lane;
    struct request_row *row = &parts->rows[index];
    struct request_row own;
    lane->freeing_done = counted(&lane->done) + row->ended_done;
    lane->freeing_given_up = counted(&lane->given_up) + row->ended_given_up;
    SET_RELEASE(lane->freeing, (uint64_t)index + 1);
    FAILPOINT("feed-freeing");
    if (copy_sane_row(parts, index, &own)) {
        set_room_of(parts, &own, false);
    }
    finish_freeing(lane, row);
}

static void free_ended(struct request_parts *parts) {
    for (uint32_t index = 0; index < parts->row_count; index++) {
        /* SYNC: request-ended. */
        uint64_t word = ACQUIRE(parts->rows[index].word);
        if (request_state_of(word) == REQUEST_ENDED) {
            free_row(parts, index);
        }
    }
}

/* ---- the lock, and repair after a dead feeder ---- */

static void note_place(struct request_parts *parts, uint32_t index, const struct request_row *row) {
    SET_RELAXED(parts->order[row->level * parts->row_count + row->place % parts->row_count], index);
}

/* Appends an open row, copied in `row`, to the order of its priority. */
static void append(struct request_parts *parts, uint32_t index, const struct request_row *row) {
    note_place(parts, index, row);
    /* SYNC: request-offered. */
    SET_RELEASE(parts->lane->tails[row->level], row->place + 1);
}

/* Rebuilds the bitmaps from the rows. The dead feeder held the lock: the rows cannot change. */
static void heal(struct request_parts *parts) {
    struct request_lane *lane = parts->lane;
    uint64_t freeing = ACQUIRE(lane->freeing);
    if (freeing != 0 && freeing <= parts->row_count) {
        finish_freeing(lane, &parts->rows[freeing - 1]);
    }
    SET_RELAXED(lane->freeing, 0);
    memset(parts->block_bits, 0, (parts->block_count + 63) / 64 * 8);
    memset(parts->unit_bits, 0, (parts->unit_count + 63) / 64 * 8);
    for (uint32_t index = 0; index < parts->row_count; index++) {
        _Atomic uint64_t *word = &parts->rows[index].word;
        uint32_t state = request_state_of(ACQUIRE(*word));
        struct request_row row;
        if (state == REQUEST_BUSY) {
            SET_RELEASE(*word, REQUEST_FREE);
        } else if (state != REQUEST_FREE && copy_sane_row(parts, index, &row)) {
            set_room_of(parts, &row, true);
            if (counted(&lane->offered) < row.offered) {
                SET_RELAXED(lane->offered, row.offered);
            }
            if (state == REQUEST_OPEN && row.place >= counted(&lane->tails[row.level])) {
                append(parts, index, &row);
            }
        }
    }
    bell_ring(&lane->work, BELL_ALL);
}

static void begin_feeding(struct request_parts *parts) {
    _Atomic uint32_t *feeding = &parts->lane->feeding;
    if (RELAXED(*feeding) % 2 != 0) {
        heal(parts);
    } else {
        atomic_fetch_add_explicit(feeding, 1, memory_order_acq_rel);
    }
}

static void end_feeding(struct segment *segment) {
    atomic_fetch_add_explicit(&segment->requests.lane->feeding, 1, memory_order_acq_rel);
    file_lock_drop(segment->fd, SHMBUS_LOCK_FEEDER);
}

void request_heal(struct segment *segment) {
    struct request_parts *parts = &segment->requests;
    if (RELAXED(parts->lane->feeding) % 2 != 0 &&
        file_lock_take(segment->fd, SHMBUS_LOCK_FEEDER) == LOCK_TAKEN) {
        begin_feeding(parts);
        end_feeding(segment);
    }
}

/* ---- offering ---- */

static uint32_t find_row(struct request_parts *parts) {
    struct request_lane *lane = parts->lane;
    for (uint32_t i = 0; i < parts->row_count; i++) {
        uint32_t index = (uint32_t)(((uint64_t)lane->row_hint + i) % parts->row_count);
        uint64_t word = ACQUIRE(parts->rows[index].word);
        if (request_state_of(word) == REQUEST_FREE) {
            lane->row_hint = index + 1;
            return index;
        }
    }
    return NOWHERE;
}

/* Rebuilds an invalid head and tail from the open rows. */
static void mend_order(struct request_parts *parts, uint32_t level) {
    struct request_row row;
    uint64_t tail = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t index = 0; index < parts->row_count; index++) {
            uint64_t word = ACQUIRE(parts->rows[index].word);
            if (request_state_of(word) != REQUEST_OPEN || !copy_sane_row(parts, index, &row) ||
                row.level != level) {
                continue;
            }
            if (pass == 0) {
                tail = row.place >= tail ? row.place + 1 : tail;
            } else if (tail - row.place <= parts->row_count) {
                note_place(parts, index, &row);
            }
        }
    }
    SET_RELEASE(parts->lane->heads[level], tail > parts->row_count ? tail - parts->row_count : 0);
    /* SYNC: request-offered. */
    SET_RELEASE(parts->lane->tails[level], tail);
}

/* Whether take_in_order still finds a sample of the open row `own`. Takers find returned samples by
 * the row's flag. */
static bool waits_in_order(const struct request_parts *parts, uint32_t index,
                           const struct request_row *own) {
    uint64_t next = RELAXED(parts->rows[index].next);
    for (uint32_t sample = (uint32_t)next; sample < own->group_size; sample++) {
        uint64_t claim = ACQUIRE(parts->cells[own->first_cell + sample].claim);
        if (request_kind_of(claim) == CELL_IS_OPEN) {
            return true;
        }
    }
    return false;
}

/* Returns true if a priority's order has a free place. Rows without open samples give up their
 * places: a straggler delays no prompt. */
static bool order_has_place(struct request_parts *parts, uint32_t level) {
    _Atomic uint64_t *head = &parts->lane->heads[level];
    uint64_t tail = counted(&parts->lane->tails[level]);
    uint64_t place = ACQUIRE(*head);
    if (tail - place > parts->row_count) {
        mend_order(parts, level);
        tail = counted(&parts->lane->tails[level]);
        place = ACQUIRE(*head);
    }
    for (uint32_t looked = 0; looked <= parts->row_count; looked++) {
        if (tail - place < parts->row_count) {
            return true;
        }
        uint32_t index = RELAXED(parts->order[level * parts->row_count + place % parts->row_count]);
        index %= parts->row_count;
        struct request_row row;
        uint64_t word = ACQUIRE(parts->rows[index].word);
        if (request_state_of(word) == REQUEST_OPEN && copy_sane_row(parts, index, &row) &&
            row.place == place && row.level == level && waits_in_order(parts, index, &row)) {
            return false;
        }
        if (atomic_compare_exchange_strong_explicit(head, &place, place + 1, memory_order_acq_rel,
                                                    memory_order_acquire)) {
            place++;
        }
    }
    return false;
}

/* The id, and the prompt after the id. */
static uint32_t data_bytes_of(const struct request_offer *offer) {
    return offer->id_bytes + offer->prompt_bytes;
}

/* Allocates a row, cells and room for the prompt, or nothing at all. */
static uint32_t allocate(struct request_parts *parts, const struct request_offer *offer,
                         uint32_t *first_cell, uint32_t *first_unit) {
    struct request_lane *lane = parts->lane;
    uint32_t index = order_has_place(parts, offer->level) ? find_row(parts) : NOWHERE;
    if (index == NOWHERE) {
        return NOWHERE;
    }
    uint32_t blocks = blocks_of(offer->group_size);
    uint32_t block = take_run(parts->block_bits, parts->block_count, blocks, &lane->block_hint);
    if (block == NOWHERE) {
        return NOWHERE;
    }
    *first_cell = block * SHMBUS_REQUEST_CELLS_A_BLOCK;
    *first_unit = take_run(parts->unit_bits, parts->unit_count, units_of(data_bytes_of(offer)),
                           &lane->unit_hint);
    if (*first_unit == NOWHERE) {
        set_bits(parts->block_bits, block, blocks, false);
        return NOWHERE;
    }
    return index;
}

static void write_row(struct request_parts *parts, uint32_t index, uint64_t number,
                      const struct request_offer *offer, uint32_t first_cell,
                      uint32_t first_unit) {
    struct request_lane *lane = parts->lane;
    struct request_row *row = &parts->rows[index];
    struct request_row fresh;
    SET_RELAXED(row->word, number << 2 | REQUEST_BUSY);
#if !defined(__SANITIZE_THREAD__) /* no fences in TSan */
    /* SYNC: request-offered. A process that sees a later write also sees the row busy. */
    atomic_thread_fence(memory_order_release);
#endif
    FAILPOINT("feed-busy");
    memset(&fresh, 0, sizeof fresh);
    fresh.place = counted(&lane->tails[offer->level]);
    fresh.round = offer->round;
    fresh.offered_ns = clock_monotonic_ns();
    fresh.offered = counted(&lane->offered) + offer->group_size;
    fresh.first_cell = first_cell;
    fresh.first_unit = first_unit;
    fresh.data_bytes = data_bytes_of(offer);
    fresh.data_crc = shmbus_crc32c(shmbus_crc32c(0, offer->id, offer->id_bytes), offer->prompt,
                                   offer->prompt_bytes);
    fresh.group_size = (uint16_t)offer->group_size;
    fresh.need = (uint16_t)offer->need;
    fresh.id_bytes = (uint16_t)offer->id_bytes;
    fresh.split = (uint16_t)offer->split;
    fresh.level = (uint16_t)offer->level;
    fresh.crc = request_row_crc(&fresh);
    SET_RELAXED(fresh.next, request_next_word(number, 0));
    memcpy(&row->place, &fresh.place,
           offsetof(struct request_row, begun) - offsetof(struct request_row, place));
    uint8_t *data = parts->units + (uint64_t)first_unit * SHMBUS_REQUEST_UNIT;
    memcpy(data, offer->id, offer->id_bytes);
    memcpy(data + offer->id_bytes, offer->prompt, offer->prompt_bytes);
    for (uint32_t i = 0; i < offer->group_size; i++) {
        struct request_cell *cell = &parts->cells[first_cell + i];
        SET_RELAXED(cell->commit, 0);
        SET_RELEASE(cell->claim, request_open_word(number));
    }
    FAILPOINT("feed-written");
    /* SYNC: request-offered. The row is complete before it opens. */
    request_change_word(parts, index, number << 2 | REQUEST_BUSY, number << 2 | REQUEST_OPEN);
    FAILPOINT("feed-open");
    append(parts, index, &fresh);
    SET_RELEASE(lane->offered, fresh.offered);
    FAILPOINT("feed-offered");
}

bool request_can_fit(const struct segment *segment, const struct request_offer *offer) {
    return blocks_of(offer->group_size) <= segment->requests.block_count &&
           units_of(data_bytes_of(offer)) <= segment->requests.unit_count;
}

/* Offers one group under the held lock; false without room. */
static bool offer_one(struct request_parts *parts, const struct request_offer *offer,
                      uint64_t *number) {
    uint32_t first_cell, first_unit;
    uint32_t index = allocate(parts, offer, &first_cell, &first_unit);
    if (index == NOWHERE) {
        free_ended(parts);
        index = allocate(parts, offer, &first_cell, &first_unit);
    }
    if (index == NOWHERE) {
        return false;
    }
    *number = counted(&parts->lane->number) + 1;
    SET_RELEASE(parts->lane->number, *number);
    write_row(parts, index, *number, offer, first_cell, first_unit);
    return true;
}

enum request_feed request_offer(struct segment *segment, const struct request_offer *offers,
                                uint32_t count, uint32_t *done, uint64_t *number) {
    struct request_parts *parts = &segment->requests;
    *done = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!request_can_fit(segment, &offers[i])) {
            return FEED_TOO_LARGE;
        }
    }
    enum lock_status lock = file_lock_take(segment->fd, SHMBUS_LOCK_FEEDER);
    if (lock != LOCK_TAKEN) {
        return lock == LOCK_HELD_ELSEWHERE ? FEED_HELD : FEED_ERROR;
    }
    begin_feeding(parts);
    FAILPOINT("feed-begun");
    uint32_t samples = 0;
    while (*done < count && *done < REQUEST_OFFERS_AT_ONCE &&
           offer_one(parts, &offers[*done], number)) {
        samples += offers[(*done)++].group_size;
    }
    end_feeding(segment);
    request_ring(segment, samples);
    return *done == count ? FEED_DONE : FEED_FULL;
}

uint64_t request_free_bytes(const struct segment *segment) {
    const struct request_parts *parts = &segment->requests;
    uint64_t units = 0;
    for (uint32_t at = 0; at < parts->unit_count; at += 64) {
        uint32_t left = parts->unit_count - at;
        uint64_t free_bits = ~parts->unit_bits[at / 64];
        units += (uint64_t)__builtin_popcountll(
            left < 64 ? free_bits & ((UINT64_C(1) << left) - 1) : free_bits);
    }
    return units * SHMBUS_REQUEST_UNIT;
}
