# options: --scenario prompts --strong --preemptions 1 --deaths 1
# Whoever reaps a worker takes its last answer for one that is not in the ring, and has it made again.
/^static bool was_answered/,/^}/s/<=/</
