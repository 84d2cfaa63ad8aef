# options: --scenario late_rank --preemptions 3 --deaths 1 --delays 0
# A rank that has locked its piece does not look again whether the version is still being written.
s/^    if (atomic_load_explicit(&self->header->writing, memory_order_seq_cst) != word) {/    if (false) {/
s/if (row->sequence != sequence ||/if (/
