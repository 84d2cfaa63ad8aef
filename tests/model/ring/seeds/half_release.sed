# options: --scenario successor --strong --preemptions 1
# A release that death interrupts is not finished.
s/^    replay_release(segment);/    (void)replay_release;/
