"""Every order of events among parts that exchange messages: the search in C, built and called.

Invariants:

- A part is asked for its reaction to an input once for each of its states; answers are cached.
- A violation comes with a shortest sequence of events.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

SOURCE = Path(__file__).with_name("every_order.c")
PARTS = 4
NUMBER_BITS, FOR_BITS = 22, 2
_LAST = (1 << NUMBER_BITS) - 1
DIE, STEP, ASK = "die", "step", "ask"
_INPUTS = {_LAST: DIE, _LAST - 1: STEP, _LAST - 2: ASK}
CAN_STEP = 1 << 31
EVENT_SHIFT = 28
EVENTS = (
    "deliver", "lose", "double", "step", "die", "die with its messages", "ask early", "ask again"
)  # fmt: skip
MOST_MESSAGES, MOST_SAID = 96, 96
MOST_EVENTS = 4096
#: Far above a correct protocol's needs, far below the memory's limit: 24 bytes a state.
MOST_STATES = 250_000_000
FOR_NOTHING, FOR_NOTHING_IN_HIS_LIFE, VIOLATION = 1, 2, 4

S = TypeVar("S")


class Said(NamedTuple):
    """A message, its receiver, and the parties that sent or await it; an event has no receiver."""

    message: Hashable
    to: int
    parties: tuple[int, ...]


class Part(Protocol[S]):
    """A program with inputs; `S`, immutable, is its whole state at an instant."""

    def key(self, state: S) -> Hashable:
        """Return everything that decides its future."""

    def can_step(self, state: S) -> bool:
        """Whether it would act by itself."""

    def after(self, state: S, given: Any) -> tuple[S, list[Said]]:
        """Return state and messages after a message, or after DIE, STEP or ASK."""

    def for_nothing(self, state: S, message: Any) -> int:
        """Return FOR_NOTHING, or _IN_HIS_LIFE, for a message refused for ever by its numbers."""


class Faults(NamedTuple):
    """Limits: deaths, lost or doubled messages, early repetitions of questions."""

    deaths: int = 0
    losses: int = 0
    doubles: int = 0
    hurries: int = 0


class Found(NamedTuple):
    """Counts of a search: states of the whole, and of the parts alone."""

    states: int
    events: int
    asked: int
    rounds: int

    def __str__(self) -> str:
        return (
            f"{self.states:,} states, {self.events:,} events, {self.asked:,} of single parts; "
            f"{self.rounds} rounds of asking to the end"
        )


_NEXT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_uint32),
)  # fmt: skip
_REST = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32)
)


class _System(ctypes.Structure):
    _fields_ = (("next", _NEXT), ("rest", _REST))


class _State(ctypes.Structure):
    _fields_ = (
        ("part", ctypes.c_uint32 * PARTS),
        ("deaths", ctypes.c_uint8),
        ("losses", ctypes.c_uint8),
        ("doubles", ctypes.c_uint8),
        ("hurries", ctypes.c_uint8),
        ("count", ctypes.c_uint32),
        ("message", ctypes.c_uint32 * MOST_MESSAGES),
    )


def _library() -> ctypes.CDLL:
    """Build the search once for each content."""
    compiler = os.environ.get("CC", "cc")
    name = hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"shmbus-every-order-{os.getuid()}-{name}.so"
    if not built.exists():
        flags = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-O2", "-shared"]
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*compiler.split(), *flags, "-fPIC", "-o", str(unfinished), str(SOURCE)], check=True
        )
        unfinished.rename(built)
    library = ctypes.CDLL(str(built))
    library.search_begin.restype = ctypes.c_void_p
    library.search_begin.argtypes = (ctypes.POINTER(_State), _System, ctypes.c_uint64)
    for call in ("search_run", "search_end", "search_counts", "search_way"):
        getattr(library, call).argtypes = (ctypes.c_void_p,)
    library.search_counts.argtypes += (ctypes.POINTER(ctypes.c_uint64),)
    library.search_way.argtypes += (ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32)
    return library


class _Search(Generic[S]):
    """Numbers of states and messages, and errors raised in between."""

    def __init__(
        self,
        parts: Sequence[Part[Any]],
        rest: Callable[[Sequence[Any]], tuple[list[Any], list[Said]] | None],
    ) -> None:
        self.parts = parts
        self.rest_of = rest
        self.states: list[list[Any]] = [[] for _ in parts]
        self.numbers: list[dict[Hashable, int]] = [{} for _ in parts]
        self.messages: list[Said] = []
        self.words: dict[Hashable, int] = {}
        self.error: BaseException | None = None
        self.violations: dict[tuple[int, int, int], AssertionError] = {}

    def number(self, part: int, state: Any) -> int:
        key = self.parts[part].key(state)
        found = self.numbers[part].get(key)
        if found is None:
            found = self.numbers[part][key] = len(self.states[part])
            self.states[part].append(state)
        return found | (CAN_STEP if self.parts[part].can_step(state) else 0)

    def word(self, said: Said) -> int:
        key = (type(said.message), said.message)
        found = self.words.get(key)
        if found is None:
            number = len(self.messages)
            assert number < _LAST - 2
            self.messages.append(said)
            found = number | said.to << NUMBER_BITS
            for party in said.parties:
                found |= 1 << (NUMBER_BITS + FOR_BITS + party)
            self.words[key] = found
        return found

    def next(self, part: int, number: int, given: int, into: Any) -> int:
        try:
            return self._next(part, number, given, into)
        except BaseException as error:  # travels through C, and is raised behind it
            self.error = error
            return -1

    def _next(self, part: int, number: int, given: int, into: Any) -> int:
        program, state = self.parts[part], self.states[part][number]
        is_message = given not in _INPUTS
        what = self.messages[given].message if is_message else _INPUTS[given]
        try:
            after, said = program.after(state, what)
        except AssertionError as error:
            self.violations[part, number, given] = error
            into[0], into[1] = number, VIOLATION
            return 2
        into[0], into[1] = self.number(part, after), 0
        if is_message and not said and into[0] & ~CAN_STEP == number:
            into[1] = program.for_nothing(state, what)
        assert len(said) <= MOST_SAID
        for i, each in enumerate(said):
            into[2 + i] = self.word(each)
        return 2 + len(said)

    def rest(self, parts: Any, into: Any) -> int:
        try:
            numbers = [parts[i] & ~CAN_STEP for i in range(PARTS)]
            found = self.rest_of([self.states[i][n] for i, n in enumerate(numbers)])
            if found is None:
                return 0
            for i, state in enumerate(found[0]):
                into[i] = self.number(i, state)
            for i, each in enumerate(found[1]):
                into[PARTS + i] = self.word(each)
            return PARTS + len(found[1])
        except BaseException as error:
            self.error = error
            return -1

    def tell(self, event: int) -> str:
        kind, what = event >> EVENT_SHIFT, event & ((1 << EVENT_SHIFT) - 1)
        if kind < 3:
            return f"{EVENTS[kind]} {self.messages[what & _LAST].message}"
        return EVENTS[kind] if kind == len(EVENTS) - 1 else f"{EVENTS[kind]}: part {what}"


def visit_every_order(
    parts: Sequence[Part[Any]],
    first: Sequence[Any],
    said: Sequence[Said],
    faults: Faults,
    rest: Callable[[Sequence[Any]], tuple[list[Any], list[Said]] | None],
) -> Found:
    """Visit every state of four parts; an error carries the way as notes."""
    library = _library()
    search: _Search[Any] = _Search(parts, rest)
    state = _State(
        (ctypes.c_uint32 * PARTS)(*(search.number(i, each) for i, each in enumerate(first))),
        *faults,
        len(said),
    )
    state.message[: len(said)] = sorted(search.word(each) for each in said)
    system = _System(_NEXT(search.next), _REST(search.rest))
    at = library.search_begin(ctypes.byref(state), system, MOST_STATES)
    assert at, f"not begun: {search.error}"
    try:
        why = library.search_run(at)
        counts = (ctypes.c_uint64 * 4)()
        library.search_counts(at, counts)
        found = Found(*counts)
        if not why:
            return found
        events = (ctypes.c_uint32 * MOST_EVENTS)()
        way = list(events[: library.search_way(at, events, MOST_EVENTS)])
    finally:
        library.search_end(at)
    raise _what_was_found(search, why, way, found)


def _what_was_found(search: _Search[Any], why: int, way: list[int], found: Found) -> BaseException:
    error = search.error
    if error is None and why == -4:
        error = search.violations[next(reversed(search.violations))]
    if error is None:
        reasons = {-1: "too many states", -2: "too much under way", -3: "out of memory",
                   -5: "it comes to no end: all ask again, for ever"}  # fmt: skip
        error = AssertionError(reasons[why])
    error.add_note("\n".join(search.tell(event) for event in reversed(way)))
    error.add_note(f"after {found}")
    return error
