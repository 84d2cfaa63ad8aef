# options: --scenario pair --preemptions 1 --deaths 0 --delays 0
# Whether a side lives is two looks, and who has come between them is taken for one that has died.
s/if (RELAXED(row->claims) == claims) {/(void)claims;\n        if (true) {/
