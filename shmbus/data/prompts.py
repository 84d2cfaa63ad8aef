"""Prompts: as bytes in a request, and decoded for a worker.

A prompt is: length of the table (4 bytes) | table, MessagePack | fields, each at a multiple of 16.
The table is [meta or None, [[name, dtype, shape], ...]], with meta and dtypes encoded as in
records. The decoder never trusts the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.data.encoding import (
    as_array,
    decode_dtype,
    decode_meta,
    encode_dtype,
    encode_meta,
    unknown_field,
)
from shmbus.data.fields import is_argument
from shmbus_ext import _core

_ALIGN = 16
#: Dtypes of undeclared lists: a sample's fields, and the token ids of a prompt.
_KNOWN_DTYPES: Final = {
    **_core.STANDARD_DTYPES, "prompt": np.dtype(np.int32), "token_versions": np.dtype(np.int64),
}  # fmt: skip
_LENGTH = struct.Struct("<I")
#: A claim in the request lane or the retry table: number, word, row, cell, index of the sample.
Claim = tuple[int, int, int, int, int]
#: A request's contents: id, round, split, group_size, need, priority, offered_ns, the prompt's
#: offset in the bytes, and the bytes.
RequestText = tuple[str, "int | None", str, int, int, int, int, int, bytes]
_Table = tuple[bytes | None, list[tuple[str, bytes, list[int]]]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Table)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def encode_prompt(
    fields: Mapping[str, object], meta: object, declared: _core.DeclaredSchema | None = None
) -> bytes:
    """Encode a prompt."""
    for name in fields:
        if is_argument(name):
            raise TypeError(
                f"{name}: a request says no {name}, which is for the worker's put; leave it out, "
                "or call the prompt's field something else"
            )
    if declared is not None:
        fields = _by_schema(fields, declared)
    if len(fields) > _core.MAX_FIELDS:
        raise ValueError(f"prompt: expected at most {_core.MAX_FIELDS} fields, got {len(fields)}")
    table: list[tuple[str, bytes, tuple[int, ...]]] = []
    parts: list[bytes] = []
    for name, value in fields.items():
        array = _as_field(name, value)
        table.append((name, encode_dtype(name, array.dtype), array.shape))
        raw = array.tobytes()
        parts += (raw, bytes(_padded(len(raw)) - len(raw)))
    head = _encoder.encode((None if meta is None else encode_meta(meta), table))
    start = _LENGTH.size + len(head)
    return b"".join((_LENGTH.pack(len(head)), head, bytes(_padded(start) - start), *parts))


def _as_field(name: str, value: object, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Make an array of a value, with its declared dtype; lists need a declared dtype."""
    known = _KNOWN_DTYPES.get(name) if dtype is None else dtype
    if isinstance(value, (str, bytes)):
        raise TypeError(
            f"{name}: expected an array, got {type(value).__name__}; text goes into the meta, as "
            f"in meta={{{name!r}: ...}}"
        )
    if isinstance(value, (list, tuple)):
        if known is None:
            raise TypeError(
                f"{name}: expected an array, got {type(value).__name__}; declare its dtype, as in "
                f"Feeder(..., schema={{{name!r}: 'int32'}}), or prompt_schema= of a Consumer or a "
                f"handler, or wrap it: np.asarray({name}, dtype=np.int32)"
            )
        return _core.convert_field(name, value, known)
    if dtype is not None and isinstance(value, (bool, int, float)):
        return _core.convert_field(name, value, dtype)
    array = as_array(name, value, dtype is not None)
    return array if dtype in (None, array.dtype) else _core.convert_field(name, array, dtype)


def _by_schema(
    fields: Mapping[str, object], declared: _core.DeclaredSchema
) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    dimensions: dict[str, tuple[int, str]] = {}
    for name in fields:
        if name not in declared.names:
            raise unknown_field(name, declared.names)
    for name, dtype, shape, required in declared.fields():
        if name not in fields:
            if required:
                raise TypeError(f"missing the field {name!r}, which the schema requires")
            continue
        found[name] = _declared_field(name, fields[name], dtype, shape, dimensions)
    return found


def _declared_field(
    name: str,
    value: object,
    dtype: np.dtype[Any],
    shape: tuple[int | str | None, ...] | None,
    dimensions: dict[str, tuple[int, str]],
) -> NDArray[Any]:
    """Make an array of a value, with the dtype and of the shape that a schema declares."""
    array = _as_field(name, value, dtype)
    if shape is None:
        return array
    sizes = list(zip(shape, array.shape, strict=False))
    if len(shape) != array.ndim or any(
        isinstance(size, int) and size != got for size, got in sizes
    ):
        raise ValueError(f"{name}: expected the shape {shape}, got {array.shape}")
    for size, got in sizes:
        if isinstance(size, str) and dimensions.setdefault(size, (got, name))[0] != got:
            other, first = dimensions[size]
            raise ValueError(
                f"{name}: expected the shape {shape} with {size} = {other}, as {first} has it, "
                f"got {array.shape}"
            )
    return array


def shared_fields(shared: object, declared: _core.DeclaredSchema | None) -> dict[str, NDArray[Any]]:
    """Return the arrays shared by a group's samples as fields of the first sample."""
    if not isinstance(shared, Mapping):
        raise TypeError(f"shared: expected a mapping, got {type(shared).__name__}")
    known = {} if declared is None else {each[0]: each for each in declared.fields()}
    dimensions: dict[str, tuple[int, str]] = {}
    found: dict[str, NDArray[Any]] = {}
    for name, value in shared.items():
        if not isinstance(name, str) or is_argument(name):
            raise ValueError(f"shared: expected names of arrays, got {name!r}")
        if declared is None:
            found[_core.SHARED_PREFIX + name] = _as_field(name, value)
        elif name in known:
            _, dtype, shape, _ = known[name]
            array = _declared_field(name, value, dtype, shape, dimensions)
            found[_core.SHARED_PREFIX + name] = array
        else:
            raise unknown_field(name, declared.names)
    return found


class Partials(Protocol):
    """Store of a request's partial rollouts."""

    def find(self, request: Request, /) -> tuple[Prompt, int] | None:
        """Give the request's partial rollout and its number, or None."""
        ...


class Prompt:
    """A lazily decoded prompt, with its own bytes."""

    __slots__ = ("_fields", "_meta", "_raw", "_start")

    def __init__(self, raw: bytes, start: int) -> None:
        self._raw = raw
        self._start = start
        self._fields: dict[str, NDArray[Any]] | None = None if raw else {}
        self._meta: bytes | None = None

    @property
    def fields(self) -> dict[str, NDArray[Any]]:
        """The arrays by name; they are read-only, and live as long as anybody holds them."""
        if self._fields is None:
            self._decode()
        assert self._fields is not None
        return self._fields

    @property
    def meta(self) -> Any:
        """The meta, decoded anew at every access; None for a prompt without meta."""
        if self._fields is None:
            self._decode()
        return None if self._meta is None else decode_meta(self._meta)

    def _decode(self) -> None:
        raw, at = self._raw, self._start
        found: dict[str, NDArray[Any]] = {}
        try:
            (size,) = _LENGTH.unpack_from(raw, at)
            meta, table = _decoder.decode(memoryview(raw)[at + 4 : at + 4 + size])
            offset = at + _padded(4 + size)
            for name, described, shape in table:
                dtype = decode_dtype(name, described)
                count = int(np.prod(shape, dtype=object)) if shape else 1
                found[name] = np.frombuffer(raw, dtype, count, offset).reshape(shape)
                offset += _padded(count * dtype.itemsize)
        except (struct.error, msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"prompt: its {len(raw) - at} bytes are damaged: {error}") from error
        self._meta, self._fields = meta, found


class Request:
    """One sample to make: ``request[name]`` returns a field of its prompt.

    The request owns its memory: the arrays are read-only copies, valid for as long as they are
    held.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int | None
        Number of this repetition of the prompt.
    split : str
        Purpose of the group.
    group_size : int
        Samples of the group; 0 if unknown, for a sample from `requests.retries`.
    need : int
        Samples that complete the group.
    index : int
        Position of this sample in the group.
    priority : int
        The offered priority.
    attempt : int
        0 for the first attempt; grows with repeated requests.
    reason : str
        Reason for the repeated request; "" for the first attempt.
    so_far : dict of str to array, or None
        Partial rollout of the worker that released the request, to continue: its tokens begin with
        the prompt's. Read from the bus at the first access. None without a partial rollout; set to
        None to start anew.
    state : object
        That worker's state beside the partial rollout, for example of an environment.
    releases : int
        How often a worker released the sample with a partial rollout.

    Raises
    ------
    TypeError
        The constructor was called by a user: requests come from `Producer.requests.next`.
    """

    __slots__ = (
        "_claim", "_found", "_offered_ns", "_partials", "_prompt", "_salt", "attempt",
        "group_size", "index", "instance_id", "need", "priority", "reason", "round", "split",
    )  # fmt: skip

    instance_id: str
    round: int | None
    split: str
    group_size: int
    need: int
    index: int
    priority: int
    attempt: int
    reason: str
    _claim: Claim
    _prompt: Prompt
    #: Offer time of the group, and the store of partial rollouts.
    _offered_ns: int
    _partials: Partials | None
    #: The partial rollout after its first lookup; 0 before.
    _found: tuple[Prompt, int] | Literal[0] | None
    _salt: Callable[[], str]

    def __init__(self) -> None:
        raise TypeError("a Request is not made by its user; take one by Producer.requests.next")

    @classmethod
    def _of(
        cls,
        text: RequestText,
        prompt: Prompt,
        index: int,
        salt: Callable[[], str],
        claim: Claim,
        retry: tuple[int, str] = (0, ""),
        partials: Partials | None = None,
    ) -> Request:
        self = cls.__new__(cls)
        self._salt = salt
        (
            self.instance_id, self.round, self.split, self.group_size, self.need, self.priority,
            self._offered_ns, *_
        ) = text  # fmt: skip
        self._partials = partials
        self._found = 0
        self.index = index
        self._claim = claim
        self._prompt = prompt
        self.attempt, self.reason = retry
        return self

    @property
    def meta(self) -> Any:
        """The request's meta, decoded; None for a request without meta."""
        return self._prompt.meta

    @property
    def cache_salt(self) -> str:
        """Salt for every engine call: vLLM's ``cache_salt``, SGLang's ``extra_key``.

        The salt belongs to the version the engines run now. Read it for every call: then no call is
        served from a prefix cache of older weights.
        """
        return self._salt()

    @property
    def fields(self) -> dict[str, NDArray[Any]]:
        """All fields of the prompt by name."""
        return dict(self._prompt.fields)

    def _partial(self) -> tuple[Prompt, int] | None:
        if self._found == 0:
            known = self._offered_ns and self._partials is not None
            self._found = self._partials.find(self) if known and self._partials else None
        return self._found

    @property
    def so_far(self) -> dict[str, NDArray[Any]] | None:
        """Another worker's partial rollout, to continue; None without a partial rollout."""
        found = self._partial()
        return None if found is None else dict(found[0].fields)

    @so_far.setter
    def so_far(self, value: None) -> None:
        if value is not None:
            raise TypeError(
                f"so_far: expected None, to start anew, got {type(value).__name__}; give a partial "
                "sample back by requests.release(request, so_far=...)"
            )
        self._found = None

    @property
    def state(self) -> Any:
        """State given by the worker that released the request; None without state."""
        found = self._partial()
        return None if found is None else found[0].meta

    @property
    def releases(self) -> int:
        """How often the sample was released with a partial rollout."""
        found = self._partial()
        return 0 if found is None else found[1]

    def _group(self) -> dict[str, Any]:
        """Return the group's arguments of a sample, or of a failure report."""
        group: dict[str, Any] = {"group_size": self.group_size, "round": self.round}
        if self.need != self.group_size:
            group["need"] = self.need
        if self.split != _core.TRAIN:
            group["split"] = self.split
        return group

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self._prompt.fields[name]
        except KeyError:
            raise KeyError(
                f"{name!r}: the prompt of {self.instance_id!r} has the fields "
                f"{sorted(self._prompt.fields)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._prompt.fields

    def __repr__(self) -> str:
        round = "" if self.round is None else f" round={self.round}"
        again = f" attempt={self.attempt}" if self.attempt else ""
        return f"<Request {self.instance_id!r}{round} {self.index}/{self.group_size}{again}>"


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker's sample, for another process's check if the sample is wanted."""

    instance_id: str
    round: int | None
    split: str
    group_size: int
    index: int
    claim: Claim


def check_request(value: object) -> Request:
    """Return the request a worker answers, checked."""
    if not isinstance(value, Request):
        raise TypeError(
            f"request: expected a request from requests.next, got {type(value).__name__}; "
            "requests.next returns None after its timeout: check for None first"
        )
    return value
