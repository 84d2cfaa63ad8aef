# options: --scenario leaving --strong --preemptions 2 --deaths 0
# Who leaves puts back what is another's by now.
/^bool retry_claim/,/^}/s/producer_id + 1, SHMBUS_RETRY_FREE/segment->retries[at].claim, SHMBUS_RETRY_FREE/
