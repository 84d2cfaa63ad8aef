/* Entering a run (see lane.h). */
#include "lane.h"

#include "extents.h"

bool lane_enter_run(struct reader *self, struct lane *lane, uint64_t link) {
    struct run run;
    if (!link_is_run(self->segment, link, lane->slot, &run) ||
        (lane->any_order && run.order <= lane->last_order)) {
        return false;
    }
    uint32_t extent = link_low(link) - 1;
    struct run_state *state = &self->runs[extent];
    if (state->phase != RUN_UNKNOWN) {
        return false;
    }
    *state = (struct run_state){.generation = run.generation,
                                .span = run.span,
                                .slot = lane->slot,
                                .phase = RUN_WALKING};
    lane->extent = extent;
    lane->cursor = lane->limit = 0;
    lane->cut = false;
    lane->any_order = true;
    lane->last_order = run.order;
    return true;
}
