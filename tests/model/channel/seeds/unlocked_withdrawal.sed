# options: --scenario resume --preemptions 1 --deaths 0 --delays 0
# A sender takes back what is on its way without the receiver's lock.
s/enum lock_status lock = file_lock_take(self->file.fd, receiver);/enum lock_status lock = LOCK_TAKEN;/
