/* A connection and what its client asks first, and an answer that ends one.
 *
 * Clients of Atropos make a connection for each request. Where the kernel holds a connection back
 * until its client has sent something, both come in one go, and a short answer ends it without a
 * transport of an event loop. Invariant: nothing here waits. */
#ifndef SHMBUS_GATEWAY_FIRST_REQUEST_H
#define SHMBUS_GATEWAY_FIRST_REQUEST_H

#include <stddef.h>

/* Accepts a connection, non-blocking, and reads up to `room` bytes that its client has sent: none
 * is zero bytes, which is no error. Returns its socket, or an errno below zero: -EAGAIN where no
 * connection waits. */
int first_request_accept(int listener, char *bytes, size_t room, size_t *count);

/* Sends as much of an answer as the socket takes, and ends the connection in order. */
void first_request_answer(int socket, const char *answer, size_t count);

#endif
