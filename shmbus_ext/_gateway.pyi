"""What the C core has for the gateway. Only ``shmbus.gateway`` calls it."""

from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

def lift_numbers(
    text: Buffer, kinds: dict[str, bool], /
) -> tuple[bytes, dict[str, list[NDArray[Any]]]] | None: ...
