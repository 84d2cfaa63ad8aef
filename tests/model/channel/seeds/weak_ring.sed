# options: --scenario one_slot --preemptions 2 --deaths 0 --delays 1
# Who rings looks at the flag first, while what it has changed may still be on its way.
/^void channel_ring/,/^}/s/^    \/\* SYNC: channel-bell.*/    if (atomic_load_explicit(words.wanted, memory_order_relaxed) == 0) {\n        return;\n    }/
