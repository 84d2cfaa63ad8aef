/* Hot path of the C core, call by call: ring and stash without Python, for counting instructions.
 *
 * usage: hot_path ROUNDS. A round sends, reads and releases a window of records over a single
 * mapping. The counter sees only the functions named op_*, a function an operation. Payloads are
 * small, to leave their copy out of the count. Exit status 1 after a failed call. */
#define _GNU_SOURCE
#include "batch/convert.h"
#include "stash/group_table.h"
#include "sample.h"

enum { WINDOW = 64, TOKENS = 2048, CAPACITY = 4 << 20, GROUP = 8, OPEN_GROUPS = 4096 };

/* Not inlined: a profiler needs the bounds of each operation. */
#define OPERATION __attribute__((noinline, noclone)) static void

OPERATION op_put(struct writer *writer, struct sample *sample, uint32_t index) {
    put(writer, sample, index, 8);
}

OPERATION op_reserve_and_commit(struct writer *writer, struct sample *sample) {
    struct reservation at;
    require(record_plan(&sample->spec), "record_plan");
    require(writer_claim(writer, sample->spec.record_bytes, &at) == WRITER_OK, "writer_claim");
    record_write_frame(at.record, &at.place, at.bytes, writer->producer_id, writer->slot_index, 0);
    record_write_body(at.record, &sample->spec);
    writer_reserve(writer, &at);
    writer_commit(writer, &at);
    doorbell_ring(writer->segment->header);
}

OPERATION op_read(struct reader *reader, struct record_ref *ref) {
    require(reader_next(reader, ref) > 0, "reader_next");
}

OPERATION op_look_in_vain(struct reader *reader, struct record_ref *ref) {
    require(reader_next(reader, ref) == 0, "reader_next");
}

OPERATION op_release_a_group(struct reader *reader, struct record_ref *refs) {
    const struct record_ref *group[GROUP];
    for (int i = 0; i < GROUP; i++) {
        group[i] = &refs[i];
    }
    intent_log_release(reader->segment, group, GROUP, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
    for (int i = 0; i < GROUP; i++) {
        reader_let_go(reader, &refs[i]);
    }
}

/* The stash's order: group of a sample, cell, end of a complete group. */
OPERATION op_stash(struct group_table *groups, const struct group_key *key, uint32_t cell,
                   void *sample) {
    group_table_expect_bucket(groups, key->hash);
    group_table_expect_entry(groups, key->hash, cell);
    struct group_entry *entry = group_table_find(groups, key);
    if (entry == NULL) {
        entry = group_table_insert(groups, key, GROUP, GROUP, 0.0);
        require(entry != NULL, "group_table_insert");
    }
    group_entry_cells(entry)[cell] = sample;
    if (--entry->missing == 0) {
        group_table_remove(groups, entry, key->hash);
    }
}

/* Samples of long-open groups: consecutive samples belong to different groups. */
static void stash_some(struct group_table *groups, uint64_t *number, void *sample) {
    for (uint32_t i = 0; i < WINDOW; i++) {
        uint64_t at = (*number)++;
        uint64_t group = at / (GROUP * OPEN_GROUPS) * OPEN_GROUPS + at % OPEN_GROUPS;
        char name[ENTRY_INLINE_KEY];
        int length = snprintf(name, sizeof name, "p-%llu", (unsigned long long)group);
        struct group_key key = {.bytes = (const uint8_t *)name,
                              .hash = (group + 1) * UINT64_C(0x9E3779B97F4A7C15) >> 7,
                              .length = (uint16_t)length,
                              .kind = 1};
        op_stash(groups, &key, (uint32_t)(at / OPEN_GROUPS % GROUP), sample);
    }
}

struct batch {
    int64_t tokens[TOKENS], positions[TOKENS];
    uint8_t mask[TOKENS];
    float logprobs[TOKENS], advantages[TOKENS];
    int32_t source_tokens[TOKENS];
    uint8_t source_mask[TOKENS];
    float source_logprobs[TOKENS];
};

OPERATION op_gather(struct batch *batch) {
    gather_i64(batch->tokens, batch->source_tokens, ELEMENT_I32, TOKENS);
    gather_positions(batch->positions, 0, TOKENS);
    gather_bool(batch->mask, batch->source_mask, ELEMENT_U8, TOKENS);
    gather_f32(batch->logprobs, batch->source_logprobs, ELEMENT_F32, TOKENS);
    gather_mask_f32(batch->logprobs, batch->mask, TOKENS);
    gather_fill_f32(batch->advantages, 0.5f, TOKENS);
}

int main(int argc, char **argv) {
    long rounds = argc == 2 ? strtol(argv[1], NULL, 10) : 0;
    require(rounds > 0, "usage: hot_path ROUNDS");
    struct segment segment, own;
    struct writer writer;
    struct reader reader;
    static struct sample sample;
    static struct record_ref refs[WINDOW];
    static struct batch batch;
    struct group_table groups;
    uint64_t stashed = 0;
    require(group_table_begin(&groups), "group_table_begin");
    make_segments(&segment, &own, CAPACITY);
    require(reader_attach(&reader, &segment), "reader_attach");
    require(writer_attach(&writer, &own, "hot path") == WRITER_OK, "writer_attach");
    describe(&sample);
    for (long round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < WINDOW; i++) {
            if (i % 2 == 0) {
                op_put(&writer, &sample, i);
            } else {
                op_reserve_and_commit(&writer, &sample);
            }
        }
        for (uint32_t i = 0; i < WINDOW; i++) {
            op_read(&reader, &refs[i]);
        }
        /* The first read ends the visit of the lanes; the next reads are a poller's. */
        for (uint32_t i = 0; i < WINDOW; i++) {
            struct record_ref none;
            op_look_in_vain(&reader, &none);
        }
        stash_some(&groups, &stashed, refs);
        for (uint32_t i = 0; i < WINDOW; i += GROUP) {
            op_release_a_group(&reader, &refs[i]);
        }
        op_gather(&batch);
    }
    group_table_end(&groups);
    return 0;
}
