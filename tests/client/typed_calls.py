"""Calls with a mistake each, for the type checker: `make check` fails unless it finds them all.

Strict mypy reports an ignore that ignores nothing, so each ignore below is a claim: this typo in a
public call of Consumer or Group is found before the program runs. Nothing here is ever executed.
"""

from __future__ import annotations

from shmbus import Consumer, Group


def make_consumers() -> None:
    Consumer("run1", group_timout=5.0)  # type: ignore[call-arg]
    Consumer("run1", group_timeout="5")  # type: ignore[arg-type]
    Consumer("run1", on_timeout="partly")  # type: ignore[arg-type]
    Consumer("run1", duplicate="raise")  # type: ignore[arg-type]
    Consumer("run1", on_overflow="discard")  # type: ignore[arg-type]
    Consumer("run1", on_failure="wait")  # type: ignore[arg-type]
    Consumer("run1", on_stall="warn")  # type: ignore[arg-type]
    Consumer("run1", 60.0)  # type: ignore[call-arg]


def take(consumer: Consumer) -> None:
    consumer.take(max_group=4)  # type: ignore[call-arg]
    consumer.take(64, timeout="1")  # type: ignore[arg-type]
    consumer.take_shard(group=4)  # type: ignore[call-arg]
    consumer.take_shard(4)  # type: ignore[call-arg]
    for group in consumer:
        group.scores_of_all  # type: ignore[attr-defined]  # noqa: B018


def end(consumer: Consumer, group: Group) -> None:
    consumer.ack("q1")  # type: ignore[arg-type]
    consumer.ack(group, all=True)  # type: ignore[call-arg]
    consumer.drop([group.instance_id])  # type: ignore[list-item]
    consumer.give_back([group])  # type: ignore[arg-type]
    consumer.policy_version = "3"  # type: ignore[assignment]
    consumer.stats().acknowleged  # type: ignore[attr-defined]  # noqa: B018
    consumer.close(timeout=1.0)  # type: ignore[call-arg]
    consumer.closed()  # type: ignore[operator]


def read(group: Group) -> None:
    group.ack(True)  # type: ignore[call-arg]
    group.giveback()  # type: ignore[attr-defined]
    group["tokens"]  # type: ignore[call-overload]
    if group.state == "acked":  # type: ignore[comparison-overlap]
        raise AssertionError
    if group.round > 3:  # type: ignore[operator]
        raise AssertionError
    for trajectory in group:
        trajectory.rewrad  # type: ignore[attr-defined]  # noqa: B018
