/* Going on in the successor of a removed bus.
 *
 * Invariants:
 *  - The writer moves under the interpreter lock, in one piece: before it, its lane and segment are
 *    the old ones, and after it the new ones. Nobody copies into the old lane then (busy is 0), and
 *    nothing of it is open.
 *  - A thread that waits on the segment without the interpreter lock holds a reference to it, and
 *    checks again whether it is the writer's.
 *  - What was counted before goes on being counted. */
#define _GNU_SOURCE
#include "python/put/successor.h"

#include <unistd.h>

#include "python/hooks.h"
#include "python/put/put_many.h"
#include "python/put/reservation.h"
#include "base/clock.h"
#include "ring/removal.h"

/* Between two polls for a successor; and what other threads wait for the one that moves. */
#define POLL_US 20000
#define MOVE_POLL_US 500

static void pause_us(useconds_t us) {
    Py_BEGIN_ALLOW_THREADS
    usleep(us);
    Py_END_ALLOW_THREADS
}

static void leave_old_bus(WriterObject *self) {
    py_writer_abort_batches(self);
    py_writer_abort_open(self);
    writer_close(&self->c);
    py_segment_release_handle(self->segment);
}

/* Attaches to the next segment, and moves there; false with an exception. */
static bool move_to(WriterObject *self, SegmentObject *next) {
    struct writer fresh;
    enum writer_status status;
    Py_BEGIN_ALLOW_THREADS
    status = writer_attach_in_time(&fresh, &next->c, self->label);
    Py_END_ALLOW_THREADS
    if (status == WRITER_SYSTEM_ERROR) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, next->name);
        return false;
    }
    if (status != WRITER_OK) {
        py_raise_hook(hooks.busy_error, Py_BuildValue("(Os)", next, "producer"));
        return false;
    }
    /* Another thread's copy ends in its own record: nothing new is claimed in a removed bus. */
    while (self->busy > 0 && !self->closing) {
        pause_us(MOVE_POLL_US);
    }
    if (!py_writer_usable(self)) {
        writer_close(&fresh);
        return false;
    }
    leave_old_bus(self);
    self->committed_base += fresh.sequence - self->c.sequence;
    self->aborted_base += fresh.aborted - self->c.aborted;
    self->c = fresh;
    Py_SETREF(self->segment, (SegmentObject *)Py_NewRef((PyObject *)next));
    return true;
}

/* Whether it has moved, or another thread has; 0 where there is no successor yet, -1 with an
 * exception. */
static int try_to_move(WriterObject *self) {
    SegmentObject *before = self->segment;
    PyObject *next = PyObject_CallMethod((PyObject *)self, "_successor", NULL);
    if (next == NULL || next == Py_None) {
        Py_XDECREF(next);
        return next == NULL ? -1 : 0;
    }
    int moved = -1;
    if (!PyObject_TypeCheck(next, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "_successor: expected a Segment");
    } else if (self->segment != before) {
        moved = 1;
    } else if (py_writer_usable(self)) {
        moved = move_to(self, (SegmentObject *)next) ? 1 : -1;
    }
    if (self->segment != (SegmentObject *)next && PyObject_TypeCheck(next, &SegmentType)) {
        PyObject *error = py_set_aside_error();
        py_segment_release_handle((SegmentObject *)next);
        py_restore_error(error);
    }
    Py_DECREF(next);
    return moved;
}

static bool follow(WriterObject *self, double timeout_s) {
    SegmentObject *removed = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    uint64_t start = clock_monotonic_ns();
    double next_watch_s = py_watch_first_s(&self->watch);
    int moved = 0;
    while (moved == 0) {
        if (self->moving) {
            pause_us(MOVE_POLL_US);
        } else {
            self->moving = true;
            moved = try_to_move(self);
            self->moving = false;
        }
        double waited_s = (double)(clock_monotonic_ns() - start) / 1e9;
        if (moved != 0) {
            break;
        }
        if (self->segment != removed) {
            moved = 1;
        } else if (timeout_s >= 0 && waited_s >= timeout_s) {
            py_segment_raise_removed(removed);
            moved = -1;
        } else {
            pause_us(POLL_US);
            if (PyErr_CheckSignals() < 0 ||
                (waited_s >= next_watch_s &&
                 !py_watch_call(&self->watch, waited_s, &next_watch_s)) ||
                !py_writer_usable(self)) {
                moved = -1;
            }
        }
    }
    Py_DECREF(removed);
    return moved > 0;
}

PyObject *py_writer_follow(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    self->follow = follow;
    Py_RETURN_NONE;
}

PyObject *py_writer_go_on_call(WriterObject *self, PyObject *timeout) {
    double timeout_s;
    if (!py_parse_timeout(timeout, &timeout_s) || !py_writer_usable(self)) {
        return NULL;
    }
    if (removal_happened(&self->segment->c) && !py_writer_go_on(self, timeout_s)) {
        return NULL;
    }
    Py_RETURN_NONE;
}
