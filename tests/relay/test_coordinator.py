"""The coordinator: placements of groups, drops, and withdrawals."""

import os
import random

import pytest
from relay.heads import RecordHead, head_of, make_origin, pack_heads

from shmbus.relay import messages as m
from shmbus.relay.coordinator import Coordinator
from shmbus.stash.stash import StashPolicy

SEED = int(os.environ.get("SHMBUS_TEST_SEED", random.randrange(1 << 32)))
B0, B1 = "b0" * 16, "b1" * 16
#: Bytes of the longest completion, thirty times the usual: whoever samples sets a limit. What is
#: heavier than all that a sink gets at once could not be made up for.
LONGEST = 1 << 18


def head(
    group: str, size: int, index: int, sequence: int, *, score: float = 0.0, nbytes: int = 64
) -> RecordHead:
    return RecordHead(1, sequence, group, None, size, index, score, 0, nbytes, 0, 7, size)


def coordinator(
    buses: int = 1, sinks: int = 1, policy: StashPolicy | None = None, window_bytes: int = 1 << 40
) -> Coordinator:
    names = [f"t{i}" for i in range(sinks)]
    made = Coordinator(3, [B0, B1][:buses], names, policy, window_bytes)
    made.begin()
    for name in names:
        made.sink_state(m.SinkState(name, 1, 3, frozenset(), frozenset()), 0.0)
    return made


def pack(bus: str, *heads: RecordHead) -> bytes:
    return pack_heads([head_of(bus, each) for each in heads])


def announce(made: Coordinator, bus: str, number: int, *heads: RecordHead) -> list[m.Message]:
    return made.announced(m.Announcement(bus, (1, number), number == 1, pack(bus, *heads)), 0.0)


def test_samples_of_one_group_may_come_from_any_nodes() -> None:
    made = coordinator(buses=2)
    assert announce(made, B0, 1, head("q", 2, 1, 5)) == []
    assert announce(made, B1, 1, head("q", 2, 0, 9)) == [
        m.Assignment("t0", 1, 3, (make_origin(B1, 1, 9), make_origin(B0, 1, 5)), 128, (7, 7))
    ]


def test_what_is_not_trained_on_goes_first_and_waits_for_its_split() -> None:
    made = coordinator(window_bytes=100)
    said = announce(made, B0, 1, *[head(f"q{i}", 1, 0, i) for i in range(6)])
    assert [len(each.origins) for each in said if isinstance(each, m.Assignment)] == [1, 1]
    heads = pack(B0, head("e", 1, 0, 9)._replace(split=2))
    news = m.Announcement(B0, (1, 2), False, heads, splits=("train", "none", "eval"))
    assert made.announced(news, 0.0) == [] == made.place()
    assert made.unplaced == ["eval"]
    made.sinks["t0"].splits = ("train", "eval")
    assert made.unplaced == []
    for each in said:
        assert isinstance(each, m.Assignment)
        next_ = made.settled(m.Settled("t0", frozenset(each.origins)), 0.0)
        if next_:
            break
    assert isinstance(next_[0], m.Assignment) and next_[0].origins == (make_origin(B0, 1, 9),)


def settle(made: Coordinator, said: list[m.Message]) -> None:
    for each in said:
        if isinstance(each, m.Assignment):
            made.settled(m.Settled(each.sink, frozenset(each.origins)), 0.0)


def lengths(rng: random.Random, prompts: int, size: int) -> list[list[int]]:
    """Return bytes of samples with log-normal lengths, like completions."""
    return [
        [min(int(rng.lognormvariate(9.0, 1.0)), LONGEST) + 64 for _ in range(size)]
        for _ in range(prompts)
    ]


def placed_bytes(said: list[m.Message], sinks: int) -> list[int]:
    loads = dict.fromkeys([f"t{i}" for i in range(sinks)], 0)
    for each in said:
        assert isinstance(each, m.Assignment)
        loads[each.sink] += each.nbytes
    return list(loads.values())


@pytest.mark.parametrize("trial", range(10))
def test_the_fullest_of_eight_sinks_has_at_most_two_percent_more_than_the_mean(trial: int) -> None:
    print(f"SHMBUS_TEST_SEED={SEED}, trial {trial}")
    made = coordinator(sinks=8)
    said: list[m.Message] = []
    prompts = lengths(random.Random(SEED + trial), 512, 8)
    for at in range(0, 512, 64):
        heads = [
            head(f"q{at + i}", 8, index, (at + i) * 8 + index, nbytes=nbytes)
            for i, sizes in enumerate(prompts[at : at + 64])
            for index, nbytes in enumerate(sizes)
        ]
        new = announce(made, B0, 1 + at // 64, *heads)
        settle(made, new)
        said += new
    loads = placed_bytes(said, 8)
    assert sum(loads) == sum(map(sum, prompts))
    assert max(loads) <= 1.02 * sum(loads) / 8


def test_sinks_differ_by_at_most_the_heaviest_group_though_each_is_put_before_the_next() -> None:
    print(f"SHMBUS_TEST_SEED={SEED}")
    made = coordinator(sinks=8)
    said: list[m.Message] = []
    prompts = lengths(random.Random(SEED), 512, 1)
    for i, (nbytes,) in enumerate(prompts):
        new = announce(made, B0, 1 + i, head(f"q{i}", 1, 0, i, nbytes=nbytes))
        settle(made, new)
        said += new
    loads = placed_bytes(said, 8)
    assert sum(loads) == sum(map(sum, prompts))
    assert max(loads) - min(loads) <= max(map(max, prompts))


def test_a_sink_that_took_nothing_for_long_gets_at_most_a_window_more_than_the_others() -> None:
    made = coordinator(sinks=2, window_bytes=1000)
    asleep: list[m.Message] = []
    number = 0
    for _ in range(100):
        number += 1
        for each in announce(made, B0, number, head(f"q{number}", 1, 0, number, nbytes=100)):
            assert isinstance(each, m.Assignment)
            if each.sink == "t0":
                settle(made, [each])
            else:
                asleep.append(each)
    assert len(asleep) == 10  # its window
    settle(made, asleep)
    said: list[m.Message] = []
    for _ in range(100):
        number += 1
        new = announce(made, B0, number, head(f"q{number}", 1, 0, number, nbytes=100))
        settle(made, new)
        said += new
    loads = placed_bytes(said, 2)
    assert 0 < loads[1] - loads[0] <= 1000


def test_a_sink_gets_no_more_than_its_window_and_the_next_when_that_is_put() -> None:
    made = coordinator(window_bytes=200)
    said = announce(made, B0, 1, *(head(f"q{i}", 1, 0, i, nbytes=128) for i in range(5)))
    assert len(said) == 2
    first = said[0]
    assert isinstance(first, m.Assignment)
    assert len(made.settled(m.Settled("t0", frozenset(first.origins)), 0.0)) == 1


def test_what_a_policy_drops_goes_through_a_sinks_journal_and_is_never_sent() -> None:
    made = coordinator(policy=StashPolicy(skip_zero_variance=True))
    said = announce(made, B0, 1, *(head("q", 2, i, i, score=1.0) for i in range(2)))
    origins = (make_origin(B0, 1, 0), make_origin(B0, 1, 1))
    assert said == [m.Drop("t0", 1, 3, "zero_variance", origins)]
    assert made.drop_again() == said
    assert announce(made, B0, 2) == []
    made.settled(m.Settled("t0", frozenset(origins)), 0.0)
    assert made.drop_again() == [] and made.drops == {"zero_variance": 2}
    made.confirmed(m.Confirmation(B0, frozenset(origins), (1, 2)), 0.0)
    assert not made.taken and not made.known


def test_what_a_lost_source_had_announced_is_withdrawn_and_counted() -> None:
    made = coordinator(buses=2)
    announce(made, B0, 1, head("open", 3, 0, 0), head("away", 1, 0, 1))
    announce(made, B1, 1, head("open", 3, 1, 0))
    assert made.source_lost(B0, 0.0) == {make_origin(B0, 1, 0)}
    assert [sample.origin for sample in made.stash.waiting_samples()] == [make_origin(B1, 1, 0)]
    announce(made, B1, 2, head("open", 3, 0, 1))
    assert len(announce(made, B1, 3, head("open", 3, 2, 2))) == 1


def test_nothing_is_placed_before_every_sink_was_heard() -> None:
    made = Coordinator(3, [B0], ["t0", "t1"])
    made.begin()
    made.sink_state(m.SinkState("t0", 1, 3, frozenset(), frozenset()), 0.0)
    assert announce(made, B0, 1, head("q", 1, 0, 0), head("r", 1, 0, 1)) == []
    has = frozenset({make_origin(B0, 1, 0)})
    said = made.sink_state(m.SinkState("t1", 1, 3, has, frozenset()), 0.0)
    placed = [each.origins for each in said if isinstance(each, m.Assignment)]
    assert placed == [(make_origin(B0, 1, 1),)]
