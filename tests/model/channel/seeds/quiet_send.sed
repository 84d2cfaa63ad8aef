# options: --scenario pair --preemptions 2 --deaths 0 --delays 0
# A sender wakes nobody.
s/^    channel_ring(self->header, CHANNEL_SENDER);/    ;/
