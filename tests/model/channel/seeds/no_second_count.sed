# options: --scenario pair --preemptions 1 --deaths 0 --delays 0
# Whether a side lives is two looks, and who has come between them is taken for one that has died.
s/if (atomic_load_explicit(&row->claims, memory_order_relaxed) == claims) {/(void)claims;\n        if (true) {/
