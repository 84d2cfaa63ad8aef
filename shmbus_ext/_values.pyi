"""What `put` takes: values of fields, scores, schemas. For type checkers and editors only.

There is no module of this name at run time.
"""

from typing import Any, Protocol, TypeAlias

import numpy as np
from typing_extensions import Buffer

MAX_DIMENSION_NAMES: int
MAX_DECLARED_BYTES: int
DECLARED_OPTIONAL: int
DECLARED_ANY_SHAPE: int
DIMENSION_FREE: int
DIMENSION_NAMED: int
STANDARD_DTYPES: dict[str, np.dtype[Any]]

class SupportsArray(Protocol):
    """What NumPy makes an array of: its own arrays and scalars, tensors."""

    def __array__(self) -> Any: ...

class SupportsItem(Protocol):
    """One number, as an array or a tensor has it."""

    def item(self) -> Any: ...

#: The value of a field: no number, which is probably meant for an argument of another name.
FieldValue: TypeAlias = SupportsArray | Buffer | list[Any] | tuple[Any, ...]

def convert_field(name: str, value: object, dtype: np.dtype[Any], /) -> np.ndarray[Any, Any]: ...

class DeclaredSchema:
    encoded: bytes
    names: tuple[str, ...]
    def __init__(self, encoded: bytes, /) -> None: ...
    def fields(
        self,
    ) -> list[tuple[str, np.dtype[Any], tuple[int | str | None, ...] | None, bool]]: ...
    def dtype(self, name: str, /) -> np.dtype[Any] | None: ...
