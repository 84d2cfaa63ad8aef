/* Promises of retry requests.
 *
 * - A request goes to a single process at a time, whole, and only while the table asks for it.
 * - A death fails an attempt only after the claiming process's death.
 * - A request of a living asker reaches a living taker, or is answered: never lost. */
#include "actors.h"

#include "ring/retry_table.h"

static struct ghost_retry *ghost(void) {
    return &world.control.ghost.retry;
}

uint64_t ghost_asks(void) {
    struct ghost_retry *g = ghost();
    if (++g->asked > MAX_REQUESTS) {
        engine_fail("more than %d requests: no progress", MAX_REQUESTS);
    }
    g->askers |= (uint8_t)(1u << running);
    if (world.processes[running].buffered_count == 0) {
        /* An earlier request is in the table by now, or never will be. */
        g->published = (uint8_t)(g->asked - 1);
    }
    return g->asked;
}

void ghost_takes(void) {
    ghost()->takers |= (uint8_t)(1u << running);
}

void ghost_claim_word(uint64_t before, uint64_t after) {
    struct ghost_retry *g = ghost();
    if (after == SHMBUS_RETRY_BUSY) {
        g->current = 0;
    } else if (after != SHMBUS_RETRY_FREE) {
        g->claimed[running] = g->current;
    } else if (before != (uint64_t)running + 1) {
        g->current = ++g->published;
    }
}

void ghost_handed(uint64_t number) {
    struct ghost_retry *g = ghost();
    if (number == 0 || number > g->asked || g->claimed[running] != number) {
        engine_fail("P%d is handed request %llu; what it claimed is %u", running,
                    (unsigned long long)number, g->claimed[running]);
    }
    if (g->holder[number] != 0) {
        engine_fail("request %llu is handed to P%d, and P%d has it", (unsigned long long)number,
                    running, g->holder[number] - 1);
    }
    g->holder[number] = (uint8_t)(running + 1);
}

void ghost_gives_back(uint64_t number) {
    ghost()->holder[number] = 0;
}

void ghost_answered(void) {
    ghost()->answered = true;
}

void ghost_counts_dead(uint64_t number, uint64_t claimant) {
    if (claimant < AUDITOR && engine_is_alive((int)claimant)) {
        engine_fail("request %llu counts as failed by the death of P%llu, which lives",
                    (unsigned long long)number, (unsigned long long)claimant);
    }
}

bool ghost_wants(void) {
    return !ghost()->answered;
}

static bool any_lives(uint8_t processes) {
    for (int i = 0; i < AUDITOR; i++) {
        if ((processes >> i & 1) != 0 && engine_is_alive(i)) {
            return true;
        }
    }
    return false;
}

/* Whether a request exists, with a living process on each side to go on. */
bool ghost_wants_in_vain(void) {
    const struct ghost_retry *g = ghost();
    return g->asked > 0 && !g->answered && any_lives(g->askers) && any_lives(g->takers);
}
