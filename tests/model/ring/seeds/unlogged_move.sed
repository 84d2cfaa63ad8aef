# options: --scenario move --strong --preemptions 1 --deaths 2
# A straggler's move leaves no note, so that its first copy may outlive the other's acknowledgement.
s/^    replay_move(segment);/    (void)replay_move;/
