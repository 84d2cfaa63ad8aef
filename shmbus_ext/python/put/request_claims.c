/* A worker's side of the request lane: taking a sample, and ending its claim without an answer.
 *
 * Invariant: a claim of which no Python object tells is given back before the call returns. */
#include "python/put/request_claims.h"

#include "python/requests/request_functions.h"
#include "ring/recovery.h"

/* _take_request(known) -> (claim, text), where text is None for a sample of the request of that number,
 * whose text the caller has; None where there is nothing to do, False where only the bound on
 * groups keeps one from being taken. `claim` is (number, word, row, cell, index). */
PyObject *py_writer_take_request(WriterObject *self, PyObject *argument) {
    unsigned long long known = PyLong_AsUnsignedLongLong(argument);
    if ((known == (unsigned long long)-1 && PyErr_Occurred()) || !py_writer_usable(self)) {
        return NULL;
    }
    struct segment *segment = &self->segment->c;
    for (;;) {
        struct request_claim claim;
        enum request_take taken =
            request_take(segment, self->c.producer_id, self->c.slot_index, &claim);
        if (taken != REQUEST_TAKEN) {
            return taken == REQUEST_NONE ? Py_NewRef(Py_None) : Py_NewRef(Py_False);
        }
        bool again =
            claim.number == known && request_open_row(segment, claim.row) == claim.number;
        PyObject *text = again ? Py_NewRef(Py_None)
                               : py_describe_request(self->segment, claim.row, claim.number);
        if (text == Py_None && !again) {
            /* Its row has ended, or is damaged: it stays claimed, and is nobody's. */
            Py_DECREF(text);
            continue;
        }
        PyObject *result =
            text == NULL ? NULL
                         : Py_BuildValue("((KKIII)N)", (unsigned long long)claim.number,
                                         (unsigned long long)claim.word, claim.row, claim.cell,
                                         claim.index, text);
        if (result == NULL) {
            request_give_back(segment, &claim);
        }
        return result;
    }
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
