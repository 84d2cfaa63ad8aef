# options: --scenario pair --preemptions 2 --deaths 0 --delays 0
# A side that leaves gives its lock back before it says that it ends by its own will.
/^void sides_leave/,/^}/s/^    put_text(row->reason, sizeof row->reason, reason);/    file_lock_drop(self->file.fd, CHANNEL_LOCK_SIDE + side);\n    put_text(row->reason, sizeof row->reason, reason);/
