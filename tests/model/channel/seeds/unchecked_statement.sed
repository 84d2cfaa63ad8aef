# options: --scenario statements --preemptions 1 --deaths 0 --delays 0
# A reader of a statement does not look whether it was replaced meanwhile.
s/if (RELAXED(at->version) != before) {/if (false) {/
