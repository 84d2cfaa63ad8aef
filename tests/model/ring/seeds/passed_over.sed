# options: --scenario two --preemptions 2 --deaths 1
# A record that was seen open, and has ended since, is passed over for those behind it.
s/^        if (lane->pending_at < lane->pending_count) {/        if (false) {/
s/^        return WALK_PENDING_FIRST;/        return WALK_ON;/
