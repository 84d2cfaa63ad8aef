"""Types of the C core: records as blocks of bytes, between buses."""

from typing_extensions import Buffer

from shmbus_ext._public import Trajectory
from shmbus_ext._public_put import Writer

BLOCK_MAX_RECORDS: int
BLOCK_HEADER_BYTES: int

def export_block(trajectories: list[Trajectory], into: Buffer, /) -> int: ...
def record_origins(trajectories: list[Trajectory], /) -> list[bytes]: ...
def record_checks(trajectories: list[Trajectory], /) -> list[int]: ...
def check_block(block: Buffer, /) -> tuple[bytes, bytes]: ...
def import_block(
    writer: Writer,
    block: Buffer,
    first: int,
    limit: int,
    timeout_s: float | None,
    entries: Buffer = b"",
    /,
) -> int: ...
