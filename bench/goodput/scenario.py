"""The plan of a run, read from a file of JSON; `bench/goodput/scenario.json` is the default."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

__all__ = ["DEFAULT", "KINDS", "Scenario"]

DEFAULT: Final = Path(__file__).with_name("scenario.json")
#: Deaths. A contender without such a part skips the kind.
KINDS: Final = ("worker", "trainer", "engine", "transport", "daemon", "node")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Workers, lengths, trainer, and the schedule of deaths."""

    workers: int = 2
    group_size: int = 4
    groups_a_step: int = 2
    #: Steps' worth of groups between workers and trainer.
    ahead: int = 2
    #: Steps from one checkpoint to the next.
    save_every: int = 4
    #: Lengths of answers are log-normal.
    tokens_median: int = 48
    tokens_sigma: float = 0.6
    tokens_longest: int = 256
    #: Of one answer in the engine.
    tokens_per_s: float = 4000.0
    step_s: float = 0.1
    #: Each round kills every kind once, in an order of the seed.
    kills: tuple[str, ...] = KINDS
    rounds: int = 2
    #: Mean seconds between a recovery and the next kill.
    every_s: float = 1.0
    #: Seconds without recovery after which the contender counts as hung.
    patience_s: float = 30.0
    seeds: tuple[int, ...] = (0, 1, 2)
    #: Fault of the auditor's own check: "loss" or "double" of one answer at the trainer.
    plant: str = ""

    @property
    def step_samples(self) -> int:
        """Answers of a step."""
        return self.groups_a_step * self.group_size

    @property
    def ahead_groups(self) -> int:
        """Groups that fit between workers and trainer."""
        return self.ahead * self.groups_a_step

    def schedule(self, seed: int, kinds: tuple[str, ...]) -> list[tuple[float, str]]:
        """Pauses in seconds, each with the kind of the death after the pause."""
        rng = random.Random(seed)
        chosen = [kind for kind in self.kills if kind in kinds]
        order = [kind for _ in range(self.rounds) for kind in rng.sample(chosen, len(chosen))]
        return [(rng.uniform(0.5, 1.5) * self.every_s, kind) for kind in order]

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Read a file.

        Raises
        ------
        ValueError
            The file is no JSON object, or has an unknown word or a value of a wrong type.
        """
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON, got {error}") from error
        return cls.of(found, str(path))

    @classmethod
    def of(cls, found: Any, place: str) -> Scenario:
        """Check the words and values of an object."""
        defaults = {each.name: each.default for each in fields(cls)}
        if not isinstance(found, dict):
            raise ValueError(f"{place}: expected an object, got {found!r}")
        if unknown := sorted(set(found) - set(defaults)):
            raise ValueError(
                f"{place}: unknown {', '.join(unknown)}; expected some of {', '.join(defaults)}"
            )
        return cls(**{name: _value(place, name, found[name], defaults[name]) for name in found})


def _value(place: str, name: str, given: Any, default: Any) -> Any:
    if name == "plant":
        known: tuple[Any, ...] = ("", "loss", "double")
        if given not in known:
            raise ValueError(f"{place}: {name}: expected one of {known}, got {given!r}")
        return given
    if isinstance(default, tuple):
        if not isinstance(given, list | tuple):
            raise ValueError(f"{place}: {name}: expected a list, got {given!r}")
        if name == "kills" and (unknown := [each for each in given if each not in KINDS]):
            raise ValueError(f"{place}: kills: unknown {unknown}; expected some of {KINDS}")
        if name == "seeds" and not (given and all(type(each) is int for each in given)):
            raise ValueError(f"{place}: seeds: expected whole numbers, got {given!r}")
        return tuple(given)
    least = 0 if name in ("rounds", "step_s", "tokens_sigma") else 1e-3
    kinds: tuple[type, ...] = (int,) if isinstance(default, int) else (int, float)
    if type(given) not in kinds or not least <= given <= 1e6:
        raise ValueError(
            f"{place}: {name}: expected {' or '.join(kind.__name__ for kind in kinds)} from "
            f"{least:g} to 1e6, got {given!r}"
        )
    return type(default)(given)
