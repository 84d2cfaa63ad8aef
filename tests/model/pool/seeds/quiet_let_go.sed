# options: --scenario readers --preemptions 2 --deaths 0 --delays 0
# A reader that lets go of a slot wakes nobody.
/^void lease_drop/,/^}/s/bell_ring(&self->header->space_bell, BELL_ALL);/;/
