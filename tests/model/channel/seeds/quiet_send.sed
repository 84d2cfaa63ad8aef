# options: --scenario pair --preemptions 2 --deaths 0 --delays 0
# A sender wakes nobody.
s/^    bell_ring(channel_bell(self->header, CHANNEL_SENDER), BELL_ALL);/    ;/
