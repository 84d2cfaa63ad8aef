/* Visits every state of a system of parts that exchange messages.
 *
 * A state consists of each part's number, the messages under way, and the remaining faults. The
 * search asks the caller for a part's reaction to a message, once for each state of the part: whole
 * states are many, states of a part are few. So the parts are real programs, however slow, and the
 * search runs at the speed of its tables.
 *
 * Invariants:
 *
 * - Messages are a bag without an order: any of them may arrive next.
 * - A hash of 64 bits identifies a state. Among 10^8 states two collide with a probability of 3 in
 *   10,000.
 * - States are visited in the order of their distance: the way to a bad state is a shortest way.
 * - A message leaves a state only if its part would ignore the message now, and by the caller's
 *   word for good. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    PARTS = 4,
    RESTLESS_PARTS = 2, /* the first parts: the rest only answer */
    MOST_MESSAGES = 96, /* under way at once */
    MOST_SAID = 96,     /* by a part at once */
    /* A message: its number, its receiver, and a bit for each part that sent or awaits it. */
    NUMBER_BITS = 22,
    FOR_BITS = 2,
    /* A part's inputs beside messages. */
    DIE = (1 << NUMBER_BITS) - 1,
    STEP = DIE - 1,
    ASK = DIE - 2,
};

/* A part with a step of its own. */
#define CAN_STEP (UINT32_C(1) << 31)

/* The caller's verdict on an input. */
enum {
    FOR_NOTHING = 1,             /* ignored, now and for ever */
    FOR_NOTHING_IN_HIS_LIFE = 2, /* ignored while this part lives */
    VIOLATION = 4,
};

/* Kinds of events, in the upper bits of an event; the lower bits hold the message or the part. */
enum { DELIVER, LOSE, DOUBLE, STEPPED, DIED, DIED_WITH_MESSAGES, ASKED, ASKED_AT_REST };
#define EVENT_SHIFT 28

/* Negative results of a search. */
enum { TOO_MANY_STATES = -1, TOO_MANY_MESSAGES = -2, NO_MEMORY = -3, BAD = -4, NO_END = -5 };

struct state {
    uint32_t part[PARTS];
    uint8_t deaths, losses, doubles, hurries; /* remaining faults */
    uint32_t count;
    uint32_t message[MOST_MESSAGES];
};

struct system_of_parts {
    /* Writes the part's next number, flags and messages; returns the count of words. */
    int (*next)(uint32_t part, uint32_t number, uint32_t input, uint32_t *into);
    /* The same for every part at once, with nothing under way: repeated questions. Returns 0 at a
     * good end, and below 0 at a bad end. */
    int (*rest)(const uint32_t *parts, uint32_t *into);
};

struct transition {
    uint64_t key; /* 0: empty */
    size_t at;    /* of `said` */
};

struct parent {
    uint32_t state, event;
};

struct search {
    struct system_of_parts system;
    struct transition *transitions;
    size_t transition_slots, transition_count;
    uint32_t *said; /* number of words, then the words */
    size_t said_used, said_room;
    uint64_t *seen;
    size_t seen_slots;
    struct parent *parents;
    size_t count, parent_room;
    uint32_t *queue; /* seen states before their visit, in order */
    size_t first, last, queue_room;
    size_t most_states;
    uint64_t events;
    struct parent bad;
    uint32_t longest; /* most rounds of asking from a rest to its end */
};

static uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= UINT64_C(0xd6e8feb86659fd93);
    h ^= h >> 32;
    h *= UINT64_C(0xd6e8feb86659fd93);
    return h ^ h >> 32;
}

static size_t words_of(const struct state *s) {
    return offsetof(struct state, message) / sizeof(uint32_t) + s->count;
}

static uint64_t hash_of(const struct state *s) {
    const uint32_t *word = (const uint32_t *)s;
    uint64_t h = UINT64_C(0x9e3779b97f4a7c15);
    for (size_t i = 0; i < words_of(s); i++)
        h = mix(h + (word[i] + 1) * UINT64_C(0xff51afd7ed558ccd));
    return h ? h : 1;
}

/* Makes room for `used` elements; false without memory. */
static bool grow(void **memory, size_t *room, size_t used, size_t element) {
    if (used <= *room)
        return true;
    size_t wanted = used * 2;
    void *bigger = realloc(*memory, wanted * element);
    if (!bigger)
        return false;
    *memory = bigger;
    *room = wanted;
    return true;
}

static uint32_t part_of(uint32_t message) {
    return message >> NUMBER_BITS & ((1u << FOR_BITS) - 1);
}

static bool concerns(uint32_t message, uint32_t part) {
    return message >> (NUMBER_BITS + FOR_BITS) >> part & 1;
}

/* Whether a message crosses a network: an event without receivers happens at once. */
static bool may_fail(uint32_t message) {
    return message >> (NUMBER_BITS + FOR_BITS);
}

/* --- reactions of parts, asked once ---------------------------------------------------------- */

static bool more_transitions(struct search *s) {
    size_t slots = s->transition_slots ? s->transition_slots * 2 : 1 << 16;
    struct transition *bigger = calloc(slots, sizeof *bigger);
    if (!bigger)
        return false;
    for (size_t i = 0; i < s->transition_slots; i++)
        if (s->transitions[i].key) {
            size_t at = mix(s->transitions[i].key) & (slots - 1);
            while (bigger[at].key)
                at = (at + 1) & (slots - 1);
            bigger[at] = s->transitions[i];
        }
    free(s->transitions);
    s->transitions = bigger;
    s->transition_slots = slots;
    return true;
}

/* The part's answer to an input, as written by the caller, with the number of words first. */
static const uint32_t *ask(struct search *s, uint32_t part, uint32_t number, uint32_t input) {
    number &= ~CAN_STEP;
    uint64_t key = (uint64_t)number << 32 | (uint64_t)(part + 1) << NUMBER_BITS | input;
    size_t mask = s->transition_slots - 1, at = mix(key) & mask;
    while (s->transitions[at].key) {
        if (s->transitions[at].key == key)
            return s->said + s->transitions[at].at;
        at = (at + 1) & mask;
    }
    uint32_t words[2 + MOST_SAID];
    int count = s->system.next(part, number, input, words);
    if (count < 0)
        return NULL;
    void *memory = s->said;
    if (!grow(&memory, &s->said_room, s->said_used + (size_t)count + 1, sizeof *s->said))
        return NULL;
    s->said = memory;
    s->transitions[at] = (struct transition){key, s->said_used};
    s->said[s->said_used] = (uint32_t)count;
    memcpy(s->said + s->said_used + 1, words, (size_t)count * sizeof *words);
    uint32_t *found = s->said + s->said_used;
    s->said_used += (size_t)count + 1;
    if (++s->transition_count * 2 > s->transition_slots && !more_transitions(s))
        return NULL;
    return found;
}

/* --- states ---------------------------------------------------------------------------------- */

/* Sends the answer; false if too much is under way. */
static bool send(struct state *s, const uint32_t *messages, uint32_t count) {
    if (s->count + count > MOST_MESSAGES)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = s->count++;
        for (; at && s->message[at - 1] > messages[i]; at--)
            s->message[at] = s->message[at - 1];
        s->message[at] = messages[i];
    }
    return true;
}

static void take_out(struct state *s, uint32_t at) {
    memmove(s->message + at, s->message + at + 1, (size_t)(--s->count - at) * sizeof *s->message);
}

static void lose_all_of(struct state *s, uint32_t part) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < s->count; i++)
        if (!concerns(s->message[i], part))
            s->message[left++] = s->message[i];
    s->count = left;
}

/* Has a part take an input. Returns 0, or the reason for the search's end. */
static int act(struct search *search, struct state *s, uint32_t part, uint32_t input) {
    const uint32_t *done = ask(search, part, s->part[part], input);
    if (!done)
        return NO_MEMORY;
    if (done[2] & VIOLATION)
        return BAD;
    s->part[part] = done[1];
    return send(s, done + 3, done[0] - 2) ? 0 : TOO_MANY_MESSAGES;
}

/* Removes messages that any receiver would ignore at any time. */
static int without_the_dead(struct search *search, struct state *s) {
    for (uint32_t i = 0; i < s->count;) {
        uint32_t message = s->message[i], part = part_of(message);
        const uint32_t *done = ask(search, part, s->part[part], message & DIE);
        if (!done)
            return NO_MEMORY;
        uint32_t flags = done[2];
        bool dead = flags & FOR_NOTHING || (flags & FOR_NOTHING_IN_HIS_LIFE && !s->deaths);
        if (dead)
            take_out(s, i);
        else
            i++;
    }
    return 0;
}

static bool at_rest(const struct state *s) {
    bool rest = !s->count;
    for (int i = 0; i < PARTS; i++)
        rest = rest && !(s->part[i] & CAN_STEP);
    return rest;
}

/* Does an event. Returns 0, or the reason for the search's end; 1 at an end without questions. */
static int happen(struct search *search, struct state *s, uint32_t event) {
    uint32_t kind = event >> EVENT_SHIFT, what = event & ((1u << EVENT_SHIFT) - 1);
    int why = 0;
    switch (kind) {
    case DELIVER: {
        uint32_t message = s->message[what];
        take_out(s, what);
        why = act(search, s, part_of(message), message & DIE);
        break;
    }
    case LOSE:
        s->losses--;
        take_out(s, what);
        break;
    case DOUBLE: {
        uint32_t message = s->message[what];
        s->doubles--;
        if (!send(s, &message, 1))
            why = TOO_MANY_MESSAGES;
        break;
    }
    case STEPPED:
        why = act(search, s, what, STEP);
        break;
    case DIED_WITH_MESSAGES:
        lose_all_of(s, what);
        /* fall through */
    case DIED:
        s->deaths--;
        why = act(search, s, what, DIE);
        break;
    case ASKED:
        s->hurries--;
        why = act(search, s, what, ASK);
        break;
    case ASKED_AT_REST: {
        uint32_t words[PARTS + MOST_SAID];
        int count = search->system.rest(s->part, words);
        if (count <= 0)
            return count < 0 ? BAD : 1;
        memcpy(s->part, words, sizeof s->part);
        if (!send(s, words + PARTS, (uint32_t)count - PARTS))
            return TOO_MANY_MESSAGES;
    }
    }
    return why ? why : without_the_dead(search, s);
}

/* --- the search ------------------------------------------------------------------------------ */

static bool more_seen(struct search *s) {
    size_t slots = s->seen_slots ? s->seen_slots * 2 : 1 << 16;
    uint64_t *bigger = calloc(slots, sizeof *bigger);
    if (!bigger)
        return false;
    for (size_t i = 0; i < s->seen_slots; i++)
        if (s->seen[i]) {
            size_t at = s->seen[i] & (slots - 1);
            while (bigger[at])
                at = (at + 1) & (slots - 1);
            bigger[at] = s->seen[i];
        }
    free(s->seen);
    s->seen = bigger;
    s->seen_slots = slots;
    return true;
}

/* Queues an unseen state. */
static int meet(struct search *s, const struct state *state, struct parent from) {
    uint64_t hash = hash_of(state);
    size_t at = hash & (s->seen_slots - 1);
    while (s->seen[at]) {
        if (s->seen[at] == hash)
            return 0;
        at = (at + 1) & (s->seen_slots - 1);
    }
    s->seen[at] = hash;
    if (s->count == s->most_states)
        return TOO_MANY_STATES;
    void *memory = s->parents;
    if (!grow(&memory, &s->parent_room, s->count + 1, sizeof *s->parents))
        return NO_MEMORY;
    s->parents = memory;
    s->parents[s->count++] = from;
    if (s->count * 2 > s->seen_slots && !more_seen(s))
        return NO_MEMORY;
    if (s->first > s->queue_room / 2) {
        memmove(s->queue, s->queue + s->first, (s->last - s->first) * sizeof *s->queue);
        s->last -= s->first;
        s->first = 0;
    }
    memory = s->queue;
    if (!grow(&memory, &s->queue_room, s->last + words_of(state), sizeof *s->queue))
        return NO_MEMORY;
    s->queue = memory;
    memcpy(s->queue + s->last, state, words_of(state) * sizeof *s->queue);
    s->last += words_of(state);
    return 0;
}

static void copy_state(struct state *to, const struct state *from) {
    memcpy(to, from, words_of(from) * sizeof(uint32_t));
}

/* Follows a single order from a rest; true for a good end without a further fault. */
static int follow_to_end(struct search *search, const struct state *from) {
    enum { MOST_ROUNDS = 32, MOST_EVENTS = 4096 };
    struct state s;
    copy_state(&s, from);
    uint32_t rounds = 0;
    for (int events = 0; rounds < MOST_ROUNDS && events < MOST_EVENTS; events++) {
        uint32_t event = (uint32_t)ASKED_AT_REST << EVENT_SHIFT;
        uint32_t part = 0;
        if (s.count)
            event = (uint32_t)DELIVER << EVENT_SHIFT;
        else {
            while (part < PARTS && !(s.part[part] & CAN_STEP))
                part++;
            if (part < PARTS)
                event = (uint32_t)STEPPED << EVENT_SHIFT | part;
            else
                rounds++;
        }
        int why = happen(search, &s, event);
        if (why == 1) {
            search->longest = rounds > search->longest ? rounds : search->longest;
            return 0;
        }
        if (why)
            return why;
    }
    return NO_END;
}

/* Tries an event from a state. */
static int attempt(struct search *search, const struct state *from, uint32_t number,
                   uint32_t event) {
    struct state s;
    copy_state(&s, from);
    search->events++;
    int why = happen(search, &s, event);
    struct parent parent = {number, event};
    if (event >> EVENT_SHIFT <= DOUBLE) /* as its number: its place means nothing elsewhere */
        parent.event = (event & ~((1u << EVENT_SHIFT) - 1)) |
                       from->message[event & ((1u << EVENT_SHIFT) - 1)];
    if (!why)
        why = meet(search, &s, parent);
    if (why < 0)
        search->bad = parent;
    return why;
}

static int visit(struct search *search, const struct state *s, uint32_t number) {
    int why = 0;
#define TRY(kind, what)                                                                          \
    if (why >= 0)                                                                                \
    why = attempt(search, s, number, (uint32_t)(kind) << EVENT_SHIFT | (what))
    for (uint32_t i = 0; i < s->count; i++) {
        if (i && s->message[i] == s->message[i - 1])
            continue;
        TRY(DELIVER, i);
        if (s->losses && may_fail(s->message[i]))
            TRY(LOSE, i);
        if (s->doubles && may_fail(s->message[i]))
            TRY(DOUBLE, i);
    }
    for (uint32_t part = 0; part < PARTS; part++) {
        if (s->part[part] & CAN_STEP)
            TRY(STEPPED, part);
        if (s->deaths) {
            TRY(DIED, part);
            TRY(DIED_WITH_MESSAGES, part);
        }
        if (s->hurries && part < RESTLESS_PARTS)
            TRY(ASKED, part);
    }
    if (at_rest(s)) {
        TRY(ASKED_AT_REST, 0u);
        if (why >= 0) {
            why = follow_to_end(search, s);
            if (why < 0)
                search->bad = (struct parent){number, (uint32_t)ASKED_AT_REST << EVENT_SHIFT};
        }
    }
    return why < 0 ? why : 0;
}

/* A search from a state, given as the words of `struct state`; NULL without memory. */
struct search *search_begin(const uint32_t *first, struct system_of_parts system,
                            uint64_t most_states) {
    struct search *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->system = system;
    s->most_states = most_states < UINT32_MAX ? most_states : UINT32_MAX - 1;
    struct state state;
    memcpy(&state, first, sizeof state);
    if (more_transitions(s) && more_seen(s) && !without_the_dead(s, &state) &&
        !meet(s, &state, (struct parent){UINT32_MAX, 0}))
        return s;
    return NULL;
}

/* Visits every state. Returns 0, or the reason for its end. */
int search_run(struct search *search) {
    int why = 0;
    for (uint32_t number = 0; !why && search->first < search->last; number++) {
        struct state state;
        copy_state(&state, (const struct state *)(search->queue + search->first));
        search->first += words_of(&state);
        why = visit(search, &state, number);
    }
    return why;
}

/* Seen states; tried events; questions to parts; rounds to an end. */
void search_counts(const struct search *s, uint64_t *into) {
    into[0] = s->count;
    into[1] = s->events;
    into[2] = s->transition_count;
    into[3] = s->longest;
}

/* Events on the way to the search's end, the last event first. Returns their count. */
uint32_t search_way(const struct search *s, uint32_t *into, uint32_t room) {
    uint32_t count = 0;
    struct parent at = s->bad;
    for (; count < room; at = s->parents[at.state]) {
        into[count++] = at.event;
        if (s->parents[at.state].state == UINT32_MAX)
            break;
    }
    return count;
}

void search_end(struct search *s) {
    free(s->transitions);
    free(s->said);
    free(s->seen);
    free(s->parents);
    free(s->queue);
    free(s);
}
