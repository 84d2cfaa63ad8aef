"""Unread array fields with a name close to a known field.

Without a warning, a worker's ``log_probs`` or ``completion_mask`` would silently be left out of
training.

Invariant: each name is reported once. A field in use, or sent beside the field in use, is never
reported.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Final

import shmbus
from shmbus.batch.gather import FieldNames, PackPlan

__all__ = ["UnreadFields"]

logger = logging.getLogger(__name__)

#: Least similarity of two names, from 0 to 1: "log_probs" and "logprobs" reach 0.94.
ALIKE: Final = 0.75

#: Other libraries' names for the fields of a batch.
SYNONYMS: Final = {
    "loss_mask": (
        "action_mask", "assistant_mask", "assistant_masks", "completion_mask", "completion_masks",
        "loss_masks", "mask", "masks", "response_mask", "train_mask",
    ),
    "logprobs": (
        "generation_logprobs", "inference_logprobs", "log_prob", "log_probs", "logp", "logps",
        "old_log_probs", "old_logprobs", "old_logps", "old_per_token_logps", "per_token_logps",
        "rollout_log_probs", "rollout_logprobs", "sampling_logprobs", "sampling_per_token_logps",
        "token_logprobs",
    ),
    "advantages": ("adv", "advantage", "advs", "token_advantages"),
    "score": ("reward", "rewards", "scores"),
}  # fmt: skip


class UnreadFields:
    """Warns once of each nearly right name."""

    def __init__(self, fields: FieldNames, extra: Iterable[str] = ()) -> None:
        self._wanted = {
            "loss_mask": fields.loss_mask,
            "logprobs": fields.logprobs,
            "advantages": fields.advantages,
            "score": "score",
        }
        self._read = {*fields.as_tuple(), *extra}
        self._known: set[tuple[str, ...]] = set()
        self._told: set[str] = set()

    def note(self, measured: PackPlan) -> None:
        """Warn of the fields of just measured groups."""
        for names in measured.field_names:
            if names not in self._known:
                self._known.add(names)
                self._look(names, measured.trajectories)

    def _look(self, names: tuple[str, ...], trajectories: list[shmbus.Trajectory]) -> None:
        missing = {
            role: wanted
            for role, wanted in self._wanted.items()
            if wanted is not None and wanted not in names
        }
        if any(t.score for t in trajectories):
            del missing["score"]
        for name in names:
            if name in self._read or name in self._told:
                continue
            role = _nearest(name, missing)
            if role is not None:
                self._told.add(name)
                logger.warning("%s", _text(name, role, missing[role]))


def _nearest(name: str, missing: dict[str, str]) -> str | None:
    """Return a name's probable target among the missing fields."""
    plain = name.lower()
    for role, wanted in missing.items():
        if plain in SYNONYMS[role] or plain == wanted.lower():
            return role
    near = difflib.get_close_matches(plain, missing.values(), n=1, cutoff=ALIKE)
    return next((role for role, wanted in missing.items() if wanted in near), None)


def _text(name: str, role: str, wanted: str) -> str:
    if role == "score":
        return (
            f"the array field {name!r} is not read, and the scores are 0; did you mean {wanted!r}, "
            "one number a sample? Put it as score="
        )
    return (
        f"the array field {name!r} is not read, and there is no field {wanted!r}; did you mean "
        f"that? Put it by this name, or pass fields=FieldNames({role}=...) with the other one"
    )
