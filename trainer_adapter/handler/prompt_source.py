"""Position of a run in its offered prompts, and the content of each prompt.

Invariants:

- A prompt is passed after its offer, or after a refusal with an error. The position counts passed
  prompts; at most one further prompt is drawn, and kept until passed.
- The position changes by one assignment, and an exception in between loses no drawn prompt: the
  next call continues with it.
- The round of a prompt is its place in the whole sequence of offers, so two rounds of an id never
  meet, and a resumed run repeats the same rounds.
- The bus is unknown here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np

#: The form of a saved position.
_VERSION: Final = 1
#: Request arguments: an item may set `_OPTIONS`; columns named like `_NO_FIELDS` go into the meta.
_NO_FIELDS: Final = frozenset({"round", "split", "timeout"})
_OPTIONS: Final = frozenset({"instance_id", "group_size", "need", "priority", "meta"})


class PromptSource:
    """Prompts in their order, each as the arguments of a request."""

    def __init__(self, prompts: Any, fields: frozenset[str]) -> None:
        self.prompts = _checked(prompts)
        self.group_size = 1
        self._fields = fields
        self.is_numbered = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")
        self._keeps_state = not self.is_numbered and hasattr(prompts, "load_state_dict")
        #: Number of passed prompts, and the last passed prompt.
        self._at: tuple[int, Any] = (0, None)
        self._first_round = 0
        self.unchecked = False
        #: Draws (number, item), from its start on.
        self._numbered: Iterator[tuple[int, Any]] | None = None
        #: The drawn prompt not yet passed, at most one.
        self._drawn: list[tuple[int, Any]] = []
        self._arguments: tuple[int, dict[str, Any]] | None = None
        self._raised = False
        self._before: Any = None
        self.ended = False

    @property
    def position(self) -> int:
        """Number of passed prompts."""
        return self._at[0]

    def place_of(self, round_: int) -> int:
        """Return the number of prompts to pass before the prompt of a round; negative after it."""
        return round_ - self._first_round - self.position

    # -- drawing --------------------------------------------------------------------------------

    def next(self) -> dict[str, Any] | None:
        """Return the arguments of the next request, the same ones until `passed`."""
        position = self.position
        if self._arguments is not None and self._arguments[0] == position:
            return self._arguments[1]
        found = self._numbered_item() if self.is_numbered else self._iterated_item()
        if found is None:
            return None
        try:
            arguments = self._as_arguments(found[0], position)
        except TypeError:
            self._at = position + 1, None
            raise
        self._arguments = position, arguments
        return arguments

    def passed(self) -> None:
        """Continue after the prompt of `next`."""
        assert self._arguments is not None
        number, arguments = self._arguments
        self._at = number + 1, _mark(arguments, number)

    def _numbered_item(self) -> tuple[Any] | None:
        position = self.position
        if self.unchecked:
            if position > len(self.prompts):
                raise _others(position, f"the data end after {len(self.prompts)} prompts")
            self._check(self.prompts[position - 1], position - 1)
        self.ended = position >= len(self.prompts)
        return None if self.ended else (self.prompts[position],)

    def _iterated_item(self) -> tuple[Any] | None:
        position = self.position
        while True:
            if not self._drawn:
                self._draw()
            if not self._drawn:
                break
            number, item = self._drawn[0]
            if number == position:
                return (item,)
            if number > position:
                raise ValueError(
                    f"prompts: the iterator has gone on to prompt {number}, and the state stands "
                    f"at {position}; call offer again with an iterator that is at its start"
                )
            if self.unchecked and number == position - 1:
                self._check(item, number)
            self._drawn.clear()
        if self.unchecked:
            raise _others(position, "the data end before it")
        self.ended = True
        return None

    def _draw(self) -> None:
        """Draw one item by a single call of C, without loss to a signal handler."""
        if self._numbered is None:
            start = self.position if self._before is not None else 0
            self._numbered = enumerate(self.prompts, start)
        try:
            if self._keeps_state:
                self._before = self.prompts.state_dict()
            self._drawn.extend(islice(self._numbered, 1))
        except BaseException:
            self._raised = True
            if not self._is_used_up:
                # The source begins anew, and passed prompts are skipped.
                self._numbered = None
                if self._before is not None:
                    self.prompts.load_state_dict(self._before)
            raise
        if not self._drawn and self._raised and self._is_used_up:
            raise ValueError(
                f"prompts: the iterator raised an exception at prompt {self.position}, and is "
                "exhausted; call offer again with an iterator at its start: offer skips the "
                "prompts already offered"
            )
        self._raised = False

    @property
    def _is_used_up(self) -> bool:
        """Return True for a used-up single-pass source."""
        return isinstance(self.prompts, Iterator)

    # -- content of a prompt --------------------------------------------------------------------

    def _as_arguments(self, item: Any, number: int) -> dict[str, Any]:
        if isinstance(item, tuple) and len(item) == 2:
            id_, prompt = item
            given = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
            given["instance_id"] = id_
        elif isinstance(item, Mapping):
            given = dict(item)
        else:
            raise TypeError(
                f"prompts: expected a dict or an (id, prompt) pair, got {type(item).__name__} as "
                f"prompt {number}; enumerate(prompts) makes pairs"
            )
        found: dict[str, Any] = {"instance_id": str(number), "group_size": self.group_size}
        columns: dict[str, Any] = {}
        for name, value in given.items():
            if not isinstance(name, str):
                raise TypeError(f"prompts: expected names as keys of prompt {number}, got {name!r}")
            into = found if name in _OPTIONS or self._is_field(name, value) else columns
            into[name] = value
        meta = found.get("meta")
        if columns:
            if meta is not None and not isinstance(meta, Mapping):
                raise TypeError(
                    f"prompts: expected a dict as the meta of prompt {number}, which takes in "
                    f"{sorted(columns)}, got {type(meta).__name__}"
                )
            found["meta"] = {**columns, **(meta or {})}
        found["round"] = self._first_round + number
        return found

    def _is_field(self, name: str, value: Any) -> bool:
        if name in self._fields or name in _NO_FIELDS:
            return name in self._fields
        if isinstance(value, (list, tuple)):
            return name == "prompt" and all(isinstance(each, (int, np.integer)) for each in value)
        return hasattr(value, "__array__") and not isinstance(value, np.generic)

    # -- checkpoints ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position: plain values, except for the state of `prompts` itself."""
        position, last = self._at
        state: dict[str, Any] = {
            "version": _VERSION,
            "position": position,
            "first_round": self._first_round,
            "last": last,
            "length": len(self.prompts) if self.is_numbered else None,
        }
        if self._keeps_state:
            drawn = self._drawn and self._drawn[0][0] >= position
            state["source"] = self._before if drawn else self.prompts.state_dict()
        return state

    def go_to(self, state: dict[str, Any]) -> None:
        """Continue from a position of this run or an earlier run."""
        position, last, length = check_state(state)
        if length is not None and self.is_numbered and length != len(self.prompts):
            raise _others(position, f"it had {length} prompts, and these are {len(self.prompts)}")
        self._first_round = state["first_round"]
        source = state.get("source")
        if source is not None and self._keeps_state:
            self.prompts.load_state_dict(source)
            self._before, self.unchecked = source, False
        else:
            self._before, self.unchecked = None, position > 0
        if not self._is_used_up:
            self._numbered = None
            self._drawn.clear()
        self._arguments = None
        self.ended = False
        self._at = position, last

    def begin_behind(self, other: PromptSource) -> None:
        """Begin new data, in rounds after the rounds of ended data."""
        self._first_round = other._first_round + other.position

    def _check(self, item: Any, number: int) -> None:
        """Compare a prompt with the checkpoint's mark of the last passed prompt."""
        last = self._at[1]
        if last is not None:
            try:
                here = _mark(self._as_arguments(item, number), number)
            except TypeError:
                here = None
            if list(last) != here:
                changed = " with other content" if here and here[0] == last[0] else ""
                got = f"{here[0]!r}{changed}" if here else "no prompt"
                raise _others(number + 1, f"prompt {number} was {last[0]!r}, and here it is {got}")
        self.unchecked = False


def _checked(prompts: Any) -> Any:
    if isinstance(prompts, (str, bytes, Mapping)):
        raise TypeError(
            f"prompts: expected an iterable of dicts or (id, prompt) pairs, got one "
            f"{type(prompts).__name__}; give a list, or items() of a dict"
        )
    numbered = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")
    if not (numbered or hasattr(prompts, "__iter__")):
        raise TypeError(
            "prompts: expected an iterable, or a data set with a length and __getitem__, got "
            f"{type(prompts).__name__}"
        )
    batch_size = getattr(prompts, "batch_size", None) if hasattr(prompts, "collate_fn") else None
    if batch_size is not None:
        raise ValueError(
            f"prompts: expected a DataLoader with batch_size=None, which gives prompts, got "
            f"batch_size={batch_size}, which gives batches of them"
        )
    return prompts


def _others(position: int, why: str) -> ValueError:
    return ValueError(
        f"prompts: expected the data of the earlier offer or checkpoint, at prompt {position}, in "
        f"the same order, got other data: {why}; give the same data, shuffled with the same seed, "
        "or make a new handler, and remove 'offer' from a loaded state"
    )


def check_state(state: Any) -> tuple[int, Any, int | None]:
    """Return position, mark of the last prompt and length of a saved position."""
    version = state.get("version") if isinstance(state, dict) else type(state).__name__
    if version != _VERSION:
        raise ValueError(
            f"state_dict: expected the position of handler.offer, of version {_VERSION}, got "
            f"{version!r}; it was saved by another version of shmbus"
        )
    if "rank" in state:
        raise ValueError(
            f"state_dict: expected the state of rank 0, which offers the prompts, got that of rank "
            f"{state['rank']}; load rank 0's"
        )
    try:
        position, first, length = state["position"], state["first_round"], state["length"]
        if min(int(position), int(first), 0 if length is None else int(length)) < 0:
            raise ValueError(f"position {position}, first_round {first}, length {length}")
        return int(position), state["last"], length
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"state_dict: expected the position of handler.offer, got {state!r}: {error!r}"
        ) from error


def rank_state(rank: int) -> dict[str, Any]:
    """Return the state of a rank without offers."""
    return {"version": _VERSION, "rank": rank}


def _mark(arguments: Mapping[str, Any], number: int) -> list[Any]:
    """Return a prompt's distinctive mark: its id and, for an id by place, a checksum."""
    id_ = str(arguments["instance_id"])
    if id_ != str(number):
        return [id_, None]
    checksum = 0
    meta = arguments.get("meta")
    parts = {**arguments, **(meta if isinstance(meta, Mapping) else {})}
    for name in sorted(parts.keys() - _OPTIONS - {"round"}, key=str):
        try:
            array = np.asarray(parts[name])
        except (TypeError, ValueError, RuntimeError):
            continue  # a ragged list, or a tensor on a device
        if array.dtype.kind in "biufU":
            checksum = zlib.crc32(str(name).encode() + array.tobytes(), checksum)
    return [id_, checksum]
