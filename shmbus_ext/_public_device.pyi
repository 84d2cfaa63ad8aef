"""What the C core has for a device's driver. ``shmbus.device_calls`` gives it to others."""

from typing import Any

DEVICE_MAX_COPIES: int
DEVICE_NOT_READY: int

def device_copy(
    copy: int,
    record: int,
    stream: int,
    event: int,
    tensors: dict[str, Any],
    targets: tuple[tuple[int, int], ...],
    /,
) -> int: ...
def device_await(query: int, event: int, busy_s: float, naps: bool, /) -> int: ...
def device_launch(
    launch: int,
    function: int,
    stream: int,
    grid: int,
    threads: int,
    shared: int,
    addresses: tuple[int, ...],
    numbers: tuple[int, ...],
    /,
) -> int: ...
