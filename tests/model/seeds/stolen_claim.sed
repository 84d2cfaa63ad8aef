# options: --scenario leaving --strong --preemptions 2 --deaths 0
# Who leaves puts back what is another's by now.
/^bool retry_unclaim/,/^}/s/expected = producer_id + 1/expected = segment->retries[at].claim + 0 * producer_id/
