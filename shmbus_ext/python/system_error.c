/* What the kernel refused (see system_error.h). */
#include "python/system_error.h"

#include <errno.h>
#include <unistd.h>

PyObject *py_raise_system(const char *kind, PyObject *name) {
    int why = errno;
    /* The file is open already: what is missing is the way to open it a second time. */
    if (why == ENOENT && access("/proc/self/fd", F_OK) != 0) {
        return PyErr_Format(PyExc_OSError,
                            "%s '%U': this process needs /proc/self/fd, to map a %s apart from its "
                            "locks, and there is no /proc here; mount it (mount -t proc proc "
                            "/proc), or start the container with it",
                            kind, name, kind);
    }
    errno = why;
    return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name);
}
