# options: --scenario sender --preemptions 2 --deaths 0 --delays 0
# Who rings does not count: who has announced a wait and does not sleep yet sleeps on.
/^static long wake(/,/^}/s/^    atomic_fetch_add_explicit(&self->count.*/    ;/
