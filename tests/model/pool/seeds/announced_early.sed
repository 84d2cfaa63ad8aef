# options: --scenario reader --preemptions 1 --deaths 1 --delays 0
# Readers find a version before its row vouches for it.
s/^    set_state(self, slot, POOL_READY);/    atomic_store_explicit(\&header->latest, pool_word(sequence, slot), memory_order_release);\n    set_state(self, slot, POOL_READY);/
