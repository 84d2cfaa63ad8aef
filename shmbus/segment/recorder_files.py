"""Addresses and states of a bus's recorders: a note for each."""

from __future__ import annotations

import string
from typing import Final

import msgspec

from shmbus.data.encoding import decodable
from shmbus.segment.note_file import MOST_BYTES, NoteFile, read_notes

#: Recorders of a bus at a time: a letter each, since a companion's kind takes no digits.
_KINDS: Final = [f"recorder{letter}" for letter in string.ascii_lowercase]


class SessionNote(msgspec.Struct, frozen=True, kw_only=True):
    """An open session: sample, age in seconds, contents, and place."""

    instance_id: str
    index: int
    age_s: float
    turns: int
    tokens: int
    calls: int
    engine: str


class EngineNote(msgspec.Struct, frozen=True, kw_only=True):
    """An engine behind a recorder; without a version, the reason of an unknown version."""

    url: str
    state: str
    calls: int
    version: int | None = None
    version_by: str = ""
    why: str = ""


@decodable
class RecorderNote(msgspec.Struct, frozen=True, kw_only=True):
    """A recorder's note about itself; clients that open sessions send the token."""

    url: str
    pid: int
    token: str | None = None
    sessions: int = 0
    calls: int = 0
    drift: int = 0
    running: list[SessionNote] = []
    engines: list[EngineNote] = []


class RecorderFile(NoteFile):
    """The note of this process, a recorder of a bus."""

    def __init__(self, bus: str) -> None:
        super().__init__(bus, _KINDS, "recorder")
        if not self.held:
            raise RuntimeError(
                f"bus {bus!r}: expected less than {len(_KINDS)} recorders beside each other, found "
                "as many; end one"
            )

    def write(self, note: RecorderNote) -> None:
        """Write the current state; of too many sessions, none."""
        body = msgspec.json.encode(note)
        if len(body) > MOST_BYTES:  # 48 sessions with the longest ids, and 64 engines, fit
            body = msgspec.json.encode(msgspec.structs.replace(note, running=[]))
        self.write_body(body)


def read_recorders(bus: str) -> list[RecorderNote]:
    """Return the notes of a bus's living recorders."""
    return read_notes(bus, _KINDS, "recorder", RecorderNote)
