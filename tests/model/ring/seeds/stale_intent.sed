# options: --scenario reap --strong --preemptions 1 --deaths 2
# A dead owner's commit intent outlives it.
/^static void finish_commit/,/^}/s/atomic_store_explicit(&slot->committing, 0, memory_order_release);/;/
