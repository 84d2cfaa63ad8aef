/* accept4 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "gateway/first_request.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

/* Of a connection that ended before it was accepted: the next one may be there. */
static bool is_of_one_connection(int failure) {
    return failure == EINTR || failure == ECONNABORTED || failure == EPROTO;
}

int first_request_accept(int listener, char *bytes, size_t room, size_t *count) {
    *count = 0;
    for (;;) {
        int found = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (found < 0) {
            if (is_of_one_connection(errno)) {
                continue;
            }
            return errno == EWOULDBLOCK ? -EAGAIN : -errno;
        }
        ssize_t received = recv(found, bytes, room, MSG_DONTWAIT);
        if (received < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            (void)close(found);
            continue;
        }
        *count = received > 0 ? (size_t)received : 0;
        return found;
    }
}

void first_request_answer(int socket, const char *answer, size_t count) {
    /* It fits what the kernel keeps for a connection; a client that has gone needs none. */
    (void)send(socket, answer, count, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)close(socket);
}
