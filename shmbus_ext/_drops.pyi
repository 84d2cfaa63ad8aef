"""Why records were dropped, as the C core counts it, for type checkers; it is in ``_core``."""

DROP_DUPLICATE: int
DROP_MALFORMED: int
DROP_CORRUPT: int
DROP_FAILED: int
DROP_FILTERED: int
