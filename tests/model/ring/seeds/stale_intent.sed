# options: --scenario reap --strong --preemptions 1 --deaths 2
# A dead owner's commit intent outlives it.
/^static void finish_commit/,/^}/s/SET_RELEASE(slot->committing, 0);/;/
