# options: --scenario reserve --weak --preemptions 1 --deaths 0
# A record's state says COMMITTED before its content is there.
s/SET_RELEASE(at->record->state, SHMBUS_COMMITTED)/SET_RELAXED(at->record->state, SHMBUS_COMMITTED)/
