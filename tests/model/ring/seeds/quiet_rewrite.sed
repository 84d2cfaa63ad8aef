# options: --scenario retry --strong --preemptions 2 --deaths 0
# A row changes while it can be claimed.
/^void retry_withdraw/,/^}/s/atomic_store_explicit(&entry->claim, SHMBUS_RETRY_BUSY, memory_order_relaxed);/;/
