"""Every drop has a line in the log: group, reason, and remedy."""

import logging
import re
from typing import Any

import numpy as np
import pytest

from shmbus import Bus, Consumer, Producer, ProtocolError
from shmbus.base import limits
from shmbus.base.throttle import LimitedLog, Throttle

TOKENS = np.arange(4, dtype=np.int32)


def put(producer: Producer, key: str, index: int = 0, **options: Any) -> None:
    options = {"group_size": 2, "score": index, **options}
    producer.put(key, index=index, tokens=TOKENS, **options)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "shmbus.drops"]


def duplicate(producer: Producer, consumer: Consumer) -> None:
    put(producer, "a")
    put(producer, "a")
    consumer.take(timeout=0)


def size_mismatch(producer: Producer, consumer: Consumer) -> None:
    put(producer, "a")
    put(producer, "a", 1, group_size=3)
    consumer.take(timeout=0)


def surplus(producer: Producer, consumer: Consumer) -> None:
    for index in (0, 1, 0):
        put(producer, "a", index, round=1)
    consumer.take(timeout=0)


def timeout(producer: Producer, consumer: Consumer) -> None:
    put(producer, "a")
    consumer.take(timeout=0.3)


def stale(producer: Producer, consumer: Consumer) -> None:
    consumer.policy_version = 100
    put(producer, "a")
    put(producer, "a", 1)
    consumer.take(timeout=0)


def failed(producer: Producer, consumer: Consumer) -> None:
    put(producer, "a")
    producer.fail("a", 1, "sandbox\x1b[2J died", group_size=2)
    consumer.take(timeout=0)


def malformed(producer: Producer, consumer: Consumer) -> None:
    put(producer, "a", group_size=1)
    consumer.drop(consumer.take(timeout=5))


def overflow(producer: Producer, consumer: Consumer) -> None:
    put(producer, "a")
    consumer.take(timeout=0)


@pytest.mark.parametrize(
    ("happens", "options", "said"),
    [
        (duplicate, {}, "sample 0 of 2, group 'a', from .* as duplicate: .*next_round"),
        (size_mismatch, {}, "sample 1 of 3, group 'a', from .* as size_mismatch: group_size"),
        (surplus, {}, "sample 0 of 2, group 'a' round 1, from .* as surplus: .*next_round"),
        (
            timeout,
            {"group_timeout": 0.01, "on_timeout": "drop"},
            "sample 0 of 2, group 'a', from .* as timeout: .* on_timeout='partial'",
        ),
        (
            stale,
            {"max_policy_lag": 2},
            r"samples 0, 1 of 2, group 'a', .* as stale \(of version 0, the trainer is at 100\): "
            ".* policy_version=",
        ),
        (
            failed,
            {},
            r"samples 0, 1 of 2, group 'a', .* as failed \(sample 1 failed: sandbox\\x1b\[2J died\)"
            ": .* sample_retries",
        ),
        (malformed, {}, "sample 0 of 1, group 'a', from .* as malformed: refused by the trainer"),
        (
            overflow,
            {"max_stash_bytes": 1, "on_overflow": "drop"},
            "sample 0 of 2, group 'a', from .* as overflow: .* max_stash_bytes",
        ),
    ],
)
def test_the_first_drop_of_a_reason_names_group_sample_producer_and_what_to_do(
    bus: Bus, caplog: pytest.LogCaptureFixture, happens: Any, options: dict[str, Any], said: str
) -> None:
    caplog.set_level(logging.INFO, "shmbus.drops")
    with Producer(bus.name, label="worker-7") as producer, Consumer(bus.name, **options) as reader:
        happens(producer, reader)
        (line,) = lines(caplog)
    assert re.search(said, line), line
    assert line.startswith(f"bus {bus.name!r}: dropped ")
    assert "from producer 1 (worker-7, pid " in line


def test_a_group_without_variance_is_told_to_who_listens_for_it(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbus.drops")
    with Producer(bus.name) as producer, Consumer(bus.name, skip_zero_variance=True) as reader:
        put(producer, "a", score=1)
        put(producer, "a", 1, score=1)
        reader.take(timeout=0)
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "as zero_variance: equal scores" in lines(caplog)[0]


def test_the_report_of_a_failure_that_cost_nothing_is_no_warning(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbus.drops")
    with Consumer(bus.name, sample_retries=1) as consumer:
        put(producer, "a")
        producer.fail("a", 1, "flaky", group_size=2)
        consumer.take(timeout=0)
        put(producer, "a", 1)
        assert len(consumer.take(timeout=5)) == 1
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "the failure report 1 of 2, group 'a'" in lines(caplog)[0]
    assert "(sample 1 failed: flaky)" in lines(caplog)[0]


def test_a_group_of_which_only_a_failure_is_known_is_a_warning(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    with Consumer(bus.name) as consumer:
        producer.fail("a", 0, "no sandbox", group_size=1)
        consumer.take(timeout=0)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "as failed (sample 0 failed: no sandbox): a sample failed for good" in lines(caplog)[0]


def test_only_groups_whose_lease_really_ended_are_told_as_dropped(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbus.drops")
    with Consumer(bus.name) as consumer:
        for number in range(4):
            put(producer, f"g{number}", group_size=1)
        groups = consumer.take(4, timeout=5)
        consumer.ack(groups[2])
        assert not lines(caplog)
        with pytest.raises(ProtocolError, match="g2"):
            consumer.drop(groups)
        assert "group 'g0'" in lines(caplog)[0] and len(lines(caplog)) == 1
        assert consumer.stats().dropped == {"malformed": 2}
        assert groups[3].state == "leased"
    assert "dropped 1 more trajectory as malformed" in lines(caplog)[1]


def test_a_dropped_group_is_told_with_the_failures_that_belonged_to_it(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmbus.drops")
    with Consumer(bus.name, on_failure="partial") as consumer:
        put(producer, "a")
        producer.fail("a", 1, "no sandbox", group_size=2)
        consumer.drop(consumer.take(timeout=5))
        assert consumer.stats().dropped == {"malformed": 1, "failed": 1}
    sample, report = lines(caplog)
    assert "dropped sample 0 of 2, group 'a'" in sample and "as malformed" in sample
    assert "the failure report 1 of 2, group 'a'" in report and "no sandbox" in report


def test_thousands_of_drops_are_one_line_and_a_sum(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    with Consumer(bus.name) as consumer:
        for _ in range(2001):
            put(producer, "a")
            consumer.take(timeout=0)
        assert len(lines(caplog)) == 1
    # Later counts are logged at the end, too.
    assert lines(caplog)[1:] == [
        f"bus {bus.name!r}: dropped 1,999 more trajectories as duplicate since the last such line"
        "; see docs/errors.md#dropped-samples"
    ]


def test_events_of_one_cause_are_told_first_and_then_summed_up_once_an_interval() -> None:
    throttle = Throttle(60)
    assert throttle.first("a", 0) and not throttle.first("a", 1) and throttle.first("b", 1)
    assert throttle.sums(59) == []
    assert throttle.sums(60) == [("a", 1)]
    assert not throttle.first("a", 61, 7)
    assert throttle.sums(119) == []
    assert throttle.sums(120) == [("a", 7)]
    # After a quiet interval the next drop is told in full again, and nothing is kept.
    assert throttle.sums(500) == []
    assert throttle.first("a", 501)
    assert Throttle(limits.LOG_INTERVAL_S).sums(1e9) == []


def test_a_limited_log_says_the_latest_of_what_it_sums_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LimitedLog(logging.getLogger("shmbus.test"), 60)
    for number in range(1000):
        log.warning("refused", number / 1000, f"client {number}", pid=number)
    log.sum_up(61)
    log.sum_up(62)
    assert [r.getMessage() for r in caplog.records] == [
        "client 0",
        "refused: 999 more since the last such line; the latest: client 999",
    ]
