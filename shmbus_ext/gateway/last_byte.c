/* The last byte of an answer: held by the kernel until nothing but the note is left to do.
 *
 * Two settings of the socket make that. Corked, it sends no byte, so no client wakes up and takes
 * this processor before the note is made. With a linger time of zero, its end is a reset, and what it
 * holds is thrown away. Invariant: no code of Python runs in between, and no lock is waited for. */
#include "gateway/last_byte.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/failpoints.h"

static void set_cork(int socket, int on) {
    /* A socket that cannot be corked sends at once: the instant is longer, no promise is another. */
    (void)setsockopt(socket, IPPROTO_TCP, TCP_CORK, &on, sizeof on);
}

static void set_reset_at_end(int socket, int on) {
    const struct linger linger = {.l_onoff = on, .l_linger = 0};
    (void)setsockopt(socket, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}

int last_byte_send(int socket, char byte, _Atomic uint64_t *note, uint64_t number) {
    int failure = 0;
    set_reset_at_end(socket, 1);
    set_cork(socket, 1);
    if (send(socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) != 1) {
        failure = errno == EWOULDBLOCK ? EAGAIN : errno;
    }
    FAILPOINT("answer-held");
    set_reset_at_end(socket, 0);
    if (failure == 0) {
        FAILPOINT("answer-let-go");
        atomic_store_explicit(note, number, memory_order_release);
        FAILPOINT("answer-noted");
    }
    set_cork(socket, 0);
    return failure;
}
