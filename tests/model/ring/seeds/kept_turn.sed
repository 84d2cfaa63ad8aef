# options: --scenario turns --strong --preemptions 1
# The worker that begins a group wakes no worker for the remaining samples.
/^static bool admit(/,/^}/s/^    request_ring(segment, row->group_size - 1u);/    ;/
