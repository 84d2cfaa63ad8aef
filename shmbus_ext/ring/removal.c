/* A bus that was removed: saying so, and finding out. */
#include "removal.h"

#include <sys/stat.h>

#include "base/clock.h"
#include "doorbell.h"

bool removal_note(struct segment *self) {
    struct stat found;
    if (removal_happened(self)) {
        return true;
    }
    /* A file that has another name still was renamed by a link, and goes on. */
    if (self->fd < 0 || fstat(self->fd, &found) != 0 || found.st_nlink > 0) {
        return false;
    }
    if (!self->read_only) {
        struct bus_header *header = self->header;
        atomic_store_explicit(&header->pause_unix_ns, clock_realtime_ns(), memory_order_relaxed);
        atomic_store_explicit(&header->paused, SHMBUS_REMOVED, memory_order_release);
        bell_ring_all(&header->space_bell);
        doorbell_ring(header);
    }
    return true;
}
