# options: --scenario resume --preemptions 1 --deaths 0 --delays 0
# A sender that takes back what is on its way goes by what it saw before it had the lock.
s/^        counts.acked = ACQUIRE(self->header->acked);/        ;/
