# options: --scenario late_rank --preemptions 2 --deaths 1 --delays 0
# A publisher does not look whether a rank of an earlier one still writes into the slot.
s/^    if (has_writer(self, slot)) {/    (void)has_writer;\n    if (false) {/
