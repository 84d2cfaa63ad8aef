# options: --scenario ahead --strong --preemptions 2
# A put that begins a group leaves the group's siblings asleep.
s/^            bell_ring_for(&segment->header->space_bell, lead_waiters(key), siblings);/            (void)siblings;/
