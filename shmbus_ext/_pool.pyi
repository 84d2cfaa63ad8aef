"""Types of the slot pool in the C core; ``_core`` has them all. Only ``shmbus.pool`` calls them."""

from typing import Any, TypeAlias

_Bytes: TypeAlias = bytes  # where a field is called like the type
#: rank, place in its patch; offset, rows, row_bytes, stride, width of the piece; changes, bytes,
#: digest of what was there before
_PatchRun: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]

POOL_LAYOUT_VERSION: int
POOL_MAX_SLOTS: int
POOL_MAX_RANKS: int
POOL_MAX_READERS: int
POOL_LABEL_BYTES: int
POOL_DEVICE_BYTES: int
POOL_TEXT_BYTES: int
POOL_ERROR_BYTES: int
POOL_BELL_VERSION: int
POOL_BELL_SPACE: int
POOL_BELL_RANKS: int
PIECE_ABSENT: int
PIECE_DONE: int
PIECE_FAILED: int
PIECE_DEAD: int
ROW_ALIVE: int
ROW_DEAD: int

class SlotPool:
    name: str
    slot_bytes: int
    meta_bytes: int
    block_bytes: int
    patch_bytes: int
    file_bytes: int
    slot_stride: int
    max_slots: int
    created_unix_ns: int
    rank: int
    reader: int
    closed: bool
    @classmethod
    def create(
        cls,
        fd: int,
        name: str,
        slots: int,
        max_slots: int,
        slot_bytes: int,
        meta_bytes: int,
        block_bytes: int,
        patch_bytes: int,
        /,
    ) -> SlotPool | tuple[int, int]: ...
    @classmethod
    def open(cls, fd: int, name: str, read_only: bool = ..., /) -> SlotPool | tuple[int, int]: ...
    def close(self) -> None: ...
    def claim_writer(self, rank: int, label: str, /) -> bool: ...
    def claim_reader(self, label: str, device: str, /) -> bool: ...
    def grow(self) -> bool: ...
    def newest(self) -> int: ...
    def announce(self, bell: int, /) -> int: ...
    def wait(self, bell: int, ticket: int, timeout_s: float, /) -> bool: ...
    def applied(self, sequence: int, version: int, /) -> None: ...
    def refused(self, sequence: int, version: int, code: int, text: str, /) -> None: ...
    def count_skipped(self) -> None: ...
    def outcome(self, sequence: int, /) -> bool | None: ...
    def piece_state(self, sequence: int, rank: int, /) -> int: ...

class PoolLease:
    slot: int
    sequence: int
    version: int
    bytes: int
    digests: int
    ranks: int
    published_unix_ns: int
    text: str
    def meta(self) -> _Bytes | None: ...
    def check(self, first: int, count: int, /) -> int | None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class PoolWrite:
    slot: int
    sequence: int
    version: int
    bytes: int
    meta: _Bytes
    ended: bool
    def finish(self, digests: bool, /) -> None: ...
    def give_up(self, error: str, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def pool_lease(pool: SlotPool, after: int, /) -> PoolLease | int: ...
def pool_lease_version(pool: SlotPool, version: int, /) -> PoolLease | int: ...
def pool_begin(
    pool: SlotPool, version: int, bytes: int, meta: _Bytes, text: str, ranks: int, patches: bool, /
) -> PoolWrite | int: ...
def pool_join(pool: SlotPool, /) -> PoolWrite | int: ...
def pool_patch_put(
    write: PoolWrite,
    offset: int,
    rows: int,
    row_bytes: int,
    stride: int,
    width: int,
    source: Any,
    /,
) -> int | None: ...
def pool_patch_is_made(write: PoolWrite, /) -> bool: ...
def pool_patch_runs(lease: PoolLease, /) -> tuple[int, int, list[_PatchRun]] | bool | None: ...
def pool_patch_apply(
    lease: PoolLease, rank: int, place: int, target: Any, offset: int, /
) -> bool: ...
def pool_patch_list(
    lease: PoolLease, rank: int, place: int, elements_at: Any, values: Any, /
) -> int | None: ...
def pool_patch_bytes(lease: PoolLease, /) -> tuple[int, _Bytes] | None: ...
def pool_patch_take(write: PoolWrite, runs: Any, /) -> bool: ...
def pool_patch_crc(runs: Any, payload: Any, /) -> int | None: ...
def pool_same(one: Any, other: Any, /) -> bool: ...
def pool_copy(target: Any, source: Any, /) -> None: ...
def pool_rows(pool: SlotPool, /) -> dict[str, Any]: ...
