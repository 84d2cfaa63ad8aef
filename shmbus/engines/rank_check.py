"""A rank's half of a weight check: a question, a bounded slice, an answer.

The engine calls `answer` between two steps, on the thread of its loads: no load runs beside a
comparison. The slot's lease ends with the slice, and a publisher waits no longer.

Invariants: no exception leaves `answer`, because an exception puts vLLM's ranks out of step; the
model and the rank's row stay unchanged.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from shmbus.engines.rank_loader import PlannedLoader
from shmbus.weights import WeightsError, WeightSubscriber
from shmbus.weights.manifest import Manifest
from shmbus.weights.plan_check import compare_slice

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A publication, the next copy and part by rank, and seconds to spend."""

    bus: str
    version: int
    sequence: int
    cursors: dict[int, tuple[int, int]]
    budget_s: float


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """A rank's slice; `copied` and `refused` are bit masks over the manifest's tensors."""

    rank: int
    error: str = ""
    copy: Count = 0
    part: Count = 0
    done: bool = True
    nbytes: Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    differs: Count | None = None
    copied: str = "0"
    refused: str = "0"


def answer(
    asked: Any,
    rank: int,
    bus: str | None,
    subscriber: WeightSubscriber | None,
    loader: PlannedLoader,
    *,
    updating: bool,
) -> dict[str, Any]:
    """Compare one slice; errors become text of the answer."""
    began = time.monotonic()
    said = Answer(rank)
    try:
        question = msgspec.convert(asked, Question, str_keys=True)
        if rank in question.cursors:
            if subscriber is None or bus != question.bus or subscriber.removed:
                raise WeightsError(f"it reads no weights of bus {question.bus!r} of today")
            if updating:
                raise WeightsError("an update is under way")
            _compare(question, said, subscriber, loader)
    except Exception as error:
        said.error = str(error) or type(error).__name__
    said.seconds = time.monotonic() - began
    found: dict[str, Any] = msgspec.to_builtins(said)
    return found


def _compare(
    question: Question, said: Answer, subscriber: WeightSubscriber, loader: PlannedLoader
) -> None:
    cursor = question.cursors[said.rank]
    runs = None if loader.has is None else loader.has.sequence
    if runs != question.sequence:
        now = "no whole version" if runs is None else f"publication {runs}"
        raise WeightsError(f"it runs {now}, and no more publication {question.sequence}")
    with subscriber.at(question.version) as weights:
        if weights.place != loader.has:
            raise WeightsError(f"the slot of version {question.version} was taken over")
        plan, lasting = loader.usable(weights), weights.lasting()
        if plan is not None and lasting is not None:
            found = compare_slice(loader.comparable, lasting[1], *cursor, question.budget_s)
            said.copy, said.part, said.nbytes, said.differs = found
            said.done = found.differs is not None or found.copy >= len(loader.comparable)
        if cursor == (0, 0):
            everything = [place.name for place in weights.manifest.tensors]
            copied = [] if plan is None else [each.name for each in plan.copies]
            refused = everything if plan is None else plan.refused
            said.copied = _mask(weights.manifest, copied)
            said.refused = _mask(weights.manifest, refused)


def _mask(manifest: Manifest, names: list[str]) -> str:
    chosen = set(names)
    bits = (1 << at for at, place in enumerate(manifest.tensors) if place.name in chosen)
    return f"{sum(bits):x}"


def unmask(manifest: Manifest, mask: str) -> list[str]:
    """Return the tensors of a mask; ValueError where the mask is no hexadecimal number."""
    number = int(mask, 16)
    return [place.name for at, place in enumerate(manifest.tensors) if number >> at & 1]
