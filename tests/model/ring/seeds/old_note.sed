# options: --scenario keep --strong --preemptions 1 --deaths 0
# The first run of a lane, which a straggler keeps, is noted as its last.
/^static void seal_chain/,/^}/s/run.order + 1 != next_order/next_order == 0/
