# options: --scenario asking --weak --preemptions 2 --deaths 0
# A row can be claimed before what it asks for is there.
/^void wanted_publish/,/^}/s/memory_order_release/memory_order_relaxed/
