# options: --scenario one_slot --preemptions 1 --deaths 0 --delays 0
# A receiver that acknowledges wakes nobody.
s/^    bell_ring(channel_bell(self->header, CHANNEL_RECEIVER), BELL_ALL);/    ;/
