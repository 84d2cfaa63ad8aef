# options: --scenario reader --preemptions 2 --deaths 1 --delays 0
# The publisher takes the newest slot too.
s/if (i != newest && !tried\[i\] &&/if (!tried[i] \&\&/
/^static uint32_t choose_slot(/,/^}/s/uint32_t newest = pool_word_slot(/(void)pool_word_slot(/
