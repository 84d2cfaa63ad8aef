# options: --scenario pair --preemptions 1 --deaths 0 --delays 0
# A sender takes a slot whose message was not acknowledged.
s/counts.sent - counts.acked == self->slots/counts.sent - counts.acked > self->slots/
s/counts->sent - counts->acked <= self->slots/counts->sent - counts->acked <= self->slots + 1/
