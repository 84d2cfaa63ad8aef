# options: --scenario retry --strong --preemptions 2 --deaths 0
# A row changes while it can be claimed.
/^void retry_withdraw/,/^}/s/SET_RELAXED(entry->claim, SHMBUS_RETRY_BUSY);/;/
