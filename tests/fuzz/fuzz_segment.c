/* A collector over a segment damaged between its steps: it ends, stays in bounds, and attaches
 * again.
 *
 * Input: edits of 6 bytes: place (4), value (1), and the act afterwards (1): nothing, a read, a
 * sweep, a count, a move, a producer's put, a new collector, a request with a taker. */
#define _GNU_SOURCE
#include "fuzz.h"
#include "ring/requests.h"

#define CAPACITY (64u << 10)
#define MOST_STEPS 64

static struct segment segment, own;
static uint8_t *template_bytes;
static uint64_t tables_end, log_from, log_to, lane_from;

static void put(struct writer *writer, uint64_t n) {
    struct sample sample;
    struct reservation at;
    make_sample(&sample, "prompt", n);
    if (writer_claim(writer, sample.spec.record_bytes, &at) == WRITER_OK) {
        fill(writer, &sample, &at, 1);
        writer_publish(writer, &at);
    }
}

static void offer(uint32_t level) {
    const struct request_offer asked = {.id = "asked", .id_bytes = 5, .round = SHMBUS_NO_ROUND,
                                        .prompt = (const uint8_t *)"text", .prompt_bytes = 4,
                                        .group_size = 2, .need = 2, .level = level};
    uint32_t done;
    uint64_t number;
    (void)request_offer(&own, &asked, 1, &done, &number);
}

static void take(uint64_t producer_id) {
    static uint8_t prompt[CAPACITY];
    struct request_claim claim;
    struct request_row text;
    if (request_take(&own, producer_id, 0, &claim) == REQUEST_TAKEN &&
        request_read(&own, claim.row, claim.number, &text, NULL)) {
        CHECK(text.data_bytes <= sizeof prompt);
        (void)request_read(&own, claim.row, claim.number, &text, prompt);
        request_give_back(&own, &claim);
    }
}

static void prepare(void) {
    struct segment_geometry plan;
    CHECK(segment_plan(CAPACITY, 3, SHMBUS_PAGE, &plan));
    CHECK(segment_create(&segment, memory_file(), &plan) == SHARED_OK);
    own = segment;
    own.fd = reopen(segment.fd);
    struct writer writer;
    struct reservation open;
    struct sample sample;
    CHECK(writer_attach(&writer, &own, "writer") == WRITER_OK);
    for (uint64_t i = 0; i < 12; i++) {
        put(&writer, i * 331 % 3000);
    }
    put(&writer, 9000);
    make_sample(&sample, "prompt", 50);
    CHECK(writer_claim(&writer, sample.spec.record_bytes, &open) == WRITER_OK);
    fill(&writer, &sample, &open, 2);
    writer_reserve(&writer, &open);
    put(&writer, 10);
    for (uint32_t level = 0; level < 4; level++) {
        offer(level);
    }
    template_bytes = malloc(segment.bytes);
    CHECK(template_bytes != NULL);
    memcpy(template_bytes, segment.base, segment.bytes);
    tables_end = segment.data_offset;
    log_from = (uint64_t)((uint8_t *)segment.intent_log - segment.base);
    log_to = log_from + (uint64_t)SHMBUS_MAX_GROUP_SIZE * 8;
    lane_from = (uint64_t)((uint8_t *)segment.requests.lane - segment.base);
}

/* The intent log is large and seldom touched: only what a release can have written comes back. */
static void restore(void) {
    memcpy(segment.base, template_bytes, log_from + 4096);
    memcpy(segment.base + log_to, template_bytes + log_to, segment.bytes - log_to);
}

static void act(struct reader *reader, uint8_t what) {
    struct record_ref ref;
    const struct record_ref *one = &ref;
    uint64_t committed;
    struct writer other;
    switch (what % 8) {
    case 0:
    case 1:
        for (int i = 0; i < 40 && reader_next(reader, &ref) == 1; i++) {
            if (what & 8 && reader_move(reader, &ref)) {
                continue;
            }
            intent_log_release(reader->segment, &one, 1, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
            reader_let_go(reader, &ref);
        }
        break;
    case 2:
        reader_sweep(reader, RECOVERY_WHOLE);
        break;
    case 3:
        reader_count_unread(reader, &committed);
        break;
    case 4:
        if (writer_attach(&other, &own, "other") == WRITER_OK) {
            put(&other, what * 16u);
            writer_close(&other);
        }
        break;
    case 5:
        reader_has_events(reader);
        reader_detach(reader);
        CHECK(reader_attach(reader, &segment));
        break;
    case 6:
        offer(what / 8 % SHMBUS_REQUEST_LEVELS);
        break;
    default:
        take(1u + what / 8);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (template_bytes == NULL) {
        prepare();
    }
    restore();
    struct reader reader;
    CHECK(reader_attach(&reader, &segment));
    for (int step = 0; size >= 6 && step < MOST_STEPS; data += 6, size -= 6, step++) {
        uint32_t where;
        memcpy(&where, data, 4);
        /* Most of the edits where the tables are, and not in the intent log. */
        uint64_t at = where % 4 == 0   ? where / 4 % segment.bytes
                      : where % 4 == 1 ? lane_from + where / 4 % sizeof(struct request_lane)
                                       : where / 4 % (log_from + 512);
        segment.base[at] = data[4];
        act(&reader, data[5]);
    }
    act(&reader, 0);
    reader_detach(&reader);
    return 0;
}
