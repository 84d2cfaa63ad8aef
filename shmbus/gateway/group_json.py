"""JSON bodies: decoded by type, with a sentence for each error.

Python's ``json`` writes values beyond JSON (NaN, true for 1, lone surrogates). Such bodies get a
second look, to accept or refuse them by name.
"""

from __future__ import annotations

import json
import math
import re
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from shmbus.http.access import Refusal
from shmbus.peers.atropos import KEYS

_T = TypeVar("_T")


class ScoredGroup(msgspec.Struct, kw_only=True):
    """A ScoredDataGroup, with the keys of `shmbus.peers.atropos.KEYS`."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


_strict: dict[bool, msgspec.json.Decoder[Any]] = {
    False: msgspec.json.Decoder(ScoredGroup),
    True: msgspec.json.Decoder(list[ScoredGroup]),
}
#: Keys with numbers that Python may write as true and false.
_NUMBERS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs",
    "distill_token_ids", "distill_logprobs",
)  # fmt: skip


def unprocessable(message: str) -> Refusal:
    """Return the refusal of an unusable JSON body."""
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, message)


#: A possible number beyond float64, infinite in Python.
_MAYBE_INFINITE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{309}")


def _refuse_constant(name: str) -> Any:
    raise unprocessable(
        f"{name}: expected finite numbers, since JSON holds no NaN and no infinity; replace them "
        "before the group is sent"
    )


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text[:40])


def _parse(body: bytes | bytearray | memoryview) -> Any:
    """Parse like Python's json, and refuse by name values impossible in answers."""
    text = bytes(body)
    of_float = _finite if _MAYBE_INFINITE.search(text) else None
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant, parse_float=of_float)
        msgspec.json.encode(parsed)
    except UnicodeEncodeError as error:
        raise unprocessable(
            f"body: expected text, got half of a surrogate pair, {error.object[error.start]!a}; "
            "replace it, as text.encode('utf-8', 'replace') does, and send it again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise unprocessable(
            f"body: expected JSON, got {error}; send what json.dumps writes"
        ) from error
    return parsed


def _as_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_numbers(each) for each in value]
    return int(value) if isinstance(value, bool) else value


def decode(body: bytes | bytearray | memoryview, kind: type[_T]) -> _T:
    """Return a body as `kind`."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        return msgspec.convert(_parse(body), kind, strict=False)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise unprocessable(f"body: {error}; correct it and send it again") from error


def decode_groups(body: bytes | bytearray | memoryview, *, several: bool) -> list[ScoredGroup]:
    """Return the groups of a body: one, or a list of them."""
    try:
        found = _strict[several].decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        found = _decode_leniently(body, several)
    groups: list[ScoredGroup] = found if several else [found]
    for group in groups:
        for messages in group.messages or ():
            for message in messages:
                if "role" not in message or "content" not in message:
                    raise unprocessable(
                        "messages: expected 'role' and 'content' in each message, got "
                        f"{', '.join(map(repr, message)) or 'no keys'}; add the missing keys"
                    )
    return groups


def _decode_leniently(body: bytes | bytearray | memoryview, several: bool) -> Any:
    parsed = _parse(body)
    for group in parsed if isinstance(parsed, list) else [parsed]:
        if isinstance(group, dict):
            for name in _NUMBERS:
                if name in group:
                    group[name] = _as_numbers(group[name])
    kind: Any = list[ScoredGroup] if several else ScoredGroup
    try:
        return msgspec.convert(parsed, kind, strict=False)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise unprocessable(f"body: {error}; correct it and send the group again") from error


assert tuple(ScoredGroup.__struct_fields__) == KEYS
