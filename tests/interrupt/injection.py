"""Raises an exception at a chosen event of this thread: a line, a call, a return, or a call into C.

`Injection(k)` raises once, at the k-th event inside the packages; a first run counts the events.
They cover every place where a signal's handler may raise, and more, without: the end of a `with`
block before `__exit__`, empty steps, and a constructor's return.

Invariant: an injection changes nothing else; after its exception, or its block, tracing is off.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("shmbus", "shmbus_ext", "trainer_adapter"))

#: Small functions of the standard library with our objects in their variables for a moment.
HELPERS = tuple(
    f"{Path(sysconfig.get_path('stdlib')) / name}.py"
    for name in ("typing", "contextlib", "functools", "copy", "dataclasses", "enum")
)


class Injected(BaseException):
    """The injected exception; like KeyboardInterrupt no Exception."""


#: By the identity of a code object, kept alive: a hash of the object would read its whole content
#: at every event.
_EXITS: dict[int, tuple[CodeType, frozenset[int]]] = {}


def exits_of(code: CodeType) -> frozenset[int]:
    """Return the offsets after a `with` block and before the call of its `__exit__`."""
    found = _EXITS.get(id(code))
    if found is None:
        found = _EXITS[id(code)] = (code, _find_exits(code))
    return found[1]


def _find_exits(code: CodeType) -> frozenset[int]:
    """Look for the offsets in the bytecode."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    found = {step.offset for step in steps if step.opname == "NOP"}
    for at in range(len(steps)):
        names = [step.opname for step in steps[at : at + 5]]
        if "WITH_EXCEPT_START" in names[:2] and names[0] in ("PUSH_EXC_INFO", "WITH_EXCEPT_START"):
            # An exception left the block.
            found.add(steps[at].offset)
        nones = [step.opname == "LOAD_CONST" and step.argval is None for step in steps[at:][:3]]
        if nones == [True, True, True] and "CALL" in names[3:]:
            last = at + names.index("CALL")
        elif nones[:1] == [True] and names[1:4] == ["DUP_TOP", "DUP_TOP", "CALL_FUNCTION"]:
            last = at + 3
        else:
            continue
        first = at
        while first and steps[first - 1].opname in ("NOP", "SWAP", "ROT_TWO", "POP_BLOCK"):
            first -= 1
        found.update(step.offset for step in steps[first : last + 1])
    return frozenset(found)


class Injection:
    """Raises `Injected` at the `at`-th event of its block; 0 only counts events."""

    def __init__(self, at: int, caller: str) -> None:
        self.at = at
        self.seen = 0
        self.where = ""
        self._caller = caller
        self._ours: dict[str, bool] = {}

    @property
    def raised(self) -> bool:
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
            known = self._ours[name] = name.startswith(PACKAGES) or name in HELPERS
        return known

    def _meet(self, frame: FrameType, event: str) -> None:
        name = frame.f_code.co_name
        # An exception in a finalizer reaches no caller.
        if self.where or name == "__del__" or (event == "return" and name == "__init__"):
            return
        if (
            event != "return"
            and "c_return" not in event
            and frame.f_lasti in exits_of(frame.f_code)
        ):
            return
        self.seen += 1
        if self.seen == self.at:
            sys.settrace(None)
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {event}"
            raise Injected(self.where)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        # Drop a function's result: a real handler would not keep the object alive.
        del argument
        if not self._is_ours(frame):
            return None
        if event != "exception":
            self._meet(frame, event)
        return self._trace

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        # For further events the argument is a function's result, unused here.
        if event in ("c_call", "c_return") and (
            self._is_ours(frame)
            or (frame.f_code.co_filename == self._caller and frame.f_code.co_name == "operate")
        ):
            name = getattr(argument, "__qualname__", str(argument))
            self._meet(frame, f"{event} {name}")


def count_events(operate: Callable[[], object], caller: str) -> int:
    with Injection(0, caller) as injection:
        operate()
    return injection.seen
