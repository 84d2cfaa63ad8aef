# options: --scenario retry --weak --preemptions 2 --deaths 0
# A row's new content may be there before its claim says BUSY.
/^void retry_withdraw/,/^}/s/atomic_thread_fence(memory_order_release);/;/
