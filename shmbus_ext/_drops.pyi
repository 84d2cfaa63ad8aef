"""Why records were dropped, as the C core counts it, for type checkers; it is in ``_core``."""

DROP_DUPLICATE: int
DROP_SIZE_MISMATCH: int
DROP_SURPLUS: int
DROP_TIMEOUT: int
DROP_STALE: int
DROP_ZERO_VARIANCE: int
DROP_OVERFLOW: int
DROP_MALFORMED: int
DROP_CORRUPT: int
DROP_FAILED: int
DROP_FILTERED: int
