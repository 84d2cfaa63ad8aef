# options: --scenario prompts --strong --preemptions 1 --deaths 1
# A sample that a dead worker had in hand is open again, and nobody is told where.
/^static bool reopen/,/^}/s/mark_returned(segment, row);/(void)row;/
/^void request_reap/,/^}/s/mark_returned(segment, index);/(void)index;/
