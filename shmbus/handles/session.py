"""A sample's calls through a recorder, from the worker that holds the sample.

The request stays with this worker: the recorder hands over the rows, and this module puts them. If
worker or recorder dies, the sample is requested again, once.

Invariants:

- A session ends once: put, failed or released. A recorder or an agent cannot keep the request in
  hand.
- No token passes through Python objects: rows come as bytes.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import check_timeout
from shmbus.data.sample_rows import PREFIX
from shmbus.segment.recorder_files import RecorderNote, read_recorders

if TYPE_CHECKING:
    from shmbus.data.prompts import Request
    from shmbus.handles.producer_requests import ProducerRequests


logger = logging.getLogger("shmbus.session")

#: Largest score of either sign that a put accepts.
MOST_SCORE: Final = limits.MAX_SCORE

#: Seconds for a recorder's answer: the recorder copies rows, and never waits.
_ANSWER_S: Final = 60.0
#: Seconds between two looks for a missing recorder.
_LOOK_S: Final = 0.1
#: Fields of sampled tokens: 0 in a prefix, which another row trains.
_OF_SAMPLED: Final = frozenset({"loss_mask", "logprobs"})


class _Worker(Protocol):
    name: str

    @property
    def requests(self) -> ProducerRequests: ...


class Branch(NamedTuple):
    """A row of a tree: the parent's number, elements shared with the parent, fields of the rest."""

    parent: int | None
    prefix: int
    fields: dict[str, NDArray[Any]]


def join_branches(branches: Sequence[Branch]) -> list[dict[str, Any]]:
    """Return the whole rows of a tree; parents come first, prefixes are untrained."""
    rows: list[dict[str, Any]] = []
    for parent, prefix, own in branches:
        row: dict[str, Any] = {PREFIX: prefix, **own}
        if parent is not None:
            for name, values in own.items():
                shared = rows[parent][name][:prefix]
                if name in _OF_SAMPLED:
                    shared = np.zeros_like(shared)
                row[name] = np.concatenate((shared, values), dtype=values.dtype)
        rows.append(row)
    return rows


class PackedArray(msgspec.Struct, frozen=True):
    """An array on its way from a recorder."""

    dtype: str
    shape: list[int]
    data: bytes


class PackedRow(msgspec.Struct, frozen=True):
    """A row of a tree on the way from a recorder."""

    parent: int | None
    prefix: int
    fields: dict[str, PackedArray]


class PackedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A session's samples: a tree of rows, versions, and known facts."""

    branches: list[PackedRow]
    versions: tuple[int, int]
    meta: dict[str, Any]


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A recorder's answer to a client that opens a session."""

    key: str
    base_url: str


class _Refused(msgspec.Struct):
    """A recorder's reason for refusing rows; a blameless sample is released."""

    message: str = ""
    code: str = ""
    #: An ended session's own reason.
    reason: str = ""


class _Answer(msgspec.Struct):
    error: _Refused


class _Told(msgspec.Struct):
    #: True if no engine answered the last call.
    no_engine: bool = False


_T = TypeVar("_T")

# Built at import: msgspec builds the tables of a type at the first use, and the process crashes if
# two threads of a worker meet there.
_SAMPLES: Final = msgspec.msgpack.Decoder(PackedSample)
_OPENED, _ANSWERS, _TOLD = (
    msgspec.json.Decoder(Opened), msgspec.json.Decoder(_Answer), msgspec.json.Decoder(_Told)
)  # fmt: skip

#: Ends without the sample's fault: the sample is requested again without a retry.
_NOT_ITS_FAULT: Final = frozenset({"engine", "recorder_ended", "unknown_session"})


class Session:
    """A sample made by an agent that calls a recorder: from `Producer.session`.

    Give `base_url` and `api_key` to the agent, as an OpenAI or an Anthropic client takes them, or
    `environ` to its process; then call `finish` with a score. Leaving the block without a score
    fails the sample. An exception of the agent also fails the sample and propagates. If the
    recorder does not answer, or has no answering engine, the sample is released instead. The block
    swallows an exception only after the recorder ended the session.

    Attributes
    ----------
    request : Request
        The sample.
    base_url, api_key : str
        Address and key for every call of the sample.
    why : str
        Reason why the sample was not put; "" before the end and after a put.

    Raises
    ------
    TypeError
        The constructor was called by a user: sessions come from `Producer.session`.
    """

    __slots__ = ("_packed", "_producer", "_state", "_url", "api_key", "base_url", "request", "why")

    request: Request
    base_url: str
    api_key: str
    why: str
    _producer: _Worker
    _url: str
    _packed: PackedSample | None
    _state: Literal["open", "put", "failed", "released", "unwanted"]

    def __init__(self) -> None:
        raise TypeError("a Session is not made by its user; open one by Producer.session")

    @classmethod
    def _open(
        cls, producer: _Worker, request: Request, url: str | None, wait: float | None
    ) -> Session:
        wait = check_timeout(wait, "wait")
        self = cls.__new__(cls)
        self._producer, self.request, self.why, self._state = producer, request, "", "open"
        self._packed = None
        try:
            self._url, opened = _open_somewhere(producer, request, url, wait)
        except BaseException:
            producer.requests.release(request)
            raise
        self.base_url, self.api_key = opened.base_url, opened.key
        return self

    @property
    def environ(self) -> dict[str, str]:
        """Variables that clients of OpenAI and of Anthropic read, for an agent's own process."""
        root = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
        }

    # -- ends -----------------------------------------------------------------------------------

    def finish(
        self,
        score: float | None,
        *,
        meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> bool:
        """Put the sample with its score; running calls end.

        Parameters
        ----------
        score : float or None
            Finite; None if the collecting side scores the group. Other values fail the sample.
        meta : mapping, optional
            Added to the sample's meta, beside the recorder's keys: "turns", "drift",
            "finish_reason", "engine".
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.
        **fields
            Further fields of the whole sample, as for `put`.

        Returns
        -------
        bool
            False if nothing was put, because the sample is no longer wanted or unfit for training;
            `why` names the reason.

        Raises
        ------
        RuntimeError
            The session ended already: a sample takes a single score.
        BusFullError, BusClosedError, BusRemovedError, StallError, TypeError, ValueError
            As for `put`; the session goes on, and may be finished again.
        """
        self._require_open(f"the score {score}")
        if score is not None and _is_beyond(score):
            return self.fail(f"score: expected a number within 1e38, got {score}")
        if self._packed is None:
            packed = self._take_rows()
            if packed is None:
                return False
            self._packed = packed
        packed = self._packed
        put = self._producer.requests.answer(
            self.request,
            score=score,
            rows=_rows_of(packed),
            policy_version=packed.versions,
            meta={**packed.meta, **(meta or {})},
            timeout=timeout,
            **fields,
        )
        self._state, self._packed = ("put" if put else "unwanted"), None
        if not put:
            self.why = "the sample is not wanted any more"
        return put

    def fail(self, reason: str) -> bool:
        """Report a failed sample: a new request follows its consumer's policies.

        Parameters
        ----------
        reason : str
            Message to operators and to the next worker.

        Returns
        -------
        bool
            False, as `finish` returns without a put.

        Raises
        ------
        RuntimeError
            The session ended already.
        """
        self._require_open("a failure")
        self._end_at_recorder(reason)
        self._fail(reason)
        return False

    def release(self) -> bool:
        """Give the sample back unmade, for an external cause; uses up no retry.

        Returns
        -------
        bool
            False if the sample no longer belonged to this producer.

        Raises
        ------
        RuntimeError
            The session ended already.
        """
        self._require_open("a release")
        self._end_at_recorder("released by its worker")
        return self._release("released by its worker")

    async def afinish(
        self,
        score: float | None,
        *,
        meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> bool:
        """Put the sample as `finish` does, in a thread.

        A task cancelled during the wait (CancelledError) leaves the put to the thread.
        """
        return await asyncio.to_thread(self.finish, score, meta=meta, timeout=timeout, **fields)

    async def afail(self, reason: str) -> bool:
        """Report a failed sample as `fail` does, in a thread.

        A task cancelled during the wait (CancelledError) leaves the report to the thread.
        """
        return await asyncio.to_thread(self.fail, reason)

    def _require_open(self, what: str) -> None:
        if self._state != "open":
            raise RuntimeError(
                f"session of {self.request.instance_id!r}[{self.request.index}]: got {what}, and "
                f"it has ended already ({self._state}); a sample ends once: open a session for "
                "each request"
            )

    def _fail(self, reason: str) -> None:
        self.why, self._state, self._packed = reason, "failed", None
        if not self._producer.requests.fail(self.request, reason):
            self._state = "unwanted"

    def _release(self, why: str) -> bool:
        self.why, self._state, self._packed = why, "released", None
        return self._producer.requests.release(self.request, reason=why)

    # -- the recorder ---------------------------------------------------------------------------

    def _take_rows(self) -> PackedSample | None:
        """Fetch the recorder's rows; without rows fail or release the sample, and return None."""
        try:
            status, body = _ask(self._url, "/session/rows", self.api_key, b"")
            if status == HTTPStatus.OK:
                return _read(_SAMPLES.decode, body)
        except OSError as error:
            self._release(f"the recorder has gone: {error}")
            logger.warning("%r[%d]: %s", self.request.instance_id, self.request.index, self.why)
            return None
        refused = _refusal(body)
        why = refused.reason or refused.message or f"the recorder answered {status}"
        if refused.code in _NOT_ITS_FAULT or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._release(why)
        else:
            self._fail(why)
        logger.warning("%r[%d]: %s", self.request.instance_id, self.request.index, why)
        return None

    def _end_at_recorder(self, reason: str) -> None:
        """End the session at the recorder, to free its engine at once."""
        body = msgspec.json.encode({"reason": reason})
        try:
            _ask(self._url, "/session/fail", self.api_key, body)
        except OSError as error:
            logger.info("the recorder has gone: %s", error)

    def _blame(self) -> tuple[int, str]:
        """Return the recorder's status for the session, and a reason to release the sample."""
        try:
            status, body = _ask(self._url, "/session", self.api_key, None)
            no_engine = status == HTTPStatus.OK and _read(_TOLD.decode, body).no_engine
        except OSError as error:
            return 0, f"the recorder does not answer: {error}"
        if no_engine:
            return status, "no engine answers"
        said = {HTTPStatus.OK, HTTPStatus.NOT_FOUND}
        return status, "" if status in said else f"the recorder answered {status}"

    # -- a block --------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if self._state != "open":
            return False
        if error is None:
            self.fail("its block was left without a score")
            return False
        if not isinstance(error, Exception):
            self.release()
            return False
        status, blame = self._blame()
        if status == HTTPStatus.NOT_FOUND:
            # The session ended, as the agent learned by its exception; the rows name the reason.
            if self._take_rows() is not None:
                self._fail(f"{type(error).__name__}: {error}")
            return True
        if blame:
            if status:
                self._end_at_recorder(blame)
            self._release(blame)
        else:
            self.fail(f"{type(error).__name__}: {error}")
        return False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return await asyncio.to_thread(self.__exit__, kind, error, traceback)

    def __repr__(self) -> str:
        return f"<Session {self.request.instance_id!r}[{self.request.index}] {self._state}>"


def _is_beyond(score: float) -> bool:
    try:
        return not abs(score) <= MOST_SCORE
    except (TypeError, ValueError):
        return False  # the put names the type


def _rows_of(packed: PackedSample) -> list[dict[str, Any]]:
    return join_branches(
        [
            Branch(
                row.parent,
                row.prefix,
                {
                    name: np.frombuffer(each.data, each.dtype).reshape(each.shape)
                    for name, each in row.fields.items()
                },
            )
            for row in packed.branches
        ]
    )


def _refusal(body: bytes) -> _Refused:
    try:
        return _ANSWERS.decode(body).error
    except msgspec.DecodeError:
        return _Refused(message=f"the recorder answered {body[:200]!r}")


def _open_somewhere(
    producer: _Worker, request: Request, url: str | None, wait: float | None
) -> tuple[str, Opened]:
    """Open a session at the recorder with the fewest, or at a given address."""
    body = msgspec.json.encode({"ticket": producer.requests._ticket(request)})
    deadline = math.inf if wait is None else time.monotonic() + wait
    while True:
        said = ["none runs"]
        found = sorted(read_recorders(producer.name), key=lambda note: note.sessions)
        if url is not None:
            at = url.rstrip("/").removesuffix("/v1")
            found = [note for note in found if note.url == at] or [RecorderNote(url=at, pid=0)]
        for note in found:
            try:
                status, answer = _ask(note.url, "/sessions", note.token, body)
                if status == HTTPStatus.OK:
                    return note.url, _read(_OPENED.decode, answer)
            except OSError as error:
                said.append(f"{note.url}: {error}")
                continue
            said.append(f"{note.url}: {status}: {_refusal(answer).message}")
        if time.monotonic() >= deadline:
            raise errors.RecorderUnavailableError(
                f"bus {producer.name!r}: expected a recorder that takes a session, found "
                f"{'; '.join(said[1:] or said)}; start one: shmbus proxy {producer.name} --engine "
                "http://127.0.0.1:8000"
            )
        time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))


def _read(decode: Callable[[bytes], _T], body: bytes) -> _T:
    """Decode a recorder's answer; raise OSError for another server's."""
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"its answer cannot be read: {error}") from error


def _ask(url: str, path: str, key: str | None, body: bytes | None) -> tuple[int, bytes]:
    """Send a request to a recorder; raise OSError without an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=_ANSWER_S
    )
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
