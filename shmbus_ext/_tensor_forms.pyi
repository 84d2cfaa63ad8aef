"""What the C core has for tensors of any library. ``shmbus.tensor_forms`` gives it to others."""

from typing import Any

def tensor_forms(exchange: object, tensors: tuple[Any, ...], /) -> tuple[bytes, bytes]: ...
def have_forms(
    exchange: object, tensors: tuple[Any, ...], types: tuple[type, ...], forms: bytes, /
) -> bool: ...
