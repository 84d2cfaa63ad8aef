/* What the C tests share: checks that name their line, a seed, an anonymous segment, records. */
#pragma once

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ring/reader.h"
#include "base/file_lock.h"
#include "ring/intent_log.h"
#include "ring/writer.h"

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition);        \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static inline uint64_t test_seed(void) {
    const char *given = getenv("SHMBUS_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) * 2654435761u + 1;
    printf("SHMBUS_TEST_SEED=%llu plays it again\n", (unsigned long long)seed);
    return seed | 1;
}

/* An anonymous file; a second handle on it has an open file description of its own. */
static inline int memory_file(void) {
    int fd = memfd_create("shmbus-test", MFD_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static inline int reopen(int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int again = open(path, O_RDWR | O_CLOEXEC);
    CHECK(again >= 0);
    return again;
}

/* A record of one uint8 field `x` of n elements. */
struct sample {
    struct record_spec spec;
    uint64_t shape[2];
    uint64_t field_bytes[1];
    uint8_t field_ndim[1];
    uint8_t schema[sizeof(struct schema_entry) + 4];
};

static inline void make_sample(struct sample *s, const char *id, uint64_t n) {
    struct schema_entry entry = {.name_bytes = 1, .dtype_bytes = 3, .itemsize = 1, .ndim = 1};
    memset(s, 0, sizeof *s);
    memcpy(s->schema, &entry, sizeof entry);
    memcpy(s->schema + sizeof entry, "x|u1", 4);
    s->shape[1] = n;
    s->field_bytes[0] = n;
    s->field_ndim[0] = 1;
    s->spec = (struct record_spec){.id = id,
                                   .id_bytes = (uint32_t)strlen(id),
                                   .schema = s->schema,
                                   .schema_bytes = sizeof s->schema,
                                   .shape = s->shape,
                                   .shape_words = 2,
                                   .field_bytes = s->field_bytes,
                                   .field_ndim = s->field_ndim,
                                   .field_count = 1,
                                   .group_size = 4,
                                   .index = 1,
                                   .score = 0.5};
    CHECK(record_plan(&s->spec));
}

static inline void fill(struct writer *w, const struct sample *s, const struct reservation *at,
                        uint8_t value) {
    record_write_frame(at->record, &at->place, at->bytes, w->producer_id, w->slot_index, 0);
    record_write_body(at->record, &s->spec);
    memset((uint8_t *)at->record + s->shape[0], value, s->shape[1]);
}
