/* The last byte of an answer, and the note that it was sent.
 *
 * Whoever has the byte has the answer, so a successor has to find the note if and only if the byte
 * left this process. No call of the kernel does both; between the two lies the end of one short
 * call, in which nobody is woken.
 *
 * Invariants: a death before the note resets the connection, so that the client has no whole answer;
 * but for a death in that instant, after which client and successor both have it. What is noted
 * reaches a client that lives. */
#ifndef SHMBUS_GATEWAY_LAST_BYTE_H
#define SHMBUS_GATEWAY_LAST_BYTE_H

#include <stdatomic.h>
#include <stdint.h>

/* Sends a byte over a connected TCP socket and stores `number` in the note; returns 0 or an errno,
 * after which neither has happened. Never waits: EAGAIN where the socket has no room. */
int last_byte_send(int socket, char byte, _Atomic uint64_t *note, uint64_t number);

#endif
