# options: --scenario ahead --strong --preemptions 1
# A delivered group makes room in silence.
/^bool lead_leave(/,/^}/s/^    tell(segment, left);/    ;/
