/* An intrusive, doubly linked list: a ring through its head, which is the list itself.
 *
 * Invariant: a link is in at most one list; one that is in none has no neighbours. */
#ifndef SHMBUS_PYTHON_LIST_H
#define SHMBUS_PYTHON_LIST_H

#include "python/binding.h"

struct list_link {
    struct list_link *previous, *next;
};

/* Of a link that is in a list, or of a list's head, which is empty then. */
static inline void list_init(struct list_link *head) {
    head->previous = head->next = head;
}

static inline bool list_is_empty(const struct list_link *head) {
    return head->next == head;
}

static inline void list_insert_before(struct list_link *at, struct list_link *link) {
    link->previous = at->previous;
    link->next = at;
    at->previous->next = link;
    at->previous = link;
}

/* What is in no list stays so. */
static inline void list_unlink(struct list_link *link) {
    if (link->next != NULL) {
        link->previous->next = link->next;
        link->next->previous = link->previous;
        link->previous = link->next = NULL;
    }
}

/* What a link is a member of. */
#define LIST_ENTRY(link, type, member) ((type *)(void *)((char *)(link) - offsetof(type, member)))

#endif
