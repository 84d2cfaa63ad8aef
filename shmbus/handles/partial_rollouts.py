"""Partial rollouts: tokens sampled before a request's release, for the next worker.

They lie in a companion file of the bus, ``shmbus-partial.NAME``: consecutive entries with
checksums; a sample's newest entry counts. The arrays are encoded as a prompt.

Invariants:

- A reader or writer holds the file's lock, which ends with its process. A death in between costs
  incomplete entries, and never leaves a wrong entry.
- An entry belongs to a sample of a single offer, by its time; another group of the prompt never
  gets it.
- The file only saves work: a sample with a lost entry starts anew. The request lane alone knows a
  sample's holder and its answer.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from shmbus import errors
from shmbus.batch.token_versions import version_span
from shmbus.data.encoding import as_array
from shmbus.data.prompts import Prompt, Request, encode_prompt
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus_ext import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray


KIND: Final = "partial"
#: Bytes and checksum of the following entry.
_HEAD: Final = struct.Struct("<II")
#: Divisor of the bus's bytes for the limit of all entries, the limit's minimum, and seconds to wait
#: for the lock.
_PART: Final = 8
_LEAST_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 10.0


class _Key(NamedTuple):
    """A sample of a single offer."""

    bus: str
    offered_ns: int
    instance_id: str
    round: int | None
    split: str
    sample: int


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A partial rollout; without prompt after the sample's answer or new start."""

    key: _Key
    prompt: bytes = b""
    times: int = 0
    oldest: int | None = None
    max_lag: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)


class PartialRollouts:
    """The file of a bus, opened for each use."""

    def __init__(self, name: str, segment: _core.Segment) -> None:
        self._name = name
        self.segment = segment
        try:
            self._path = SHM_DIRECTORY + companion_name(KIND, name)
        except ValueError:
            self._path = ""  # a name outside of all companions' names

    def _key(self, request: Request) -> _Key:
        return _Key(
            self.segment.identity, request._offered_ns, request.instance_id, request.round,
            request.split, request.index,
        )  # fmt: skip

    def find(self, request: Request) -> tuple[Prompt, int] | None:
        """Return a sample's partial rollout and number of releases; None without an entry."""
        if not os.path.exists(self._path):
            return None
        with self._locked() as file:
            entry = _newest(_read(file.fd)).get(self._key(request))
        if entry is None or not entry.prompt:
            return None
        version = self.segment.policy_version
        if None not in (entry.oldest, entry.max_lag) and version - entry.oldest > entry.max_lag:  # type: ignore[operator]
            return None
        return Prompt(entry.prompt, 0), entry.times

    def keep(
        self, request: Request, so_far: Mapping[str, Any], state: Any, max_lag: int | None
    ) -> None:
        """Keep a partial rollout; raise BusFullError without room."""
        entry = _Entry(
            self._key(request),
            encode_prompt(so_far, state),
            request.releases + 1,
            version_span(request, so_far)[0] if "token_versions" in so_far else None,
            max_lag,
        )
        self._append(entry)

    def forget(self, request: Request) -> None:
        """Forget a sample's partial rollout, after its answer or new start."""
        if os.path.exists(self._path):
            self._append(_Entry(self._key(request)))

    def _append(self, entry: _Entry) -> None:
        raw = _encoder.encode(entry)
        with self._locked() as file:
            entries = _read(file.fd)
            live = {key: one for key, one in _newest(entries).items() if self._is_open(one)}
            live.pop(entry.key, None)
            whole = b"".join(_packed(_encoder.encode(one)) for one in live.values())
            most = max(_LEAST_BYTES, self.segment.capacity // _PART)
            if entry.prompt:
                if len(whole) + len(raw) > most:
                    raise errors.BusFullError(
                        f"bus {self._name!r}: expected room for {len(raw)} bytes of a partial "
                        f"rollout, got {most - len(whole)} of {most}; release it without so_far, "
                        "or answer it"
                    )
                whole += _packed(raw)
            # In this order: a death leaves fewer entries, and never a replaced entry.
            os.ftruncate(file.fd, 0)
            os.pwrite(file.fd, whole, 0)

    def _is_open(self, entry: _Entry) -> bool:
        """Tell if a request of this bus may still ask for the sample."""
        key = entry.key
        if not entry.prompt or key.bus != self.segment.identity:
            return False
        split = _core.split_number(self.segment, key.split)
        text = _core.request_find(self.segment, key.instance_id, key.round, split)
        return text is not None

    def _locked(self) -> LockedFile:
        if not self._path:
            companion_name(KIND, self._name)  # raises, and says why
        file = LockedFile()
        if not file.take(self._path, f"partial rollouts of bus {self._name!r}", _PATIENCE_S):
            file.close()
            raise errors.BusBusyError(
                f"bus {self._name!r}: {self._path} is locked by a stopped process; end the "
                "process, or remove the file: its samples then start anew"
            )
        return file


def _packed(raw: bytes) -> bytes:
    return _HEAD.pack(len(raw), zlib.crc32(raw)) + raw


def _read(fd: int) -> list[_Entry]:
    """Return the complete entries, up to the first incomplete entry."""
    raw = os.pread(fd, os.fstat(fd).st_size, 0)
    found: list[_Entry] = []
    at = 0
    while at + _HEAD.size <= len(raw):
        size, checksum = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        own = raw[at : at + size]
        if len(own) != size or zlib.crc32(own) != checksum:
            break
        try:
            found.append(_decoder.decode(own))
        except msgspec.DecodeError:
            break
        at += size
    return found


def _newest(entries: list[_Entry]) -> dict[_Key, _Entry]:
    return {one.key: one for one in entries}


def check_continuation(
    request: Request, before: Mapping[str, NDArray[Any]], arrays: Mapping[str, Any], what: str
) -> None:
    """Raise ValueError unless arrays begin with `before`, which keeps each token's sampler."""
    for name, known in before.items():
        given = arrays.get(name)
        if given is None:
            got = "none"
        else:
            own = np.asarray(given) if isinstance(given, (list, tuple)) else as_array(name, given)
            head = own[: len(known)]
            equal = functools.partial(np.array_equal, equal_nan=known.dtype.kind in "fc")
            if own.ndim == known.ndim and equal(head, known):
                continue
            same = min(len(head), len(known)) if own.ndim == known.ndim else 0
            differ = [at for at in range(same) if not equal(head[at], known[at])]
            got = f"another at {differ[0]}" if differ else f"{len(head)} of them"
        raise ValueError(
            f"{what}: group {request.instance_id!r}, sample {request.index}: field {name!r}: "
            f"expected it to begin with the {len(known)} elements that the request has, got {got}; "
            "go on from request.so_far, or set request.so_far = None to start anew"
        )
