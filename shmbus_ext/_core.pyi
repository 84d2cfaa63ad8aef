"""Types of the C core, called only by ``shmbus``; user-visible types are in ``_public*.pyi``."""

from collections.abc import Callable, Hashable, Iterable
from typing import (
    Any,
    Generic,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    final,
)

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, Self

from shmbus_ext._public import ConsumerBase as ConsumerBase
from shmbus_ext._public import GroupBase as GroupBase
from shmbus_ext._public import Trajectory as Trajectory
from shmbus_ext._public_put import Reservation as Reservation
from shmbus_ext._public_put import Writer as Writer

LAYOUT_VERSION: int
LAYOUT_HASH: int
PAGE: int
RECORD_ALIGN: int
MAX_ID_BYTES: int
MAX_FIELDS: int
MAX_NDIM: int
MAX_GROUP_SIZE: int
MAX_PRODUCERS: int
LABEL_BYTES: int
MAX_CLIENTS: int
PLACE_BYTES: int
PAUSE_REASON_BYTES: int
SLOT_FREE: int
SLOT_ACTIVE: int
SLOT_CLOSED: int
ACKED: int
RELAYED: int
SHARED_NO_SPACE: int
SHARED_UNFINISHED: int
SHARED_BAD_MAGIC: int
SHARED_BAD_VERSION: int
SHARED_BAD_GEOMETRY: int
SHARED_TRUNCATED: int
SHARED_NOTHING: int
SHARED_HELD: int
SHARED_DAMAGED: int
LEASE_HELD: int
REFUSED_DUPLICATE: int
REFUSED_GROUP_SIZE: int
REFUSED_SURPLUS: int
REFUSED_FAILING: int
REFUSED_LEASED: int

ELEMENT_KINDS: tuple[str, ...]
CHUNK_WORDS: int
MOST_THREADS: int
HAS_LOGPROBS: int
SAMPLE_MASKED: int
SAMPLE_ZEROED: int
EXTRA_TOKEN: int
EXTRA_RAGGED: int
EXTRA_SEQUENCE: int
COPY_WORDS: int
FIGURE_BOUNDS: tuple[tuple[float, ...], ...]
FIGURE_WORDS: int
DEVIATION_OF_ALL: int
DEVIATION_OF_GROUP: int
DEVIATION_OF_NONE: int
MAX_SCORE: float
SCORE_RESOLUTION: float
MAX_LOGPROB: float
MAGIC: int
HEADER_BYTES: int
RELEASED_OFFSET: int
REASONS: int
LOCK_COLLECTOR: int
LOCK_SLOT: int
REF_OFFSET_BITS: int
FLAG_MOVED: int
FLAG_FAILED: int
FLAG_NO_SIZE: int
FLAGS_KEPT: int

_Names = tuple[str, str | None, str | None, str | None]
_Extra = tuple[str, int, bool, np.dtype[Any] | None, tuple[int, ...]]

class CollectorNote(TypedDict):
    pid: int
    label: str
    leased_groups: int
    leased_records: int
    stashed_groups: int
    stashed_records: int
    seen_ns: int

class StructLayout(TypedDict):
    names: list[str]
    formats: list[str]
    offsets: list[int]
    itemsize: int

class Segment:
    name: str
    capacity: int
    extent_bytes: int
    extent_count: int
    max_producers: int
    record_limit: int
    created_unix_ns: int
    identity: str
    policy_version: int
    closed: bool
    removed: bool
    attach_epoch: int
    @classmethod
    def create(
        cls,
        fd: int,
        name: str,
        capacity: int,
        max_producers: int,
        extent_bytes: int,
        request_bytes: int = ...,
        max_lead: int = ...,
        max_versions: int = ...,
        declared: bytes = ...,
        /,
    ) -> Segment: ...
    @classmethod
    def open(cls, fd: int, name: str, read_only: bool = ..., /) -> Segment: ...
    @classmethod
    def survey(cls, header: bytes, file_bytes: int, name: str, /) -> dict[str, tuple[int, int]]: ...
    def close(self) -> None: ...
    def holders(self) -> list[int]: ...
    def producers(self) -> list[tuple[int, int, int, int, str, int, int]]: ...
    def tally(self) -> tuple[int, int, int]: ...
    def tells_stall(self, trainer: bool, period_s: float, /) -> bool: ...
    def has_collector(self) -> bool: ...
    def collector(self) -> CollectorNote: ...
    def released(self) -> tuple[int, ...]: ...
    def free_extents(self) -> int: ...
    def pause(self, reason: str, policy_version: int, /) -> None: ...
    def resume(self) -> None: ...
    def note_removal(self) -> bool: ...
    def require_name(self) -> None: ...
    def paused(self) -> tuple[str, int, int] | None: ...
    def locks_held(self, kind: int, /) -> list[tuple[int, int]]: ...
    def space_wanted(self) -> bool: ...

class Reader:
    segment: Segment
    delivered: int
    moves: int
    attached: bool
    def __init__(self, segment: Segment, label: str) -> None: ...
    def poll(self, limit: int, /) -> list[Trajectory]: ...
    def poll_into(
        self,
        table: GroupTable[Trajectory],
        limit: int,
        now_s: float,
        left: list[GroupEntry[Trajectory] | tuple[int, Trajectory]],
        /,
    ) -> int: ...
    def wait(self, timeout_s: float | None, /) -> bool: ...
    def wake(self) -> None: ...
    def release(self, trajectories: list[Trajectory], reason: int, /) -> None: ...
    def stragglers(self, most: int, /) -> list[tuple[str, int | None, int, bytes]]: ...
    def evacuate(self, trajectories: list[Trajectory], /) -> int: ...
    def sweep(self, most: int = ..., /) -> int: ...
    def tidy(self) -> None: ...
    def lend(self) -> None: ...
    def note_packing(self) -> None: ...
    def count_unread(self) -> tuple[int, int]: ...
    def note(self, table: GroupTable[Trajectory], /) -> None: ...
    def close(self) -> None: ...

_S = TypeVar("_S")
_G = TypeVar("_G", bound="GroupBase")
_R = TypeVar("_R")

class GroupEntry(Generic[_S]):
    """A group taken from its table, or a copy of a group still in the table."""

    key: Hashable
    samples: list[_S]
    size: int
    need: int
    missing: int
    split: int
    born_s: float
    nbytes: int

class GroupTable(Generic[_S]):
    """Samples in cells by key, and complete groups: ready, then leased."""

    cells: int
    accepted: int
    nbytes: int
    oldest_born_s: float | None
    ready_groups: int
    ready_cells: int
    leased_groups: int
    leased_cells: int
    recent: dict[Hashable, int | None]
    cancelled: list[Hashable]
    failing: dict[Hashable, Any]
    failing_cells: int
    unheld_groups: int
    unheld_cells: int
    def __init__(self, *, count_bytes: bool = ..., judged: bool = ...) -> None: ...
    def __len__(self) -> int: ...
    def put(
        self, samples: Iterable[_S], now_s: float, /
    ) -> list[GroupEntry[_S] | tuple[int, _S]]: ...
    def take(self, key: Hashable, /) -> GroupEntry[_S] | None: ...
    def gather(self, samples: list[_S], now_s: float, /) -> GroupEntry[_S]: ...
    def remove(self, entry: GroupEntry[_S], /) -> None: ...
    def find(self, key: Hashable, /) -> GroupEntry[_S] | None: ...
    def oldest(self, count: int, /) -> list[GroupEntry[_S]]: ...
    def samples(self) -> list[_S]: ...
    def push(self, entry: GroupEntry[_S], /) -> None: ...
    def lease(self, limit: int, split: int = ..., /) -> list[GroupEntry[_S]]: ...
    def counts(self, split: int, /) -> tuple[int, int, int, int, int, int]: ...
    def give_back(self, entry: GroupEntry[_S], /) -> None: ...
    def is_leased(self, entry: object, /) -> bool: ...
    def full(self, key: Hashable, /) -> list[GroupEntry[_S]]: ...

ROW_LENGTHS: str
SHARED_PREFIX: str

class ClosedByBlock:
    """The end of a with block calls `close()`, once more where an exception cut it short."""

    def close(self) -> None: ...  # the subclass's
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

class RecursiveLock:
    """A recursive lock."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def attempt(self) -> LockAttempt: ...

class LockAttempt:
    """Context manager: holds a free lock for a block and returns True, otherwise False."""

    def __enter__(self) -> bool: ...
    def __exit__(self, *error: object) -> None: ...

class Intake:
    """Complete groups from the ring to a lease, in one call on the fast path."""

    due_s: float
    wake_s: float
    delegate_all: bool
    lease: Callable[[int, int], list[GroupEntry[Trajectory]]] | None
    def __init__(
        self,
        reader: Reader,
        table: GroupTable[Trajectory],
        lock: RecursiveLock,
        kind: type[GroupBase],
        *,
        on_due: Callable[
            [Intake, list[GroupEntry[Trajectory] | tuple[int, Trajectory]], bool, float], bool
        ],
        lease: Callable[[int, int], list[GroupEntry[Trajectory]]] | None,
        watch: Callable[[float], object] | None,
        portion: int,
        portions: int,
        watch_s: float,
        group_timeout_s: float,
    ) -> None: ...

class ClientLease:
    number: int
    lost: bool
    key: Hashable
    samples: list[Trajectory]
    size: int
    step: int
    reason: int

class Borrower:
    segment: Segment
    client: int
    attached: bool
    packs: bool
    ready: list[ClientLease]
    unconfirmed: int
    def __init__(self, segment: Segment) -> None: ...
    def set_client(self, client: int, /) -> None: ...
    def receive(
        self, granted: list[Any], step: int, all: dict[int, ClientLease], fd: int, /
    ) -> tuple[list[ClientLease], list[int]]: ...
    def hand_out(self, kind: type[_G], consumer: object, limit: int, /) -> list[_G]: ...
    def give_back_group(
        self, consumer: object, group: GroupBase, state: str, all: dict[int, ClientLease], /
    ) -> int | None: ...
    def give_back_ready(self, all: dict[int, ClientLease], /) -> list[int]: ...
    def confirm(self, all: dict[int, ClientLease], numbers: list[int], /) -> None: ...
    def end(self, lease: ClientLease, reason: int, /) -> None: ...
    def end_groups(
        self,
        consumer: object,
        groups: list[GroupBase],
        reason: int,
        state: str,
        numbers: list[int],
        /,
    ) -> int: ...
    def forget(self, leases: list[ClientLease], /) -> None: ...
    def close(self) -> None: ...

def places(trajectories: list[Trajectory], /) -> bytes: ...
def identities(trajectories: list[Trajectory], /) -> bytes: ...

class Restorer:
    def __init__(self, segment: Segment) -> None: ...
    def put(
        self,
        producer_id: int,
        sequence: int,
        policy_version: int,
        version_span: int,
        score: float,
        group_size: int,
        need: int,
        index: int,
        split: int,
        round: int,
        flags: int,
        id: bytes,
        schema: bytes,
        shape: bytes,
        meta: bytes,
        fields: list[Any],
        run: int,
        /,
    ) -> bool: ...
    def ancestors(self, rows: list[tuple[bytes, int]], /) -> None: ...
    def split(self, number: int, acknowledged: int, dropped: int, /) -> None: ...
    def finish(
        self,
        released: tuple[int, ...],
        slots: list[tuple[int, int, int, str, int, int]],
        next_producer_id: int,
        policy_version: int,
        next_round: int,
        /,
    ) -> None: ...

def count_delivered(segment: Segment, entries: list[GroupEntry[Any]], /) -> None: ...
def note_useless(segment: Segment, groups: int, /) -> None: ...
def groups_dropped(segment: Segment, /) -> int: ...
def next_round(segment: Segment, /) -> int: ...
def install(
    *,
    closed_error: type[BaseException],
    too_large_error: type[BaseException],
    unscored_error: type[BaseException],
    full_error: Callable[[Segment, int, float], BaseException],
    busy_error: Callable[[Segment, str], BaseException],
    removed_error: Callable[[Segment, int], BaseException],
    layout_error: Callable[[str, str, int, int], BaseException],
    space_error: Callable[[str, int], BaseException],
    memory_error: Callable[[str, int], BaseException],
    encode_meta: Callable[[object], bytes],
    decode_meta: Callable[[bytes], Any],
    encode_dtype: Callable[[str, np.dtype[Any]], bytes],
    decode_dtype: Callable[[str, bytes], np.dtype[Any]],
    as_array: Callable[[str, object, bool], NDArray[Any]],
    unknown_field: Callable[[str, tuple[str, ...]], BaseException],
    copy_trajectory: Callable[[tuple[Any, ...]], Any],
    join_rows: Callable[[Any, tuple[str, ...]], list[tuple[str, Any]]],
    rows_of: Callable[[Any], list[Any]],
) -> None: ...
def declared_bytes(source: Segment | bytes, /) -> bytes | None: ...
def end_groups(
    reader: Reader,
    table: GroupTable[Trajectory],
    consumer: object,
    groups: list[GroupBase],
    reason: int,
    state: str,
    /,
) -> int: ...
def give_back_group(
    reader: Reader,
    table: GroupTable[Trajectory],
    consumer: object,
    group: GroupBase,
    state: str,
    /,
) -> bool: ...
def uninterrupted(callable: Callable[..., _R], /, *arguments: Any) -> _R: ...
def finalizer(function: Callable[[_S], None], /) -> Callable[[_S], None]: ...
def segment_plan(
    capacity: int, max_producers: int, extent_bytes: int, /
) -> tuple[int, int, int, int] | None: ...
def crc32c(data: bytes | memoryview, /) -> int: ...
def layout() -> dict[str, StructLayout]: ...
def lock_held(fd: int, byte: int, bytes: int = ..., /) -> bool: ...
def lock_all(fd: int, /) -> bool: ...
def scan_run(
    fd: int, position: int, used: int, extent: int, generation: int, below: int, /
) -> tuple[bytes, int, int]: ...
def read_run(
    fd: int,
    position: int,
    used: int,
    extent: int,
    generation: int,
    start: int,
    limit: int,
    payload: bool,
    /,
) -> tuple[list[tuple[Any, ...]], int, bool]: ...

class PackPlan:
    """The samples of a batch, measured once for every copy."""

    sizes: NDArray[np.int64]
    samples: NDArray[np.int64]
    instance_ids: list[str]
    field_names: list[tuple[str, ...]]
    total: int
    longest: int
    nbytes: int
    has: int
    lacks: int
    has_logprobs: bool
    has_rows: bool
    has_metas: bool
    scores_fit: bool
    def __new__(
        cls, groups: list[GroupBase], names: _Names, extras: tuple[_Extra, ...], /
    ) -> Self: ...
    trajectories: list[Trajectory]
    @property
    def extras(
        self,
    ) -> list[tuple[np.dtype[Any] | None, tuple[int, ...], NDArray[np.int64]]]: ...
    def gather(
        self,
        memory: NDArray[np.uint8],
        advantages: NDArray[np.float32],
        flags: NDArray[np.uint8] | None,
        outs: tuple[NDArray[np.uint8], ...],
        threads: int,
        /,
    ) -> tuple[Any, ...]: ...
    def table_bytes(self, chunk_tokens: int, /) -> int: ...
    def table(
        self,
        memory: NDArray[np.uint8],
        shift: int,
        chunk_tokens: int,
        advantages: NDArray[np.float32],
        flags: NDArray[np.uint8] | None,
        /,
    ) -> tuple[Any, ...]: ...
    def copy_table(
        self,
        places: tuple[tuple[int, int], ...],
        memory: NDArray[np.int64],
        shift: int,
        chunk_bytes: int,
        /,
    ) -> tuple[int, list[tuple[int, int]]]: ...

def mapping_of(trajectory: Trajectory, /) -> tuple[int, int, object]: ...
def mentioning(trajectories: list[Trajectory], words: tuple[bytes, ...], /) -> list[int]: ...
def relative_scores(
    scores: NDArray[np.float64],
    sizes: NDArray[np.int64],
    deviation: int,
    by_n: bool,
    eps: float,
    /,
) -> NDArray[np.float64]: ...

# -- reasons of drops

DROP_DUPLICATE: int
DROP_MALFORMED: int
DROP_CORRUPT: int
DROP_FAILED: int
DROP_FILTERED: int

# -- splits and rounds

NO_ROUND: int
MAX_SPLITS: int
SPLIT_TRAIN: int
SPLIT_LABEL_BYTES: int
TRAIN: str

def check_split(label: object, /) -> None: ...
def split_number(segment: Segment, label: str, /) -> int: ...
def split_label(segment: Segment, number: int, /) -> str: ...
def splits(segment: Segment, /) -> list[tuple[int, str, int, int, int, int, int]]: ...

# -- retry requests

RETRY_ENTRIES: int
RETRY_REASON_BYTES: int
RETRY_BUSY: int
RETRY_ANSWERED: int
RETRY_PAUSE: int

def retry_publish(
    segment: Segment,
    entry: int,
    number: int,
    id: str,
    round: int,
    split: int,
    group_size: int,
    need: int,
    index: int,
    attempt: int,
    reason: bytes,
    late: int = 0,
    /,
) -> None: ...
def retry_withdraw(segment: Segment, entry: int, /) -> None: ...
def retry_take_back(segment: Segment, entry: int, /) -> bool | None: ...
def retry_requests(
    segment: Segment, /
) -> list[tuple[int, int, int, str, int | None, int, int, int, int, int, str, int]]: ...
def retry_claim(segment: Segment, entry: int, number: int, producer_id: int, /) -> bool: ...
def retry_unclaim(segment: Segment, entry: int, number: int, producer_id: int, /) -> bool: ...
def retry_note(segment: Segment, open: int, groups_failed: int, /) -> None: ...
def retry_noted(segment: Segment, /) -> tuple[int, int]: ...

# -- records as blocks of bytes, between buses

BLOCK_HEADER_BYTES: int

def export_block(trajectories: list[Trajectory], into: Buffer, /) -> int: ...
def lasting_origins(trajectories: list[Trajectory], /) -> list[tuple[bytes, ...]]: ...
def lineage(segment: Segment, /) -> list[bytes]: ...
def leased_in_part(segment: Segment, /) -> bool: ...
def leased_state(sample: object, /) -> tuple[int, int]: ...
def forget_leased(samples: list[Any], /) -> None: ...
def record_origins(trajectories: list[Trajectory], /) -> list[bytes]: ...
def check_block(block: Buffer, splits: Buffer = b"\0", /) -> tuple[bytes, bytes]: ...
def import_block(
    writer: Writer,
    block: Buffer,
    first: int,
    limit: int,
    timeout_s: float | None,
    entries: Buffer = b"",
    splits: Buffer = b"\0",
    /,
) -> int: ...

# -- arguments of `put`

MAX_DIMENSION_NAMES: int
MAX_DECLARED_BYTES: int
DECLARED_OPTIONAL: int
DECLARED_ANY_SHAPE: int
DIMENSION_FREE: int
DIMENSION_NAMED: int
STANDARD_DTYPES: dict[str, np.dtype[Any]]

class SupportsArray(Protocol):
    """Value convertible by NumPy: an array, a scalar or a tensor."""

    def __array__(self) -> Any: ...

class SupportsItem(Protocol):
    """One number in an array or a tensor."""

    def item(self) -> Any: ...

#: The value of a field; excludes plain numbers, probably meant for an argument of a different name.
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

# -- admission, requests, and notes about work

LEAD_ROWS: int
UNMADE_REASON_BYTES: int
WAITS: tuple[str, ...]
REQUEST_LEVELS: int
REQUEST_MAX_ROWS: int
REQUEST_ROW_SHARE: int
REQUEST_UNIT: int
REQUEST_MIN_BYTES: int
REQUEST_MAX_BYTES: int
REQUEST_IS_RETRY: int

def note_waited(segment: Segment, seconds: float, /) -> None: ...
def lead_state(segment: Segment, /) -> tuple[int, int, int, int, int]: ...
def lead_leave(segment: Segment, id: str, round: int | None, split: int, /) -> bool: ...
def lead_knows(segment: Segment, id: str, round: int | None, split: int, /) -> bool: ...
def lead_key(segment: Segment, id: str, round: int | None, split: int, /) -> int: ...
def lead_follow(segment: Segment, leased: int, ended: int, /) -> None: ...
def lead_settled(
    segment: Segment, id: str = ..., round: int | None = ..., split: int = ..., /
) -> dict[int, int]: ...
def lead_free(segment: Segment, row: int, word: int, /) -> None: ...
def request_offer(
    segment: Segment,
    offers: list[tuple[bytes, int | None, int, int, int, int, bytes]],
    start: int,
    /,
) -> tuple[int, int]: ...
def request_want(segment: Segment, room: bool, /) -> int: ...
def request_await(
    segment: Segment, room: bool, ticket: int, timeout_s: float, rests: bool = ..., /
) -> None: ...
def request_close(segment: Segment, row: int, number: int, /) -> None: ...
def request_answered(segment: Segment, row: int, number: int, /) -> bool: ...
def request_end(segment: Segment, row: int, number: int, /) -> None: ...
def request_send(segment: Segment, row: int, number: int, /) -> int: ...
def request_wanted(segment: Segment, /) -> bool: ...

_Request: TypeAlias = tuple[str, int | None, str, int, int, int, int, int, bytes]

def request_text(segment: Segment, row: int, number: int, /) -> _Request | None: ...
def request_find(
    segment: Segment, id: str, round: int | None, split: int, /
) -> _Request | None: ...
def request_revoke(segment: Segment, id: str, round: int | None, split: int, /) -> int | None: ...
def request_rows(segment: Segment, /) -> list[tuple[int, int, bool, int, int, int]]: ...
def request_bytes(segment: Segment, /) -> int: ...
def request_row_count(segment: Segment, /) -> int: ...
def request_number(segment: Segment, /) -> int: ...
def request_changes(
    segment: Segment, seen: bytes, numbers: Buffer, /
) -> tuple[bytes, list[tuple[int, int]]]: ...
def request_totals(segment: Segment, /) -> tuple[int, int, int, int, int, int, int, int, int]: ...

# -- the channel; only ``shmbus.channel`` calls it

CHANNEL_LAYOUT_VERSION: int
CHANNEL_META_ALIGN: int
CHANNEL_REASON_BYTES: int
CHANNEL_LABEL_BYTES: int
CHANNEL_SENDER: int
CHANNEL_RECEIVER: int
CHANNEL_STEP: int
CHANNEL_SKIP: int
CHANNEL_FAIL: int
CHANNEL_ABSENT: int
CHANNEL_ALIVE: int
CHANNEL_DEAD: int
CHANNEL_LEFT: int

class ChannelMemory:
    bytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Channel:
    slots: int
    max_bytes: int
    file_bytes: int
    fd: int
    closed: bool
    @classmethod
    def create(
        cls, fd: int, name: str, slots: int, max_bytes: int, /
    ) -> Channel | tuple[int, int]: ...
    @classmethod
    def open(cls, fd: int, name: str, read_only: bool = False, /) -> Channel | tuple[int, int]: ...
    def claim(self, side: int, label: str, /) -> bool: ...
    def leave(self, reason: str, /) -> None: ...
    def close(self) -> None: ...
    def state(self, data: bytes, /) -> None: ...
    def stated(self, side: int, /) -> int: ...
    def statement(self, side: int, /) -> tuple[int, bytes] | int: ...
    def look(self, side: int, /) -> tuple[int, int, int, str, str]: ...
    def announce(self, side: int, /) -> int: ...
    def wait(self, side: int, ticket: int, timeout_s: float, /) -> bool: ...

def channel_begin(channel: Channel, size: int, meta_size: int, /) -> ChannelMemory | int | None: ...
def channel_send(channel: Channel, kind: int, meta: Any, reason: str, /) -> int: ...
def channel_receive(
    channel: Channel, /
) -> tuple[int, int, ChannelMemory, bytes, str] | int | None: ...
def channel_ack(channel: Channel, /) -> None: ...
def channel_drop(channel: Channel, /) -> None: ...
def channel_counts(channel: Channel, /) -> tuple[int, int, int, int] | int: ...
def channel_begin_at(channel: Channel, step: int, /) -> int: ...

# -- the relay's journal of a bus

RELAY_SETTLED: int

@final
class OriginHead:
    clock_ns: int
    origin: bytes
    instance_id: str
    key: Hashable
    split: int
    round: int | None
    group_size: int
    need: int
    index: int
    score: float
    policy_version: int
    nbytes: int
    check: int
    made_ns: int
    committed_ns: int
    failed: bool
    reason: str | None
    meta: str | None

def read_heads(
    trajectories: Iterable[Trajectory], reason_of: Callable[[Trajectory], str], /
) -> bytes: ...
def unpack_heads(packed: Buffer, splits: Buffer = b"\0", /) -> list[OriginHead]: ...
def relay_begin(segment: Segment, /) -> int | None: ...
def relay_bind(writer: Writer, /) -> None: ...
def relay_intend(writer: Writer, origins: Buffer, entries: Buffer, /) -> bytes | None: ...
def relay_drop(segment: Segment, origins: Buffer, reason: int, /) -> bytes | None: ...
def relay_settle(writer: Writer, entries: Buffer, /) -> None: ...
def relay_forget(segment: Segment, entries: Buffer, /) -> None: ...
def relay_notes(segment: Segment, ended: bool = ..., /) -> list[tuple[int, bytes, int, int]]: ...
def relay_words(
    segment: Segment, /
) -> tuple[int, int, int, int, int, int, int, tuple[int, ...]]: ...
def relay_note(segment: Segment, term: int, seen_ns: int, figures: tuple[int, ...], /) -> None: ...
def relay_next_source(segment: Segment, /) -> int: ...

# -- the slot pool; only ``shmbus.pool`` calls it

_Bytes: TypeAlias = bytes  # in classes with a field named like the type

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
    def claim_reader(self, label: str, device: str, keeps_row: bool = ..., /) -> bool: ...
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

def pool_lease(pool: SlotPool, after: int, version: int = ..., /) -> PoolLease | int: ...
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
def pool_patch_bytes(lease: PoolLease, /) -> tuple[int, _Bytes] | None: ...
def pool_patch_take(write: PoolWrite, runs: Any, /) -> bool: ...
def pool_patch_crc(runs: Any, payload: Any, /) -> int | None: ...
def pool_copy(target: Any, source: Any, /) -> None: ...
def pool_rows(pool: SlotPool, begins: str = "", /) -> dict[str, Any]: ...
def pool_runs(fd: int, version: int, /) -> tuple[int, list[int], bool] | None: ...
