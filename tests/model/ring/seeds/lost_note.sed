# options: --scenario successor --strong --preemptions 1
# The noted run of a lane is freed before its owner has noted the one behind it.
s/^        note_successor(self, extent, next);/        (void)note_successor;/
