"""Admission of delivered groups: planner, give-back or drop.

Invariants:

- A truncated group (under "drop"), a malformed group and a group refused by the filter are dropped
  alone. The rest of the take waits for its batches.
- A group with a sample already trained before a checkpoint goes back. The bus's reader ends that
  sample, and no later group contains it.
- Every group ends here or waits in the planner, even after an error. If a signal handler raises,
  the group stays in the inbox, and the next call admits it.
- After the first admitted group with logprobs, a group without them is malformed. A mixed batch
  lacks a ratio for part of its tokens; a rare group without logprobs would arrive at an arbitrary
  step and stop a loss that needs them. The reverse rule would reject every good group.
- An unread array field with a name close to a known field, such as ``log_probs``, is reported once:
  training would silently lack the field. A field in use, or sent beside the field in use, is never
  reported.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Iterable
from itertools import islice
from typing import Final, Literal

import shmbus
from shmbus.base.arguments import check_count
from shmbus.batch.gather import FieldNames, MixedLogprobsError, PackPlan
from trainer_adapter._arguments import ConsumerOptions, check_lengths, score_error
from trainer_adapter.batches.batch import Batch
from trainer_adapter.batches.extra_fields import ExtraFields
from trainer_adapter.batches.sample_flags import Stale, Truncated, is_truncated
from trainer_adapter.handler.planner import BatchPlanner

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


logger = logging.getLogger(__name__)


class SampleAge:
    """Age limit of single samples: a stale sample does not cost its group."""

    def __init__(self, max_policy_lag: int) -> None:
        self.consumer: shmbus.Consumer | None = None
        self._lag = max_policy_lag

    @classmethod
    def of(cls, stale: Stale, options: ConsumerOptions) -> SampleAge | None:
        """Return the age test, or None if stale groups are dropped."""
        if stale == "drop":
            return None
        lag = options.get("max_policy_lag")
        if lag is None:
            raise ValueError(
                f"stale_samples: expected a max_policy_lag with {stale!r}, got None; say from how "
                "many versions on a sample is stale"
            )
        return cls(check_count("max_policy_lag", lag, 0))

    def __call__(self, sample: shmbus.Trajectory) -> bool:
        """Return True if the sample is too old."""
        assert self.consumer is not None
        return sample.policy_version < self.consumer.policy_version - self._lag


class Admission:
    """Passes groups taken from the bus to the planner, or ends them."""

    def __init__(
        self,
        consumer: shmbus.Consumer,
        planner: BatchPlanner[Batch],
        fields: FieldNames,
        *,
        tokens_per_batch: int | None,
        malformed: Literal["raise", "drop"],
        truncated: Truncated,
        max_policy_lag: int | None,
        extra_fields: ExtraFields,
    ) -> None:
        self._consumer = consumer
        self._planner = planner
        self._fields = fields
        self._tokens_per_batch = tokens_per_batch
        self._malformed = malformed
        self._truncated = truncated
        self._max_policy_lag = max_policy_lag
        self._extra_fields = extra_fields
        self._unread = UnreadFields(fields, extra_fields.sources)
        self._with_logprobs = False
        self.trained: set[bytes] = set()
        self.truncated_groups = 0

    def admit(self) -> None:
        """Have the groups of the inbox wait for their batches, or end them."""
        # After an interruption the groups stay in the inbox until the next call, which skips ended
        # groups.
        groups = self._without_trained(_leased(self._planner.inbox))
        if self._truncated == "drop":
            cut = [group for group in groups if is_truncated(group)]
            self._consumer.drop(cut)
            self.truncated_groups += len(cut)
            groups = _leased(groups)
        good: list[tuple[shmbus.Group, int]] = []
        wrong: Exception | None = None
        if groups:
            try:
                good = self._measure(groups)
            except (TypeError, ValueError):
                for group in groups:
                    try:
                        good += self._measure([group])
                    except (TypeError, ValueError) as error:
                        self.drop(group, error)
                        wrong = wrong or error
        self._planner.add(good, time.monotonic())
        if wrong is not None and self._malformed == "raise":
            raise wrong

    def drop(self, group: shmbus.Group, error: Exception) -> None:
        """End a malformed group, with a note in the log."""
        logger.warning("dropped group %r: %s", group.instance_id, error)
        self._planner.unsettled = True
        group.drop()
        self._planner.keep_leased()

    def drop_without_logprobs(self, groups: list[shmbus.Group]) -> None:
        """End groups admitted before the first group with logprobs."""
        for group in groups:
            self.drop(group, self._lacks_logprobs(group))

    def _lacks_logprobs(self, group: shmbus.Group) -> ValueError:
        return ValueError(
            f"group {group.instance_id!r} of producer {group.trajectories[0].producer_id}: field "
            f"{self._fields.logprobs!r}: expected in every group, since others have it, got none; "
            "put it in all, or read none by fields=FieldNames(logprobs=None)"
        )

    def stale(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Return the groups now beyond the age limit."""
        if self._max_policy_lag is None:
            return []
        bound = self._consumer.policy_version - self._max_policy_lag
        return [g for g in groups if any(t.policy_version < bound for t in g.trajectories)]

    def return_stale(self) -> None:
        """Give stale waiting groups to the Consumer, which drops and counts them."""
        stale = self.stale(self._planner.groups)
        if stale:
            self._planner.unsettled = True
            for group in stale:
                group.give_back()
            self._planner.keep_leased()

    def return_trained(self) -> None:
        """Give back waiting groups already trained before a checkpoint."""
        self._planner.unsettled = True
        self._without_trained(_leased(self._planner.groups))
        self._planner.keep_leased()

    def _without_trained(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Give back groups with samples trained before a checkpoint; return the rest."""
        if not self.trained:
            return groups
        for group in groups:
            if not self.trained.isdisjoint(self._consumer.lasting_names([group])):
                group.give_back()
        return _leased(groups)

    def _measure(self, groups: list[shmbus.Group]) -> list[tuple[shmbus.Group, int]]:
        """Pair each group with its token count; raise for a malformed group."""
        try:
            measured, _ = self._extra_fields.measure(groups, self._fields)
        except MixedLogprobsError:
            self._with_logprobs = True
            raise
        if not measured.has_logprobs and self._with_logprobs:
            raise self._lacks_logprobs(groups[0])
        self._with_logprobs = measured.has_logprobs
        self._unread.note(measured)
        if not measured.scores_fit:
            raise score_error(measured.trajectories)
        lengths = measured.samples[3].tolist()
        if self._tokens_per_batch is not None and measured.longest > self._tokens_per_batch:
            check_lengths(measured.trajectories, lengths, self._tokens_per_batch)
        left = iter(lengths)
        return [(group, sum(islice(left, len(group.trajectories)))) for group in groups]


def _leased(groups: list[shmbus.Group]) -> list[shmbus.Group]:
    return [group for group in groups if group.state == "leased"]
