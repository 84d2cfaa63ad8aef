# options: --scenario tight --strong --preemptions 3 --deaths 0
# A run that its owner sealed for want of space is not looked at.
/^static bool sealed_since/,/^}/s/phase == RUN_WALKING/phase == RUN_UNKNOWN/
