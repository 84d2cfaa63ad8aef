/* Base64 of inference engines' answers, straight into arrays, without the interpreter lock.
 *
 * Invariant: whatever the text, reads stay inside the text and writes inside the array. */
#include "python/hooks.h"

#include <string.h>

/* Value of a character at every place of its quantum, as bits of three bytes. */
static uint32_t places[4][256];
#define NOT_BASE64 UINT32_C(0xFF000000)

__attribute__((constructor)) static void prepare_places(void) {
    const char *all = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    memset(places, 0xFF, sizeof places);
    for (uint32_t i = 0; i < 256; i++) {
        places[i / 64][(unsigned char)all[i % 64]] = i % 64 << (18 - i / 64 * 6);
    }
}

/* Decode from byte `skipped` on; return the end of the input used, or the first wrong quantum. */
static const char *decode(const char *at, size_t skipped, char *out, size_t bytes) {
    for (at += skipped / 3 * 4, skipped %= 3; bytes > 0; at += 4, skipped = 0) {
        unsigned char c[4];
        memcpy(c, at, sizeof c);
        size_t taken = bytes < 3 - skipped ? bytes : 3 - skipped;
        for (size_t i = 3; i > skipped + taken && c[i] == '='; i--) {
            c[i] = 'A'; /* padding: its value never reaches the output */
        }
        uint32_t three = places[0][c[0]] | places[1][c[1]] | places[2][c[2]] | places[3][c[3]];
        if (three & NOT_BASE64) {
            break;
        }
        three = __builtin_bswap32(three << 8 << 8 * skipped);
        if (bytes > sizeof three) {
            memcpy(out, &three, sizeof three); /* the next store overwrites its end */
        } else {
            memcpy(out, &three, taken);
        }
        out += taken;
        bytes -= taken;
    }
    return at;
}

static PyObject *py_decode_base64(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *field;
    Py_buffer text, out;
    Py_ssize_t skipped;
    if (!PyArg_ParseTuple(args, "Uy*nw*", &field, &text, &skipped, &out)) {
        return NULL;
    }
    const char *begin = text.buf, *at = begin;
    Py_ssize_t whole = out.len == 0 ? 0 : (skipped + out.len + 2) / 3 * 4;
    if (skipped >= 0 && whole <= text.len) {
        Py_BEGIN_ALLOW_THREADS
        at = decode(begin, (size_t)skipped, out.buf, (size_t)out.len);
        Py_END_ALLOW_THREADS
    }
    if (at - begin < whole) {
        PyErr_Format(PyExc_ValueError,
                     "%U: expected base64 of %zd bytes, got %zd characters, good ones up to %zd",
                     field, skipped + out.len, text.len, at - begin);
    }
    PyBuffer_Release(&text);
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyMethodDef py_base64_functions[] = {
    {"decode_base64", py_decode_base64, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
