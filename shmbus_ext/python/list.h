/* An intrusive, doubly linked list: a ring through its head.
 *
 * Invariant: a link is in at most a single list; an unlisted link lacks neighbours. */
#pragma once

#include "python/binding.h"

struct list_link {
    struct list_link *previous, *next;
};

/* Initialise a list's head as an empty list. */
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

/* No effect on an unlisted link. */
static inline void list_unlink(struct list_link *link) {
    if (link->next != NULL) {
        link->previous->next = link->next;
        link->next->previous = link->previous;
        link->previous = link->next = NULL;
    }
}

/* The structure containing a link. */
#define LIST_ENTRY(link, type, member) ((type *)(void *)((char *)(link) - offsetof(type, member)))
