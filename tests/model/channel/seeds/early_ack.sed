# options: --scenario one_slot --preemptions 1 --deaths 0 --delays 0
# A message is acknowledged as soon as a receiver has seen it.
s/^    \/\* The copy is checked and used, never the shared original\. \*\//    atomic_store_explicit(\&self->header->acked, counts.acked + 1, memory_order_release);/
s/SET_RELEASE(self->header->acked, acked + 1);/(void)acked;/
