# options: --scenario successor --preemptions 2 --deaths 0 --delays 1
# Who rings counts first, and then clears the flag of one that has its ticket of after the count.
/^void bell_ring(/,/^}/{
s/^    atomic_fetch_add_explicit(&self->count.*//
s/^    atomic_store_explicit(&self->wanted, 0.*/    atomic_fetch_add_explicit(\&self->count, 1, memory_order_seq_cst);\n&/
}
