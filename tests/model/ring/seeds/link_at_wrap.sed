# options: --scenario wrap --strong --preemptions 1 --deaths 0
# A lane whose chain the collector has ended goes on without saying where.
/^static void link_run/,/^}/s/if (!linked) {/if (!linked \&\& self->last_link == 0) {/
