# options: --scenario successor --preemptions 2 --deaths 0 --delays 1
# Who rings clears the flag of one that is about to sleep on the count that was rung.
/^    \/\* Once more/,/^    (void)syscall/s/^    atomic_fetch_add_explicit(words.count, 1, memory_order_seq_cst);//
