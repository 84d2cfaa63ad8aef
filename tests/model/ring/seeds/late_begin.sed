# options: --scenario turns --strong --preemptions 1
# A late worker admits a group that other workers have made, and the trainer taken, once more.
/^static bool admit(/,/^}/s/if (is_over(segment, index, number, row)) {/if (false \&\& is_over(segment, index, number, row)) {/
