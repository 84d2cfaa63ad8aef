/* The relay's journal for shmbus.relay: entries and origins travel as packed bytes.
 *
 * Invariant: an entry number from Python is range-checked before use. */
#include "python/put/put.h"

#include "ring/recovery.h"
#include "ring/relay_journal.h"

/* relay_begin(segment) -> int | None: this sink's incarnation; None while a different sink runs. */
SEGMENT_FUNCTION(py_relay_begin, py_take_writable) {
    enum relay_begun begun;
    Py_BEGIN_ALLOW_THREADS
    begun = relay_begin(&segment->c);
    Py_END_ALLOW_THREADS
    if (begun == RELAY_SYSTEM_ERROR) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (begun == RELAY_BUSY) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(RELAXED(segment->c.relay->incarnation));
}

/* For O& of PyArg_ParseTuple: a usable Writer. */
static int take_writer(PyObject *object, void *writer) {
    NEVER(!PyObject_TypeCheck(object, &WriterType), 0);
    *(WriterObject **)writer = (WriterObject *)object;
    return py_writer_usable((WriterObject *)object);
}

/* relay_bind(writer): register the writer's lane as the sink's. */
static PyObject *py_relay_bind(PyObject *Py_UNUSED(module), PyObject *object) {
    WriterObject *writer;
    if (!take_writer(object, &writer)) {
        return NULL;
    }
    relay_bind(&writer->segment->c, &writer->c);
    Py_RETURN_NONE;
}

/* Check packed entries against the journal's size; `new_too` permits RELAY_NEW. */
static bool entries_hold(const SegmentObject *segment, const Py_buffer *packed, bool new_too) {
    NEVER(packed->len % (Py_ssize_t)sizeof(uint32_t) != 0, false);
    for (Py_ssize_t i = 0; i < packed->len; i += (Py_ssize_t)sizeof(uint32_t)) {
        uint32_t entry;
        memcpy(&entry, (const uint8_t *)packed->buf + i, sizeof entry);
        NEVER(entry >= segment->c.relay_entry_count && !(new_too && entry == RELAY_NEW), false);
    }
    return true;
}

/* Unpack origins for the journal into a block to free; NULL with an exception. */
static struct relay_origin *unpack_origins(const Py_buffer *packed) {
    const size_t n = (size_t)packed->len / RELAY_ORIGIN_BYTES;
    struct relay_origin *origins = PyMem_Calloc(n + 1, sizeof *origins);
    if (origins == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    const uint8_t *at = packed->buf;
    for (size_t i = 0; i < n; i++, at += RELAY_ORIGIN_BYTES) {
        memcpy(origins[i].identity, at, SHMBUS_IDENTITY_BYTES);
        origins[i].producer_id = origin_unpack_number(at + SHMBUS_IDENTITY_BYTES);
        origins[i].sequence = origin_unpack_number(at + SHMBUS_IDENTITY_BYTES + 8);
    }
    return origins;
}

/* relay_intend(writer, origins, entries) -> bytes | None: the entries' numbers; None without room
 * in the journal. Origins are packed (ring/segment.h). */
static PyObject *py_relay_intend(PyObject *Py_UNUSED(module), PyObject *args) {
    WriterObject *writer;
    Py_buffer origins, entries;
    if (!PyArg_ParseTuple(args, "O&y*y*", take_writer, &writer, &origins, &entries)) {
        return NULL;
    }
    PyObject *result = NULL;
    const Py_ssize_t n = entries.len / (Py_ssize_t)sizeof(uint32_t);
    struct relay_origin *each = NULL;
    if (origins.len != n * (Py_ssize_t)RELAY_ORIGIN_BYTES) {
        PyErr_SetString(PyExc_ValueError, "origins: expected 32 bytes for each entry");
    } else if (entries_hold(writer->segment, &entries, true) &&
               (each = unpack_origins(&origins)) != NULL) {
        result = PyBytes_FromStringAndSize(entries.buf, entries.len);
    }
    if (result != NULL &&
        !relay_intend(&writer->segment->c, &writer->c, each,
                      (uint32_t *)(void *)PyBytes_AS_STRING(result), (uint32_t)n)) {
        Py_SETREF(result, Py_NewRef(Py_None));
    }
    PyMem_Free(each);
    PyBuffer_Release(&origins);
    PyBuffer_Release(&entries);
    return result;
}

/* relay_drop(segment, origins, reason) -> bytes | None: entries of records dropped instead of
 * put. */
static PyObject *py_relay_drop(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    Py_buffer origins;
    int reason;
    if (!PyArg_ParseTuple(args, "O&y*i", py_take_writable, &segment, &origins, &reason)) {
        return NULL;
    }
    PyObject *result = NULL;
    struct relay_origin *each = NULL;
    const Py_ssize_t n = origins.len / (Py_ssize_t)RELAY_ORIGIN_BYTES;
    if (origins.len % (Py_ssize_t)RELAY_ORIGIN_BYTES != 0 || reason < 0 ||
        reason >= SHMBUS_REASONS) {
        PyErr_SetString(PyExc_ValueError, "relay_drop: expected origins of 32 bytes, and a reason");
    } else if ((each = unpack_origins(&origins)) != NULL) {
        result = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(uint32_t));
    }
    if (result != NULL &&
        !relay_drop(&segment->c, each, (uint32_t *)(void *)PyBytes_AS_STRING(result), (uint32_t)n,
                    (uint32_t)reason)) {
        Py_SETREF(result, Py_NewRef(Py_None));
    }
    PyMem_Free(each);
    PyBuffer_Release(&origins);
    return result;
}

/* relay_settle(writer, entries): settle the committed entries. */
static PyObject *py_relay_settle(PyObject *Py_UNUSED(module), PyObject *args) {
    WriterObject *writer;
    Py_buffer entries;
    if (!PyArg_ParseTuple(args, "O&y*", take_writer, &writer, &entries)) {
        return NULL;
    }
    bool good = entries_hold(writer->segment, &entries, false);
    if (good) {
        relay_settle(&writer->segment->c, &writer->c, entries.buf,
                     (uint32_t)((size_t)entries.len / sizeof(uint32_t)));
    }
    PyBuffer_Release(&entries);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* relay_forget(segment, entries): forget entries no longer held by a source, or never to be put. */
static PyObject *py_relay_forget(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    Py_buffer entries;
    if (!PyArg_ParseTuple(args, "O&y*", py_take_writable, &segment, &entries)) {
        return NULL;
    }
    bool good = entries_hold(segment, &entries, false);
    if (good) {
        relay_forget(&segment->c, entries.buf, (uint32_t)((size_t)entries.len / sizeof(uint32_t)));
    }
    PyBuffer_Release(&entries);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* relay_notes(segment, ended=False) -> [(entry, origin, state, end reason or -1)]: every entry in
 * force, or the settled entries of ended records that their source has not released yet. */
static PyObject *py_relay_notes(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    int ended = 0;
    if (!PyArg_ParseTuple(args, "O&|p", py_take_segment, &segment, &ended)) {
        return NULL;
    }
    PyObject *notes = PyList_New(0);
    for (uint32_t i = 0; notes != NULL && i < segment->c.relay_entry_count; i++) {
        struct relay_note note;
        if ((ended && RELAXED(segment->c.relay_entries[i].ended) == 0) ||
            !relay_read(&segment->c, i, &note) ||
            (ended && (note.state != RELAY_SETTLED || note.ended == 0))) {
            continue;
        }
        char origin[RELAY_ORIGIN_BYTES];
        origin_pack(origin, note.origin.identity, note.origin.producer_id, note.origin.sequence);
        py_list_add(&notes,
                    Py_BuildValue("(Iy#ii)", i, origin, (Py_ssize_t)sizeof origin, (int)note.state,
                                  note.ended > SHMBUS_REASONS ? -1 : (int)note.ended - 1));
    }
    return notes;
}

/* relay_words(segment) -> (entries, writer, incarnation, source_incarnation, term, ended, seen_ns,
 * figures): the journal's header. */
SEGMENT_FUNCTION(py_relay_words, py_take_segment) {
    struct relay_journal *journal = segment->c.relay;
    PyObject *figures = PyTuple_New(SHMBUS_RELAY_FIGURES);
    for (int i = 0; figures != NULL && i < (int)SHMBUS_RELAY_FIGURES; i++) {
        py_tuple_set(&figures, i, PyLong_FromUnsignedLongLong(RELAXED(journal->figures[i])));
    }
    if (figures == NULL) {
        return NULL;
    }
    return Py_BuildValue("(IKKKLKKN)", segment->c.relay_entry_count, U64(ACQUIRE(journal->writer)),
                         U64(RELAXED(journal->incarnation)),
                         U64(RELAXED(journal->source_incarnation)),
                         (long long)RELAXED(journal->term), U64(ACQUIRE(journal->ended)),
                         U64(RELAXED(journal->seen_ns)), figures);
}

/* relay_note(segment, term, seen_ns, figures): store notes for the sink's successor, and for
 * messages. */
static PyObject *py_relay_note(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *figures;
    SegmentObject *segment;
    long long term;
    unsigned long long seen_ns;
    if (!PyArg_ParseTuple(args, "O&LKO!", py_take_writable, &segment, &term, &seen_ns,
                          &PyTuple_Type, &figures)) {
        return NULL;
    }
    NEVER(PyTuple_GET_SIZE(figures) > (Py_ssize_t)SHMBUS_RELAY_FIGURES, NULL);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(figures); i++) {
        unsigned long long figure = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(figures, i));
        if (figure == (unsigned long long)-1 && PyErr_Occurred()) {
            return NULL;
        }
        SET_RELAXED(segment->c.relay->figures[i], figure);
    }
    SET_RELAXED(segment->c.relay->term, term);
    SET_RELAXED(segment->c.relay->seen_ns, seen_ns);
    Py_RETURN_NONE;
}

/* relay_next_source(segment) -> int: above every earlier relay's number on this bus. */
SEGMENT_FUNCTION(py_relay_next_source, py_take_writable) {
    return PyLong_FromUnsignedLongLong(
        atomic_fetch_add_explicit(&segment->c.relay->source_incarnation, 1, memory_order_relaxed) +
        1);
}

PyMethodDef py_relay_functions[] = {
    {"relay_begin", py_relay_begin, METH_O, NULL},
    {"relay_bind", py_relay_bind, METH_O, NULL},
    {"relay_intend", py_relay_intend, METH_VARARGS, NULL},
    {"relay_drop", py_relay_drop, METH_VARARGS, NULL},
    {"relay_settle", py_relay_settle, METH_VARARGS, NULL},
    {"relay_forget", py_relay_forget, METH_VARARGS, NULL},
    {"relay_notes", py_relay_notes, METH_VARARGS, NULL},
    {"relay_words", py_relay_words, METH_O, NULL},
    {"relay_note", py_relay_note, METH_VARARGS, NULL},
    {"relay_next_source", py_relay_next_source, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
