# options: --scenario reap --strong --preemptions 1 --deaths 0
# A slot is taken over although somebody alive holds its lock, as a timeout would do it.
/^uint32_t recover_dead/,/^}/s/!= LOCK_TAKEN) {/== LOCK_ERROR) {/
