"""Names that are nearly those of put's arguments, and the right ones.

Any other keyword of put is an array field. So ``reward=0.7`` would be a field that nobody reads,
and every score would be 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

__all__ = ["UnknownNameError", "near_argument", "near_field"]

#: How much two names have to have in common, from 0 to 1: "timout" and "timeout" have 0.92.
ALIKE: Final = 0.8

ARGUMENTS: Final = (
    "instance_id", "group_size", "index", "score", "policy_version", "round", "meta", "timeout",
    "split", "need",
)  # fmt: skip

#: What other libraries call them.
SYNONYMS: Final[dict[str, str]] = {
    **dict.fromkeys(("prompt_id", "group_id", "problem_id", "question_id", "uid"), "instance_id"),
    **dict.fromkeys(("num_generations", "num_samples", "n_samples", "rollout_n"), "group_size"),
    **dict.fromkeys(("idx", "sample_index", "sample_idx", "sample_id"), "index"),
    **dict.fromkeys(("reward", "rewards", "scores", "ret", "return_"), "score"),
    **dict.fromkeys(
        ("version", "weight_version", "weights_version", "model_version", "policy_step", "policy"),
        "policy_version",
    ),
    **dict.fromkeys(("metadata", "extra_info"), "meta"),
    # Not put's own: a field of the trainer, with one number a token.
    **dict.fromkeys(("advantage", "adv"), "advantages"),
}


def near_argument(name: str) -> str | None:
    """Return the argument that a name is probably meant for; None where it is like none of them."""
    plain = name.lower()
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    near = difflib.get_close_matches(plain, ARGUMENTS, n=1, cutoff=ALIKE)
    return near[0] if near else None


def near_field(name: str, fields: tuple[str, ...]) -> str | None:
    """Return the declared field that a name is probably meant for; None where none is like it."""
    near = difflib.get_close_matches(name, fields, n=1, cutoff=ALIKE)
    return near[0] if near else None


#: Names like an unknown one that its error shows, and names that it shows where none is like it.
_NEAR_SHOWN: Final = 3
_NAMES_SHOWN: Final = 5


class UnknownNameError(KeyError):
    """A name under which nothing is; a KeyError, so that `in` and `get` of a mapping work by it."""

    def __init__(self, what: str, name: object, names: Iterable[str]) -> None:
        super().__init__(name)
        self._what = what
        self._names = list(names)

    def __str__(self) -> str:
        # Not before it is shown: to compare the names of a large model takes most of a second, and
        # `get` and `in` show nothing.
        name = self.args[0]
        near = difflib.get_close_matches(str(name), self._names, _NEAR_SHOWN)
        if near:
            return f"{name!r}: {self._what}: no such name; did you mean {_listed(near)}?"
        shown = _listed(self._names[:_NAMES_SHOWN]) or "none"
        more = len(self._names) - _NAMES_SHOWN
        return f"{name!r}: {self._what}: no such name; there is {shown}" + (
            f" and {more} more" if more > 0 else ""
        )

    def __reduce__(self) -> tuple[type[KeyError], tuple[str]]:
        return KeyError, (str(self),)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
