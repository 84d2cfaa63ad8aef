"""Admission of groups that the bus delivered: which may go into a batch, and how the others end.

Invariants:

- A truncated group (under "drop"), a malformed one and one that the filter refuses are dropped.
  Each costs itself only: all others wait for their batches.
- A group with a sample that a checkpoint had trained goes back: whoever reads the bus ends that
  sample, and no group has it any more.
- Every group ends here, or waits in the planner, even if an error is raised. Where a signal's
  handler raises, it stays in the inbox, and is admitted by the next call.
- Once a group with logprobs was admitted, one without them is malformed. A batch of both kinds has
  no ratio for a part of its tokens; one of the few without them would come at an odd step, and stop
  a loss that needs them. The other way round nothing that is good would be left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Literal

import numpy as np

import shmbus
from shmbus._arguments import check_count
from shmbus.batch.field_presence import MixedLogprobsError
from shmbus.batch.gather import FieldNames, measure
from shmbus.batch.token_versions import is_stale
from trainer_adapter._arguments import ConsumerOptions, check_lengths, score_error
from trainer_adapter.batches.batch import Batch
from trainer_adapter.batches.columns import column_names
from trainer_adapter.batches.extra_fields import ExtraFields
from trainer_adapter.batches.sample_flags import Stale, Truncated, is_truncated
from trainer_adapter.handler.planner import BatchPlanner
from trainer_adapter.handler.unread_fields import UnreadFields
from trainer_adapter.scored_group import ScoredGroup

__all__ = ["Admission", "SampleAge"]

logger = logging.getLogger(__name__)


class SampleAge:
    """Whether single samples are too old now, where a stale one does not cost its group."""

    def __init__(self, max_policy_lag: int, stale_share: float) -> None:
        self.consumer: shmbus.Consumer | None = None
        self._lag, self._share = max_policy_lag, stale_share

    @classmethod
    def of(cls, stale: Stale, options: ConsumerOptions) -> SampleAge | None:
        """Return what judges samples; None where stale groups are dropped."""
        if stale == "drop":
            return None
        lag = options.get("max_policy_lag")
        if lag is None:
            raise ValueError(
                f"stale_samples: expected a max_policy_lag with {stale!r}, got None; say from how "
                "many versions on a sample is stale"
            )
        return cls(check_count("max_policy_lag", lag, 0), options.get("stale_share", 0.0))

    def __call__(self, sample: shmbus.Trajectory) -> bool:
        """Whether this sample is."""
        assert self.consumer is not None
        return is_stale([sample], self.consumer.policy_version - self._lag, self._share)


class Admission:
    """Passes groups that were taken from the bus to the planner, or ends them."""

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
        stale_share: float,
        extra_fields: ExtraFields | None = None,
        keep_group: Callable[[ScoredGroup], object] | None = None,
    ) -> None:
        if stale_share and fields.loss_mask != "loss_mask":
            raise ValueError(
                "stale_share: expected trained tokens to be those of the field 'loss_mask', got "
                f"fields=FieldNames(loss_mask={fields.loss_mask!r}); name the field so, or leave "
                "stale_share out"
            )
        self._consumer = consumer
        self._planner = planner
        self._fields = fields
        self._tokens_per_batch = tokens_per_batch
        self._malformed = malformed
        self._truncated = truncated
        self._max_policy_lag, self._stale_share = max_policy_lag, stale_share
        self._extra_fields = extra_fields
        self._keep_group = keep_group
        self._unread = UnreadFields(fields, [] if extra_fields is None else extra_fields.sources)
        self._with_logprobs = False
        self.trained: set[bytes] = set()
        self.truncated_groups = 0

    def admit(self) -> None:
        """Have the groups of the inbox wait for their batches, or end them."""
        # Where it is interrupted, the groups stay in the inbox until it is called again; those that
        # have ended are passed over then.
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
                good, wrong = self._measure_each(groups)
        self._planner.add(good, time.monotonic())
        if wrong is not None and self._malformed == "raise":
            raise wrong

    def _measure_each(
        self, groups: list[shmbus.Group]
    ) -> tuple[list[tuple[shmbus.Group, int]], Exception | None]:
        wrong: Exception | None = None
        good: list[tuple[shmbus.Group, int]] = []
        for group in groups:
            try:
                good += self._measure([group])
            except (TypeError, ValueError) as error:
                self.drop(group, error)
                wrong = wrong or error
        return good, wrong

    def drop(self, group: shmbus.Group, error: Exception) -> None:
        """End a malformed group, with a note in the log."""
        logger.warning("dropped group %r: %s", group.instance_id, error)
        self._planner.unsettled = True
        group.drop()
        self._planner.keep_leased()

    def drop_without_logprobs(self, groups: list[shmbus.Group]) -> None:
        """End groups that were admitted before the first one that has logprobs."""
        for group in groups:
            self.drop(group, self._lacks_logprobs(group))

    def _lacks_logprobs(self, group: shmbus.Group) -> ValueError:
        return ValueError(
            f"group {group.instance_id!r} of producer {group.trajectories[0].producer_id}: field "
            f"{self._fields.logprobs!r}: expected in every group, since others have it, got none; "
            "put it in all, or read none by fields=FieldNames(logprobs=None)"
        )

    def stale(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Return the groups among these that are too old now."""
        if self._max_policy_lag is None:
            return []
        bound = self._consumer.policy_version - self._max_policy_lag
        return [g for g in groups if is_stale(g.trajectories, bound, self._stale_share)]

    def return_stale(self) -> None:
        """Give waiting groups that are too old to the Consumer, which drops and counts them."""
        stale = self.stale(self._planner.groups)
        if stale:
            self._planner.unsettled = True
            for group in stale:
                group.give_back()
            self._planner.keep_leased()

    def return_trained(self) -> None:
        """Give back waiting groups that a checkpoint had trained."""
        self._planner.unsettled = True
        self._without_trained(_leased(self._planner.groups))
        self._planner.keep_leased()

    def _without_trained(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Give back groups with samples that a checkpoint had trained; return the others."""
        if not self.trained:
            return groups
        for group in groups:
            if not self.trained.isdisjoint(self._consumer.lasting_names([group])):
                group.give_back()
        return _leased(groups)

    def _measure(self, groups: list[shmbus.Group]) -> list[tuple[shmbus.Group, int]]:
        """Pair each group with its tokens; raises if one of them is malformed."""
        try:
            measured = measure(groups, self._fields)
        except MixedLogprobsError:
            self._with_logprobs = True
            raise
        if not measured.has_logprobs and self._with_logprobs:
            raise self._lacks_logprobs(groups[0])
        self._with_logprobs = measured.has_logprobs
        self._unread.note(measured)
        trajectories, lengths = measured.trajectories, measured.lengths
        if not measured.scores_fit:
            raise score_error(trajectories)
        if self._extra_fields is not None:
            self._extra_fields.measure(trajectories, lengths, column_names(groups))
        if self._tokens_per_batch is not None and max(lengths) > self._tokens_per_batch:
            check_lengths(trajectories, lengths, self._tokens_per_batch)
        left = iter(lengths)
        if self._keep_group is None:
            return [(group, sum(islice(left, len(group.trajectories)))) for group in groups]
        pairs = [(group, [*islice(left, len(group.trajectories))]) for group in groups]
        useless = [group for group, own in pairs if not self._keeps(group, own)]
        if useless:
            self._consumer.drop(useless, reason="filtered")
        return [(group, sum(own)) for group, own in pairs if group.state == "leased"]

    def _keeps(self, group: shmbus.Group, lengths: list[int]) -> bool:
        assert self._keep_group is not None
        samples = group.trajectories
        scores = np.array([t.score for t in samples], np.float64)
        return bool(self._keep_group(ScoredGroup.of(scores, samples, lengths)))


def _leased(groups: list[shmbus.Group]) -> list[shmbus.Group]:
    return [group for group in groups if group.state == "leased"]
