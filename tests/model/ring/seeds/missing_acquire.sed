# options: --scenario reserve --weak --preemptions 2 --deaths 0
# A collector reads a record's content from before the state that vouches for it.
/^enum record_verdict record_read_frame/,/^}/s/memory_order_acquire/memory_order_relaxed/
