# options: --scenario one_slot --preemptions 1 --deaths 0 --delays 0
# A receiver that acknowledges wakes nobody.
s/^    channel_ring(self->header, CHANNEL_RECEIVER);/    ;/
