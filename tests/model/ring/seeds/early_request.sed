# options: --scenario retry --weak --preemptions 2 --deaths 0
# A row can be claimed before what it asks for is there.
/^void retry_publish/,/^}/s/SET_RELEASE/SET_RELAXED/
