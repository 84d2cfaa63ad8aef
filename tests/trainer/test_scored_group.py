"""Callables for whole groups: their detection, and their arguments."""

import functools
from typing import Any

import numpy as np
import pytest
from numpy_batches import put

from shmbus import Bus, Consumer, Producer
from trainer_adapter import OnlineDataHandler, ScoredGroup, group_advantages, pack
from trainer_adapter.scored_group import sight_of


def of_group(group: ScoredGroup) -> Any:
    return group.scores


def of_quoted_group(anything: ScoredGroup, *, scale: float = 1.0) -> Any:
    return anything.scores * scale


def of_both(scores: Any, group: Any) -> Any:
    return scores * len(group)


class Callable:
    def __call__(self, group: ScoredGroup) -> Any:
        return group.scores


@pytest.mark.parametrize(
    ("function", "sight"),
    [
        (lambda scores: scores - scores.mean(), "scores"),
        (lambda scores, eps=1e-6: scores / eps, "scores"),
        (lambda group: group, "scores"),
        (lambda *rows: rows, "scores"),
        (np.negative, "scores"),
        (functools.partial(of_both, group=None), "scores"),
        (of_group, "group"),
        (of_quoted_group, "group"),
        (Callable(), "group"),
        (functools.partial(of_quoted_group, scale=2.0), "group"),
        (of_both, "both"),
        (lambda scores, group: scores, "both"),
    ],
)
def test_the_signature_says_what_a_callable_sees(function: Any, sight: str) -> None:
    assert sight_of(function) == sight


def put_two_groups(producer: Producer) -> None:
    put(
        producer,
        "a",
        [
            {
                "tokens": np.arange(3), "score": 1.0, "policy_version": 4,
                "format": np.array([0.5]),
                "meta": {"finish_reason": "stop", "scores": {"exact": 1}, "brief": 0.25},
            },
            {
                "tokens": np.arange(5), "score": 0.0, "policy_version": 5,
                "format": np.array([0.0]),
                "meta": {"finish_reason": {"type": "length"}, "rewards": {"exact": 0}, "brief": 0},
            },
        ],
    )  # fmt: skip
    put(producer, "b", [{"tokens": np.arange(2), "score": 3.0, "format": np.zeros(1)}])


@pytest.mark.parametrize("both", [False, True])
def test_callables_see_lengths_metas_and_rewards(bus: Bus, producer: Producer, both: bool) -> None:
    put_two_groups(producer)
    seen: list[ScoredGroup] = []

    def by_group(group: ScoredGroup) -> Any:
        seen.append(group)
        return group.scores + group.lengths

    def by_both(scores: Any, group: Any) -> Any:
        assert np.array_equal(scores, group.scores)
        return by_group(group)

    with OnlineDataHandler(
        bus.name, groups_per_batch=2, advantages=by_both if both else by_group
    ) as handler:
        assert handler.next_batch(10).advantages.tolist() == [4.0] * 3 + [5.0] * 5 + [5.0] * 2
        a, b = seen
        assert (a.instance_id, len(a), a.lengths.tolist()) == ("a", 2, [3, 5])
        assert a.truncated.tolist() == [False, True]
        assert a.policy_versions.tolist() == [4, 5]
        assert a.rewards("exact").tolist() == [1.0, 0.0]
        assert a.rewards("brief").tolist() == [0.25, 0.0]
        assert a.rewards("format").tolist() == [0.5, 0.0]
        assert [array.tolist() for array in a.field("format")] == [[0.5], [0.0]]
        assert a.metas[0]["finish_reason"] == "stop" and b.metas == [None]
        assert b.truncated.tolist() == [False]
        with pytest.raises(ValueError, match="group 'b', sample 0: expected a reward 'exact'"):
            b.rewards("exact")
        with pytest.raises(ValueError, match=r"field 'tokens': expected one number.*shape \(3,\)"):
            a.rewards("tokens")
        with pytest.raises(KeyError):
            a.field("images")


def test_a_length_penalty_and_two_rewards_in_one_callable(bus: Bus, producer: Producer) -> None:
    put_two_groups(producer)

    def shaped(group: ScoredGroup) -> Any:
        total = group.rewards("format") + group.scores
        total -= np.clip((group.lengths - 3) / 2, 0.0, 1.0)
        return total - total.mean()

    with Consumer(bus.name) as consumer:
        batch = pack(consumer.take(2, 10), advantages=shaped)
        assert batch.advantages[[0, 3, 8]].tolist() == [1.25, -1.25, 0.0]


def test_scores_alone_are_no_whole_group(bus: Bus) -> None:
    assert group_advantages([1.0, 3.0], of_group, sizes=[1, 1]) == [1.0, 3.0]
    assert group_advantages([1.0, 3.0], of_both) == [2.0, 6.0]

    def by_length(group: ScoredGroup) -> Any:
        return group.lengths

    with pytest.raises(ValueError, match="lengths: expected those of its samples, got scores alon"):
        group_advantages([1.0, 3.0], by_length)
    made = ScoredGroup([1, 2], [7, 8], metas=[{"x": 1}, {"x": 2}], fields={"y": [np.ones(1)] * 2})
    assert by_length(made).tolist() == [7, 8]
    assert made.rewards("x").tolist() == [1.0, 2.0] and made.rewards("y").tolist() == [1.0, 1.0]
    assert repr(made) == "<ScoredGroup '' of 2>"
    with pytest.raises(KeyError, match=r"'z': this group has the fields \('y',\)"):
        made.field("z")


def test_a_callable_that_returns_too_few_is_told(bus: Bus, producer: Producer) -> None:
    put_two_groups(producer)
    with Consumer(bus.name) as consumer:
        groups = consumer.take(2, 10)
        with pytest.raises(ValueError, match="expected 2 finite real numbers"):
            pack(groups, advantages=lambda scores, group: scores[:1])
