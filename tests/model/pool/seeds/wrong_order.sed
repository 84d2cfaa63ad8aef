# options: --scenario ranks --preemptions 1 --deaths 0 --delays 0
# The version is said not to be written any more before it is the newest: ranks believe it lost.
s/^    set_state(self, slot, POOL_READY);/    set_state(self, slot, POOL_READY);\n    atomic_store_explicit(\&header->writing, 0, memory_order_seq_cst);/
