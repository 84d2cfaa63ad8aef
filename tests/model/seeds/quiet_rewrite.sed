# options: --scenario asking --strong --preemptions 2 --deaths 0
# A row changes while it can be claimed.
/^void wanted_withdraw/,/^}/s/atomic_store_explicit(&row->claim, SHMBUS_WANTED_BUSY, memory_order_relaxed);/;/
