# options: --scenario reserve --weak --preemptions 1 --deaths 0
# A record's state says COMMITTED before its content is there.
s/(&at->record->state, SHMBUS_COMMITTED, memory_order_release)/(\&at->record->state, SHMBUS_COMMITTED, memory_order_relaxed)/
