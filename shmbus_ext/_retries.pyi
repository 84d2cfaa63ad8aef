"""The functions of the C core on retry requests, for type checkers; they are in ``_core``."""

from shmbus_ext._core import Segment

RETRY_ENTRIES: int
RETRY_REASON_BYTES: int
RETRY_BUSY: int
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
    /,
) -> None: ...
def retry_withdraw(segment: Segment, entry: int, /) -> None: ...
def retry_requests(
    segment: Segment, /
) -> list[tuple[int, int, int, str, int | None, int, int, int, int, int, str, int]]: ...
def retry_claim(segment: Segment, entry: int, number: int, producer_id: int, /) -> bool: ...
def retry_unclaim(segment: Segment, entry: int, producer_id: int, /) -> bool: ...
def retry_note(segment: Segment, open: int, groups_failed: int, /) -> None: ...
def retry_noted(segment: Segment, /) -> tuple[int, int]: ...
