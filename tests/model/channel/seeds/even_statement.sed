# options: --scenario statements --preemptions 1 --deaths 1 --delays 0
# A statement is not marked while it is being replaced.
s/^    SET_RELAXED(at->version, version);/    ;/
