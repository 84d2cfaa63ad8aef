/* A worker's side of the request lane: taking a sample, and ending its claim without an answer.
 *
 * Invariant: a claim of which no Python object tells is given back before the call returns. */
#include "python/put/request_claims.h"

#include "python/requests/request_functions.h"
#include "ring/recovery.h"

/* The claim and the text of a sample that was just taken, as _take_requests has them; None where
 * its row has ended or is damaged, so that it is nobody's. `known` is the request whose text the
 * caller has. */
static PyObject *describe(WriterObject *self, const struct request_claim *claim, uint64_t known) {
    struct segment *segment = &self->segment->c;
    bool again = claim->number == known && request_open_row(segment, claim->row) == claim->number;
    PyObject *text = again ? Py_NewRef(Py_None)
                           : py_describe_request(self->segment, claim->row, claim->number);
    if (text == NULL || (text == Py_None && !again)) {
        return text;
    }
    return Py_BuildValue("((KKIII)N)", (unsigned long long)claim->number,
                         (unsigned long long)claim->word, claim->row, claim->cell, claim->index,
                         text);
}

/* Gives back what the items of a list say; an exception that is set stays. */
static void give_back_all(WriterObject *self, PyObject *found) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); i++) {
        struct request_claim claim;
        if (py_take_claim(self, PyTuple_GET_ITEM(PyList_GET_ITEM(found, i), 0), &claim)) {
            request_give_back(&self->segment->c, &claim);
        }
    }
    PyErr_Restore(type, value, trace);
}

/* _take_requests(known, limit) -> list of (claim, text), up to `limit` of what may be taken now.
 * `text` is None for a sample of the request before it, and of the request of the number `known`,
 * whose text the caller has. `claim` is (number, word, row, cell, index). */
PyObject *py_writer_take_requests(WriterObject *self, PyObject *args) {
    unsigned long long known;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "Kn", &known, &limit) || !py_writer_usable(self)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    while (found != NULL && PyList_GET_SIZE(found) < limit) {
        struct request_claim claim;
        if (request_take(&self->segment->c, self->c.producer_id, self->c.slot_index, &claim) !=
            REQUEST_TAKEN) {
            break;
        }
        PyObject *item = describe(self, &claim, known);
        if (item == Py_None) {
            Py_DECREF(item);
            continue;
        }
        if (item == NULL || PyList_Append(found, item) < 0) {
            Py_XDECREF(item);
            request_give_back(&self->segment->c, &claim);
            give_back_all(self, found);
            Py_CLEAR(found);
            break;
        }
        Py_DECREF(item);
        known = claim.number;
    }
    return found;
}

bool py_take_claim(const WriterObject *self, PyObject *object, struct request_claim *claim) {
    unsigned long long number, word;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "expected the claim of a request");
        return false;
    }
    if (!PyArg_ParseTuple(object, "KKIII", &number, &word, &claim->row, &claim->cell,
                          &claim->index)) {
        return false;
    }
    const struct request_parts *parts = &self->segment->c.requests;
    if (claim->row >= parts->row_count ||
        claim->cell >= parts->block_count * SHMBUS_REQUEST_CELLS_A_BLOCK) {
        PyErr_SetString(PyExc_IndexError, "claim: the request lane of this bus has no such cell");
        return false;
    }
    claim->number = number;
    claim->word = word;
    return true;
}

/* _give_back_request(claim) -> bool */
PyObject *py_writer_give_back_request(WriterObject *self, PyObject *object) {
    struct request_claim claim;
    if (!py_writer_usable(self) || !py_take_claim(self, object, &claim)) {
        return NULL;
    }
    return PyBool_FromLong(request_give_back(&self->segment->c, &claim));
}

/* _holds_request(claim) -> bool: whether its answer is still wanted of this producer. */
PyObject *py_writer_holds_request(WriterObject *self, PyObject *object) {
    struct request_claim claim;
    if (!py_writer_usable(self) || !py_take_claim(self, object, &claim)) {
        return NULL;
    }
    return PyBool_FromLong(request_is_held(&self->segment->c, &claim));
}

/* _recover_dead() -> int: gives back what dead workers had in hand; a system call for each slot. */
PyObject *py_writer_recover_dead(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    if (!py_writer_usable(self)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(recover_dead(&self->segment->c, self->c.slot_index));
}
