/* channel_send_alike and channel_receive_alike: a step that is like the last one, in one call.
 *
 * Both do what the other functions do one after the other, for steps of which all that has to be
 * checked was checked: the same tensors, and a statement of the other side that is still the one
 * that was compared. Whatever is otherwise is None, with nothing done, and the caller goes the long
 * way, which has words for it.
 *
 * Invariant: None has changed nothing that the other side, or a later call, can see. */
#include "python/channel/channel_alike.h"

#include "channel/messages.h"
#include "channel/sides.h"
#include "python/channel/channel_form.h"
#include "python/channel/channel.h"
#include "python/segment/segment.h"
#include "base/checksum.h"

/* Copies and publishes, if there is a slot for it; from here on no code of others runs. */
static bool send_found(ChannelObject *self, const ChannelFormObject *form,
                       const struct form_found *found, PyObject *meta, bool expected,
                       long long *step) {
    struct channel_counts counts;
    if (self->memory != NULL || messages_counts(&self->c, &counts) != SHARED_OK ||
        counts.sent - counts.acked == self->c.slots) {
        return false;
    }
    long long next = counts.step_base + (long long)counts.sent;
    uint64_t meta_bytes = (uint64_t)PyBytes_GET_SIZE(meta);
    uint64_t needed = channel_meta_at(form->bytes) + meta_bytes;
    uint32_t slot = (uint32_t)(counts.sent % self->c.slots);
    uint64_t room = atomic_load_explicit(&self->c.rows[slot].room, memory_order_relaxed);
    if ((expected && *step != next) || needed > room || needed > self->slots[slot].mapped) {
        return false; /* it has to grow first */
    }
    uint8_t *at = self->slots[slot].at;
    for (Py_ssize_t i = 0; i < form->count; i++) {
        memcpy(at + form->tensors[i].offset, found->at[i], form->tensors[i].bytes);
    }
    *step = next;
    return messages_send(&self->c, CHANNEL_STEP, form->bytes, at,
                         (const uint8_t *)PyBytes_AS_STRING(meta), meta_bytes,
                         "") == SHARED_OK;
}

/* channel_send_alike(channel, form, seen, tensors, meta, step): the step, or None. `meta` is all of
 * it, or None for the form's head; `step` is the expected one, or None. */
static PyObject *send_alike(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 6 || !Py_IS_TYPE(args[0], &ChannelType) ||
        !Py_IS_TYPE(args[1], &ChannelFormType)) {
        PyErr_SetString(PyExc_TypeError, "channel_send_alike: expected a Channel, a ChannelForm, "
                                         "a version, tensors, meta and a step");
        return NULL;
    }
    ChannelObject *self = (ChannelObject *)args[0];
    ChannelFormObject *form = (ChannelFormObject *)args[1];
    PyObject *meta = args[4] == Py_None ? form->head : args[4];
    if (!py_companion_usable(&self->base) || !py_channel_has_side(self, CHANNEL_SENDER)) {
        return NULL;
    }
    uint64_t seen = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    struct form_found found;
    if (!PyBytes_CheckExact(meta) || form->bytes > CHANNEL_FORM_MAX_BYTES ||
        (args[5] != Py_None && !PyLong_CheckExact(args[5])) ||
        !py_channel_form_find(form, args[3], &found)) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    int overflow = 0;
    long long step = args[5] == Py_None ? -1 : PyLong_AsLongLongAndOverflow(args[5], &overflow);
    bool sent = overflow == 0 && py_companion_usable(&self->base) &&
                sides_stated(&self->c, CHANNEL_RECEIVER) == seen &&
                send_found(self, form, &found, meta, args[5] != Py_None, &step);
    py_channel_form_let_go(&found);
    if (PyErr_Occurred()) {
        return NULL;
    }
    return sent ? PyLong_FromLongLong(step) : Py_NewRef(Py_None);
}

/* A step's tensors, made over its slot before it has come. */
struct prepared {
    ChannelMemoryObject *memory;
    PyObject *tensors;
    uint32_t slot;
};

/* False where there can be none; with an exception, see py_channel_form_view. */
static bool prepare(ChannelObject *self, ChannelFormObject *form, uint32_t slot,
                    struct prepared *into) {
    uint8_t *at = self->slots[slot].at;
    if (at == NULL || self->slots[slot].mapped < form->bytes) {
        return false;
    }
    into->slot = slot;
    into->memory = py_channel_memory_new(at, form->bytes, true);
    into->tensors = into->memory == NULL ? NULL : py_channel_form_view(form, into->memory);
    return into->tensors != NULL;
}

static void unprepare(struct prepared *it) {
    Py_CLEAR(it->tensors);
    if (it->memory != NULL) {
        (void)py_channel_memory_end(it->memory);
        Py_CLEAR(it->memory);
    }
}

/* Waits for a message, without the interpreter lock; false with an exception where a signal's
 * handler has raised, or the handle was closed. */
static bool await_message(ChannelObject *self, uint32_t ticket, double wait_s) {
    enum bell_wait outcome;
    py_companion_add_user(&self->base);
    Py_BEGIN_ALLOW_THREADS
    outcome = bell_wait(channel_bell(self->c.header, CHANNEL_SENDER), ticket, (int64_t)(wait_s * 1e9));
    Py_END_ALLOW_THREADS
    py_companion_drop_user(&self->base);
    return (outcome != BELL_INTERRUPTED || PyErr_CheckSignals() == 0) &&
           py_companion_usable(&self->base);
}

/* Whether the message of this row is of the form; its meta is checked. */
static bool is_alike(const ChannelObject *self, const ChannelFormObject *form,
                     const struct channel_row *row) {
    uint64_t head = (uint64_t)PyBytes_GET_SIZE(form->head);
    uint32_t slot = (uint32_t)(row->sequence % self->c.slots);
    uint64_t meta_at = channel_meta_at(row->bytes);
    const uint8_t *at = self->slots[slot].at;
    return row->kind == CHANNEL_STEP && row->bytes == form->bytes && row->meta_bytes >= head &&
           self->slots[slot].mapped >= meta_at + row->meta_bytes &&
           memcmp(at + meta_at, PyBytes_AS_STRING(form->head), head) == 0 &&
           shmbus_crc32c(0, at + meta_at, row->meta_bytes) == row->meta_crc;
}

/* (kind, step, tensors, meta after the head, "") of a message of the form. */
static PyObject *hand_out(ChannelObject *self, ChannelFormObject *form, struct channel_row *row,
                          struct prepared *ready) {
    uint32_t slot = (uint32_t)(row->sequence % self->c.slots);
    if (ready->tensors == NULL || ready->slot != slot) {
        uint64_t sequence = row->sequence;
        unprepare(ready);
        if (!prepare(self, form, slot, ready)) {
            unprepare(ready);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
        /* It ran code of others, which may have used this handle. */
        if (!py_companion_usable(&self->base)) {
            return NULL;
        }
        if (messages_peek(&self->c, row) != SHARED_OK || row->sequence != sequence ||
            !is_alike(self, form, row)) {
            Py_RETURN_NONE;
        }
    }
    if (self->memory != NULL || self->slots[slot].at != ready->memory->at) {
        Py_RETURN_NONE;
    }
    uint64_t head = (uint64_t)PyBytes_GET_SIZE(form->head);
    const char *more = (const char *)self->slots[slot].at + channel_meta_at(row->bytes) + head;
    PyObject *result = Py_BuildValue("(iLOy#s)", CHANNEL_STEP, (long long)row->step,
                                     ready->tensors, more,
                                     (Py_ssize_t)(row->meta_bytes - head), "");
    if (result == NULL) {
        return NULL;
    }
    self->memory = ready->memory;
    self->memory_slot = slot;
    ready->memory = NULL;
    Py_CLEAR(ready->tensors);
    return result;
}

/* channel_receive_alike(channel, form, seen, wait_s): as channel_receive says, with tensors by name
 * in place of memory and the meta that follows the head; None also where a message is there that is
 * not of the form. It waits so long for one, at most. */
static PyObject *receive_alike(PyObject *module, PyObject *args) {
    (void)module;
    ChannelObject *self;
    ChannelFormObject *form;
    unsigned long long seen;
    double wait_s;
    if (!PyArg_ParseTuple(args, "O!O!Kd", &ChannelType, &self, &ChannelFormType, &form, &seen,
                          &wait_s) ||
        !py_companion_usable(&self->base) || !py_channel_has_side(self, CHANNEL_RECEIVER)) {
        return NULL;
    }
    if (sides_stated(&self->c, CHANNEL_SENDER) != seen || !py_channel_end_memory(self)) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    struct channel_row row;
    struct prepared ready = {NULL, NULL, 0};
    PyObject *result = NULL;
    enum shared_status status = messages_peek(&self->c, &row);
    if (status == SHARED_NOTHING && wait_s > 0) {
        struct channel_counts counts;
        if (messages_counts(&self->c, &counts) == SHARED_OK &&
            !prepare(self, form, (uint32_t)(counts.acked % self->c.slots), &ready)) {
            unprepare(&ready);
        }
        if (PyErr_Occurred() || !py_companion_usable(&self->base)) {
            goto done;
        }
        uint32_t ticket = bell_announce(channel_bell(self->c.header, CHANNEL_SENDER));
        status = messages_peek(&self->c, &row);
        if (status == SHARED_NOTHING && sides_stated(&self->c, CHANNEL_SENDER) == seen) {
            if (!await_message(self, ticket, wait_s)) {
                goto done;
            }
            status = messages_peek(&self->c, &row);
        }
    }
    bool alike = status == SHARED_OK && sides_stated(&self->c, CHANNEL_SENDER) == seen &&
                 is_alike(self, form, &row);
    result = alike ? hand_out(self, form, &row, &ready) : Py_NewRef(Py_None);
done:
    unprepare(&ready);
    return result;
}

static PyMethodDef functions[] = {
    {"channel_send_alike", (PyCFunction)(void (*)(void))send_alike, METH_FASTCALL, NULL},
    {"channel_receive_alike", receive_alike, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_channel_alike_add_functions(PyObject *module) {
    return PyModule_AddIntConstant(module, "CHANNEL_FORM_MAX_TENSORS",
                                   CHANNEL_FORM_MAX_TENSORS) == 0 &&
           PyModule_AddIntConstant(module, "CHANNEL_FORM_MAX_BYTES", CHANNEL_FORM_MAX_BYTES) ==
               0 &&
           PyModule_AddFunctions(module, functions) == 0;
}
