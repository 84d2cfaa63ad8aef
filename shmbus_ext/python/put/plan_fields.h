/* The fields of a put: matched with the declared schema, taken as arrays or lists, and planned. */
#ifndef SHMBUS_PYTHON_PLAN_FIELDS_H
#define SHMBUS_PYTHON_PLAN_FIELDS_H

#include "python/record/declared.h"
#include "python/put/put_arguments.h"

/* After all arguments were taken: checks the fields, by the declared schema where there is one, and
 * plans the record. False with an exception. */
bool py_arguments_finish(struct put_arguments *self, struct schema_cache *cache,
                         DeclaredSchemaObject *declared);
/* Whether a field of so many dimensions fits behind so many words of shapes; false with an
 * exception. */
bool py_arguments_shape_fits(PyObject *name, uint32_t words, Py_ssize_t ndim);

/* Writes the lists into their places of a record. False, and no exception, where one is not plain:
 * then py_arguments_convert_lists. */
bool py_arguments_fill_lists(const struct put_arguments *self, uint8_t *record);
/* Makes arrays of the lists, by code of their elements where need be; false with an exception. */
bool py_arguments_convert_lists(struct put_arguments *self);

bool py_plan_fields_init(void);
/* STANDARD_DTYPES: the dtypes that fields have without a declaration. */
bool py_plan_fields_add_constants(PyObject *module);

#endif
