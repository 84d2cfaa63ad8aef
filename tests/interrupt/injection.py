"""Raises an exception at a chosen event of this thread: a line, a call, a return, or a call into C.

A signal's handler may raise wherever the interpreter looks for signals: when a function begins,
when a call returns, when a loop goes back. This is a superset of that, but for places at which it
does nothing, and the step between the body of a ``with`` and the call of C that leaves it.
`Injection(k)` raises at the k-th event inside the packages, once; counting the events first tells
how many there are.

Invariant: an injection changes nothing but that; where it has raised, or its block is over, tracing
is off.
"""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Injected", "Injection", "count_events"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("shmbus", "shmbus_ext", "trainer_adapter"))


class Injected(BaseException):
    """What is raised; like KeyboardInterrupt it is no Exception."""


class Injection:
    """Raises `Injected` at one event of the block that it manages.

    Parameters
    ----------
    at : int
        Which event, from 1; 0 counts them only.
    caller : str
        The file whose functions call the library; their calls into C count too.
    """

    def __init__(self, at: int, caller: str) -> None:
        self.at = at
        self.seen = 0
        self.where = ""
        self._caller = caller
        self._ours: dict[str, bool] = {}

    @property
    def raised(self) -> bool:
        """Whether the event was met."""
        return bool(self.where)

    def __enter__(self) -> Injection:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _is_ours(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        known = self._ours.get(name)
        if known is None:
            known = self._ours[name] = name.startswith(PACKAGES)
        return known

    def _meet(self, frame: FrameType, event: str) -> None:
        if self.where:
            return
        self.seen += 1
        if self.seen == self.at:
            sys.settrace(None)
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {event}"
            raise Injected(self.where)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        # What a function returns: a real handler is not told, so it does not keep it alive.
        del argument
        if not self._is_ours(frame):
            return None
        if event != "exception" and not (event == "line" and _cannot_raise(frame)):
            self._meet(frame, event)
        return self._trace

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        # Of another event the argument is what a function returns, at which nobody looks here.
        if event in ("c_call", "c_return") and (
            self._is_ours(frame)
            or (frame.f_code.co_filename == self._caller and frame.f_code.co_name == "operate")
        ):
            name = getattr(argument, "__qualname__", str(argument))
            if not (event == "c_call" and name.endswith("__exit__")):
                self._meet(frame, f"{event} {name}")


def _cannot_raise(frame: FrameType) -> bool:
    """Whether the interpreter does nothing there, so that a compiler need not guard it.

    That is a NOP, such as a ``try:``; and a line that begins a ``with``, since the interpreter is
    there again when it leaves it.
    """
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno)
    return code.co_code[frame.f_lasti] == dis.opmap["NOP"] or line.lstrip().startswith("with ")


def count_events(operate: Callable[[], object], caller: str) -> int:
    """How many events an operation has."""
    with Injection(0, caller) as injection:
        operate()
    return injection.seen
