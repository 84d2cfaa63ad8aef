"""Sessions: keys of samples, their recorded answers, and their ends. No clock, no socket.

Invariants:

- A session ends once, with one word and one sentence, reported to its later callers.
- After its end a session records nothing; its calls in flight are cancelled.
- Bytes kept by sessions are counted, and bounded together with the bodies of calls.
- An undelivered answer is removed, unless a later call continues the answer or the worker holds the
  rows.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

from shmbus.base.format import printable
from shmbus.recorder import settings as limits
from shmbus.recorder.refusals import CallRefusal, bad_request
from shmbus.recorder.settings import Settings
from shmbus.recorder.stitch_chain import Chains
from shmbus.recorder.transcript import Recorded, Transcript, Turn

_KEY_PREFIX: Final = "sk-shmbus-"
#: Bytes of an item of a conversation beside its text: objects of Python.
_ITEM_BYTES: Final = 512


class Place(msgspec.Struct, frozen=True):
    """The group and index of a session's sample."""

    instance_id: str
    index: int
    group_size: int

    def __str__(self) -> str:
        return f"{printable(self.instance_id)}[{self.index}]"


class End(NamedTuple):
    """How a session ended: a word for programs, and a sentence."""

    code: str
    reason: str


def over(place: Place, end: End) -> CallRefusal:
    """Return the refusal for a caller of an ended session."""
    return CallRefusal(
        HTTPStatus.NOT_FOUND,
        end.code,
        f"the session of {place} has ended: {end.reason}; end this rollout, and open a session for "
        "the next sample",
        reason=end.reason,
    )


class Answer:
    """A call's answer in the transcript without confirmed delivery."""

    __slots__ = ("is_cut", "is_sent", "links", "prompt", "recorded", "response_id", "session")

    def __init__(self, session: Session, turn: Turn, response_id: str) -> None:
        #: None after the end of the session: a connection may keep the answer for longer.
        self.session: Session | None = session
        #: Digests of prompt tokens and text, equal in a repeated call.
        self.prompt = hashlib.blake2b(turn.prompt.tobytes()).digest(), hash(turn.said)
        self.recorded: list[Recorded] = []
        #: Places in the session's chains.
        self.links: list[bytes] = []
        self.response_id = response_id
        #: True once the last token of a stream left this process.
        self.is_sent = False
        #: The client reset the connection after the last token of a stream: either the client
        #: stopped reading, or the answer was lost.
        self.is_cut = False


class Conversations(dict[str, list[Any]]):
    """Conversations of responses by their ids; an item of several conversations counts once."""

    def __init__(self, count: Callable[[int], object]) -> None:
        super().__init__()
        self._count = count
        #: Number of conversations and bytes by the identity of an item.
        self._items: dict[int, tuple[int, int]] = {}

    def __setitem__(self, name: str, items: list[Any]) -> None:
        self.pop(name, None)
        for item in items:
            holders, nbytes = self._items.get(id(item)) or (0, _bytes_of(item))
            self._items[id(item)] = holders + 1, nbytes
            if not holders:
                self._count(nbytes)
        super().__setitem__(name, items)

    def __delitem__(self, name: str) -> None:
        for item in self[name]:
            holders, nbytes = self._items.pop(id(item))
            if holders > 1:
                self._items[id(item)] = holders - 1, nbytes
            else:
                self._count(-nbytes)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Take a conversation out."""
        if name not in self:
            return super().pop(name, *default)
        items = self[name]
        del self[name]
        return items


def _bytes_of(item: Any) -> int:
    return _ITEM_BYTES + len(msgspec.json.encode(item))


class Session:
    """One sample in the making."""

    def __init__(self, key: str, place: Place, hold: Any, is_own: bool, now_s: float) -> None:
        self.key = key
        self.place = place
        #: Proof of the demand for the sample: a worker's ticket, or the recorder's request, scored
        #: by a harness over HTTP.
        self.hold = hold
        self.is_own = is_own
        self.opened_s = self.last_s = now_s
        self.transcript = Transcript()
        #: Items left by calls of the responses API for later calls, by the response's id.
        self.history: dict[str, list[Any]] = {}
        #: Answers that later calls may continue.
        self.chains = Chains()
        #: Answers without confirmed delivery.
        self.answers: list[Answer] = []
        #: The session's engine.
        self.engine: Any = None
        #: True if no engine answered the last call.
        self.no_engine = False
        #: True if a call assumed the trainer's version.
        self.assumed = False
        self.calls = 0
        self.end: End | None = None
        #: Closed for calls: the rows were given, or the score put.
        self.sealed = False
        #: The score, and its putting task.
        self.score: float | None = None
        self.putting: Any = None
        #: Bytes of the conversations in `history`.
        self.history_bytes = 0
        self._running: dict[object, Callable[[], object]] = {}

    @property
    def running(self) -> int:
        """Calls in flight."""
        return len(self._running)

    @property
    def nbytes(self) -> int:
        """Bytes of the session."""
        return self.transcript.nbytes + self.history_bytes + self.chains.nbytes

    def require_open(self) -> None:
        """Refuse a call of an ended session."""
        if self.end is not None:
            raise over(self.place, self.end)

    def begin(self, bounds: Settings, call: object, cancel: Callable[[], object]) -> None:
        """Count a call, and note its cancellation; refuse calls beyond the bounds."""
        self.require_open()
        if self.sealed:
            raise CallRefusal(
                HTTPStatus.NOT_FOUND,
                "scored",
                f"the session of {self.place} has its score; make no more calls with its key",
            )
        tokens = self.transcript.tokens
        if self.calls >= bounds.calls or tokens >= bounds.tokens:
            raise bad_request(
                "session_limit",
                f"the session of {self.place} used {self.calls} of {bounds.calls} calls and "
                f"{tokens} of {bounds.tokens} tokens; score or fail the session",
            )
        if len(self._running) >= limits.MAX_CALLS_AT_ONCE:
            raise CallRefusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                "calls_at_once",
                f"the session of {self.place} has {len(self._running)} calls in flight, which is "
                "the most; wait for one",
                retry_after_s=1,
            )
        self.calls += 1
        self._running[call] = cancel

    def deliver(self, call: object) -> None:
        """Let a call finish the transfer of its answer, also after the end of the session."""
        self._running[call] = lambda: None

    def finish_call(self, call: object, now_s: float) -> None:
        """Note the end of a call."""
        self.last_s = now_s
        self._running.pop(call, None)

    def cancel_calls(self) -> None:
        """Cancel the calls in flight, to free their engine."""
        for cancel in list(self._running.values()):
            cancel()


class Sessions:
    """The sessions of a recorder, and their counters."""

    def __init__(self, bounds: Settings) -> None:
        self._bounds = bounds
        self._open: dict[str, Session] = {}
        self._over: OrderedDict[str, tuple[Place, End]] = OrderedDict()
        self.opened = 0
        self.ended: dict[str, int] = {}
        self.drift = self.turns = self.sampled = self.undone = self.grammar = 0
        #: Bytes of the open sessions.
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def require_room(self) -> None:
        """Refuse a session above the limit."""
        if len(self._open) >= self._bounds.sessions:
            raise CallRefusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                "sessions_at_once",
                f"{len(self._open)} sessions are open, which is the most; end one, or start the "
                "recorder with more --sessions",
                retry_after_s=1,
            )

    def open(self, place: Place, hold: Any, is_own: bool, now_s: float) -> Session:
        """Open a session."""
        self.require_room()
        key = _KEY_PREFIX + secrets.token_urlsafe(24)
        session = self._open[key] = Session(key, place, hold, is_own, now_s)
        session.history = Conversations(lambda nbytes: self.keep(session, nbytes))
        self.opened += 1
        return session

    def find(self, key: str) -> Session | None:
        """Return the open session of a key."""
        return self._open.get(key)

    def of_key(self, key: str | None) -> Session:
        """Return the session of a key; refuse an unknown key or an ended session."""
        session = self._open.get(key or "")
        if session is not None:
            return session
        ended = self._over.get(key or "")
        if ended is None:
            got = "none" if not key else "the key of no session"
            raise CallRefusal(
                HTTPStatus.UNAUTHORIZED,
                "unknown_session",
                f"expected the key of a session as 'Authorization: Bearer KEY', 'x-api-key: KEY', "
                f"or in the address as /s/KEY/v1, got {got}; open one by producer.session(request) "
                "or POST /sessions",
            )
        raise over(*ended)

    def record(
        self, session: Session, turns: list[Turn], response_id: str, replaced: list[Answer]
    ) -> tuple[Answer | None, bool]:
        """Record the answers of a call: an answer, None for a closed session, False for drift."""
        self.turns += len(turns)
        self.sampled += sum(len(turn.output) for turn in turns)
        self.grammar += sum(len(turn.output) for turn in turns if turn.grammar)
        if session.end is not None or session.sealed:
            return None, True
        answer = Answer(session, turns[0], response_id)
        for old in replaced:
            if old.prompt == answer.prompt and old in session.answers:
                self._undo(session, old)
        transcript = session.transcript
        before, drift = session.nbytes, transcript.drift
        went_on = all([transcript.add(turn) for turn in turns])
        answer.recorded = transcript.recorded[-len(turns) :]
        session.answers.append(answer)
        self.nbytes += session.nbytes - before
        self.drift += transcript.drift - drift
        return answer, went_on

    def settle(self, answer: Answer, delivered: bool) -> None:
        """Confirm a delivered answer, undo a lost answer."""
        session = answer.session
        if session is None or answer not in session.answers:
            return
        if delivered:
            session.answers.remove(answer)
        elif answer.is_sent:
            answer.is_cut = True
        else:
            self._undo(session, answer)

    def _undo(self, session: Session, answer: Answer) -> None:
        """Remove an answer that did not reach the client."""
        session.answers.remove(answer)
        if session.sealed:
            return
        before = session.nbytes
        undone = [session.transcript.undo(each) for each in reversed(answer.recorded)]
        session.chains.drop(answer.links)
        self.undone += sum(undone)
        self.nbytes += session.nbytes - before
        session.history.pop(answer.response_id, None)

    def keep(self, session: Session, nbytes: int) -> None:
        """Count bytes of a session's history."""
        if session.end is None:
            session.history_bytes += nbytes
            self.nbytes += nbytes

    def chain(self, answer: Answer, *kept: Any) -> None:
        """Keep an answer for calls that continue it."""
        session = answer.session
        if session is not None:
            before = session.chains.nbytes
            answer.links.append(session.chains.keep(*kept))
            self.nbytes += session.chains.nbytes - before

    def end(self, session: Session, code: str, reason: str) -> bool:
        """End a session; False if already ended."""
        if session.end is not None:
            return False
        self.nbytes -= session.nbytes
        session.end = End(code, reason)
        del self._open[session.key]
        self._over[session.key] = (session.place, session.end)
        while len(self._over) > limits.KEEP_ENDED:
            self._over.popitem(last=False)
        self.ended[code] = self.ended.get(code, 0) + 1
        session.cancel_calls()
        for answer in session.answers:
            answer.session = None
        session.history, session.answers, session.chains = {}, [], Chains()
        return True
