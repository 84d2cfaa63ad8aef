"""Types of the channel in the C core, which ``_core`` has. Only ``shmbus.channel`` calls them."""

from typing import Any

CHANNEL_LAYOUT_VERSION: int
CHANNEL_MAX_SLOTS: int
CHANNEL_MAX_BYTES: int
CHANNEL_MAX_META_BYTES: int
CHANNEL_META_ALIGN: int
CHANNEL_STATEMENT_BYTES: int
CHANNEL_REASON_BYTES: int
CHANNEL_LABEL_BYTES: int
CHANNEL_SENDER: int
CHANNEL_RECEIVER: int
CHANNEL_STEP: int
CHANNEL_SKIP: int
CHANNEL_FAIL: int
CHANNEL_NO_SPACE: int
CHANNEL_UNFINISHED: int
CHANNEL_BAD_MAGIC: int
CHANNEL_BAD_VERSION: int
CHANNEL_BAD_GEOMETRY: int
CHANNEL_TRUNCATED: int
CHANNEL_NOTHING: int
CHANNEL_HELD: int
CHANNEL_DAMAGED: int
CHANNEL_ABSENT: int
CHANNEL_ALIVE: int
CHANNEL_DEAD: int
CHANNEL_LEFT: int

class ChannelMemory:
    bytes: int
    exports: int
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
