# options: --scenario readers --preemptions 2 --deaths 0 --delays 0
# A reader goes by the row alone, and takes no lock.
s/: file_lock_share(self->file.fd, pool_lock_slot(at));/: LOCK_TAKEN;/
