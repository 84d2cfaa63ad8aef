/* The copy loops that execute a plan, in one thread or in several. */
#include "python/batch/batch.h"


/* Maximum tokens of a piece: small enough to share a batch among several threads. */
#define PIECE_TOKENS 4096
/* Tokens per block of a piece. The nearest cache holds a block's reads and writes while its
 * logprobs are masked and checked and the next block's reads are on their way. The hardware
 * prefetcher stops at a page boundary, and a sequence spans several pages per field. */
#define BLOCK_TOKENS 256

static const uint8_t *field_at(const struct source *source, int field, uint64_t from) {
    return source->data[field] == NULL
               ? NULL
               : source->data[field] + from * py_element_bytes[source->kinds[field]];
}

/* Prefetch a block's fields, which are no nearer than the ring's memory. */
static void look_ahead(const struct source *source, uint64_t from, uint64_t n) {
    for (int f = 0; f < FIELDS; f++) {
        const uint8_t *data = field_at(source, f, from);
        const uint64_t bytes = data == NULL ? 0 : n * py_element_bytes[source->kinds[f]];
        for (uint64_t at = 0; at < bytes; at += SHMBUS_RECORD_ALIGN) {
            __builtin_prefetch(data + at);
        }
    }
}

static uint64_t block_of(uint64_t left) {
    return left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
}

static uint8_t flags_of(const struct copy_job *to, uint32_t sequence) {
    return to->flags == NULL ? 0 : to->flags[sequence];
}

/* Copy a block's mask; true if every value is 0 or 1. */
static bool copy_mask(const struct copy_job *to, uint32_t sequence, uint64_t from, uint64_t at,
                      uint64_t n) {
    const struct source *source = &to->sources[sequence];
    const uint8_t *mask = field_at(source, FIELD_MASK, from);
    const bool masked = flags_of(to, sequence) & SAMPLE_MASKED;
    if (mask == NULL || masked) {
        memset(to->mask + at, masked ? 0 : 1, n);
    } else {
        gather_bool(to->mask + at, mask, source->kinds[FIELD_MASK], n);
    }
    return mask == NULL || !gather_any_no_flag(mask, source->kinds[FIELD_MASK], n);
}

/* Copy a block's logprobs; true if finite and, up to rounding, not positive. */
static bool copy_logprobs(const struct copy_job *to, uint32_t sequence, uint64_t from, uint64_t at,
                          uint64_t n) {
    const struct source *source = &to->sources[sequence];
    const uint8_t *logprobs = field_at(source, FIELD_LOGPROBS, from);
    if (logprobs == NULL || (flags_of(to, sequence) & SAMPLE_MASKED)) {
        memset(to->logprobs + at, 0, n * sizeof(float));
        return true;
    }
    gather_f32(to->logprobs + at, logprobs, source->kinds[FIELD_LOGPROBS], n);
    if (source->data[FIELD_MASK] != NULL) {
        gather_mask_f32(to->logprobs + at, to->mask + at, n);
    }
    return !gather_any_no_logprob(to->logprobs + at, n);
}

/* Copy a block's advantages; true if finite under the mask. */
static bool copy_advantages(const struct copy_job *to, uint32_t sequence, uint64_t from,
                            uint64_t at, uint64_t n) {
    const struct source *source = &to->sources[sequence];
    const uint8_t *own = field_at(source, FIELD_ADVANTAGES, from);
    if (flags_of(to, sequence) & SAMPLE_ZEROED) {
        gather_fill_f32(to->advantages + at, 0, n);
        return true;
    }
    if (own == NULL) {
        gather_fill_f32(to->advantages + at, to->gains[sequence], n);
        return isfinite(to->gains[sequence]);
    }
    gather_f32(to->advantages + at, own, source->kinds[FIELD_ADVANTAGES], n);
    return gather_finite_f32(to->advantages + at, to->mask + at, n);
}

static bool is_plain(const struct source *source) {
    const uint8_t *kinds = source->kinds;
    return kinds[FIELD_TOKENS] == ELEMENT_I32 && source->data[FIELD_MASK] != NULL &&
           py_element_bytes[kinds[FIELD_MASK]] == 1 && source->data[FIELD_LOGPROBS] != NULL &&
           kinds[FIELD_LOGPROBS] == ELEMENT_F32 && source->data[FIELD_ADVANTAGES] == NULL;
}

/* Copy a whole block; true if its values pass the same checks. */
static bool copy_plain_block(const struct copy_job *to, uint32_t sequence, uint64_t from,
                             uint64_t at, uint64_t n) {
    const struct source *source = &to->sources[sequence];
    const struct plain_tokens these = {
        .tokens = field_at(source, FIELD_TOKENS, from),
        .mask = field_at(source, FIELD_MASK, from),
        .logprobs = field_at(source, FIELD_LOGPROBS, from),
        .to_tokens = to->tokens + at,
        .to_positions = to->positions + at,
        .to_mask = to->mask + at,
        .to_logprobs = to->logprobs + at,
        .to_advantages = to->advantages + at,
        .first = (int64_t)from,
        .advantage = to->gains[sequence],
    };
    return gather_plain(&these, n) && isfinite(these.advantage);
}

static bool copy_block(const struct copy_job *to, uint32_t sequence, uint64_t from, uint64_t n) {
    const struct source *source = &to->sources[sequence];
    const uint64_t at = (uint64_t)to->borders[sequence] + from;
    if (flags_of(to, sequence) == 0 && is_plain(source)) {
        return copy_plain_block(to, sequence, from, at, n);
    }
    gather_i64(to->tokens + at, field_at(source, FIELD_TOKENS, from), source->kinds[FIELD_TOKENS],
               n);
    gather_positions(to->positions + at, (int64_t)from, n);
    bool clean = copy_mask(to, sequence, from, at, n);
    clean = copy_logprobs(to, sequence, from, at, n) && clean;
    return copy_advantages(to, sequence, from, at, n) && clean;
}

static void copy_piece(void *job, uint32_t number) {
    struct copy_job *to = job;
    const struct piece *piece = &to->pieces[number];
    const uint64_t end = (uint64_t)piece->from + piece->tokens;
    bool clean = true;
    for (uint64_t from = piece->from, n; from < end; from += n) {
        n = block_of(end - from);
        if (from + n < end) {
            look_ahead(&to->sources[piece->sequence], from + n, block_of(end - from - n));
        } else if (number + 1 < to->count) {
            look_ahead(&to->sources[piece[1].sequence], piece[1].from, block_of(piece[1].tokens));
        }
        clean = copy_block(to, piece->sequence, from, n) && clean;
    }
    if (!clean) {
        SET_RELAXED(to->wrong, true);
    }
    py_extras_copy(to->extras, piece->sequence, piece->from, piece->tokens);
}

/* A sequence without tokens still makes a piece, for its extra fields. */
static void cut(struct copy_job *job, Py_ssize_t sequences) {
    for (Py_ssize_t i = 0; i < sequences; i++) {
        uint64_t from = 0, length = job->sources[i].length;
        do {
            uint64_t tokens = length - from < PIECE_TOKENS ? length - from : PIECE_TOKENS;
            job->pieces[job->count++] =
                (struct piece){(uint32_t)i, (uint32_t)from, (uint32_t)tokens};
            from += tokens;
        } while (from < length);
    }
}

int py_copy_job_run(struct copy_job *job, Py_ssize_t sequences, uint64_t total, uint32_t threads) {
    job->pieces = PyMem_Malloc((total / PIECE_TOKENS + (size_t)sequences + 1) *
                               sizeof *job->pieces);
    if (job->pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    cut(job, sequences);
    helpers_run(threads, job->count, copy_piece, job);
    Py_END_ALLOW_THREADS
    PyMem_Free(job->pieces);
    return !RELAXED(job->wrong);
}
