"""The planner: which groups make the next batch, when, and where each of them is."""

import ast
import random
from pathlib import Path
from typing import Any

import pytest

from trainer_adapter.handler import planner as planner_module
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch

Planner = BatchPlanner[Any]


def planned(
    tokens: int | None = None,
    groups: int | None = None,
    max_wait_s: float | None = None,
    world_size: int = 1,
) -> Planner:
    return BatchPlanner(tokens, groups, max_wait_s, world_size)


def add(planner: Planner, sizes: dict[str, int], now_s: float = 0.0) -> None:
    """Letters stand for groups: the planner only passes them on."""
    planner.add(sizes.items(), now_s)  # type: ignore[arg-type]


def make(planner: Planner) -> str:
    groups = planner.next_groups()
    batch = "".join(str(one.group) for one in groups)
    planner.made(groups, batch)
    return batch


def waiting(planner: Planner) -> str:
    return "".join(map(str, planner.groups))


def test_it_has_no_clock_no_thread_no_socket_and_no_torch() -> None:
    source = ast.parse(Path(planner_module.__file__).read_text())
    assert not {
        name.split(".")[0]
        for node in ast.walk(source)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    } & {"asyncio", "select", "socket", "threading", "time", "torch"}


def test_the_wait_runs_exactly_while_a_group_waits() -> None:
    assert planned(tokens=10).left_s(1e9) is None
    planner = planned(tokens=10, max_wait_s=1.0)
    add(planner, {}, 1.0)
    assert planner.left_s(1.0) is None
    add(planner, {"a": 1}, 2.0)
    planner.keep(lambda group: False)
    assert planner.left_s(2.5) is None
    add(planner, {"b": 1}, 3.0)
    assert planner.left_s(3.0) == 1.0
    make(planner)
    assert planner.left_s(3.0) is None
    planner.recall(4.0)
    assert planner.left_s(4.0) == 1.0
    planner.restart_wait(4.5)
    assert planner.left_s(4.5) == 1.0


def test_one_batch_is_never_made_twice() -> None:
    planner = planned(groups=2)
    add(planner, {"a": 1, "b": 1, "c": 1, "d": 1})
    groups = planner.next_groups()
    planner.made(groups, "first")
    with pytest.raises(RuntimeError, match="expected one thread at a time in next_batch"):
        planner.made(groups, "second")
    assert waiting(planner) == "cd"
    assert len(planner.ready) == 1


def test_an_error_is_raised_once_in_its_turn_and_is_not_recalled() -> None:
    planner = planned(groups=1)
    add(planner, {"a": 1, "b": 1})
    make(planner)
    planner.add_error(ValueError("in its turn"))
    make(planner)
    assert planner.hand_out(0) == "a"
    planner.recall(0.0)
    assert waiting(planner) == "b"
    with pytest.raises(ValueError, match="in its turn"):
        planner.hand_out(1)
    assert (list(planner.ready), list(planner.out)) == ([], [0])


@pytest.mark.parametrize(
    ("planner", "says"),
    [
        (planned(tokens=9, max_wait_s=1.0, world_size=3), "3 complete groups or more, one for"),
        (planned(groups=4, world_size=3), "12 complete groups, groups_per_batch=4 for each rank"),
        (planned(tokens=9, world_size=3), "complete groups of tokens_per_batch=9 tokens for each"),
    ],
)
def test_it_says_what_a_step_of_several_ranks_needs(planner: Planner, says: str) -> None:
    said = planner.step_requirement(5)
    assert said.startswith(f"a step of world_size=3: expected {says}")
    assert "got 5 trajectories" in said
    assert planned(tokens=9).step_requirement(5) == ""


Planned = tuple[int, int, int]
CALLS = (
    ["add"] * 2
    + ["make"] * 2
    + ["hand out"] * 2
    + ["ack", "give back", "recall", "keep", "restart"]
)


class Oracle:
    """The planner's rules written plainly: lists of (group, tokens, shard), searched each time."""

    def __init__(
        self, tokens: int | None, groups: int | None, max_wait_s: float | None, ranks: int
    ) -> None:
        self.tokens, self.groups, self.max_wait_s, self.ranks = tokens, groups, max_wait_s, ranks
        self.waiting: list[Planned] = []
        self.ready: list[list[Planned]] = []
        self.out: dict[int, list[Planned]] = {}
        self.ended: set[int] = set()
        self.names = self.shards = self.steps = 0
        self.since_s: float | None = None

    def fits(self, groups: list[Planned]) -> bool:
        if self.ranks > 1:
            return len({shard for _, _, shard in groups}) == 1
        if self.groups is not None:
            return len(groups) <= self.groups
        assert self.tokens is not None
        return len(groups) == 1 or sum(tokens for _, tokens, _ in groups) <= self.tokens

    def batch(self) -> list[Planned]:
        counts = range(len(self.waiting), 0, -1)
        return next((self.waiting[:n] for n in counts if self.fits(self.waiting[:n])), [])

    def full(self) -> bool:
        batch = self.batch()
        if self.ranks > 1 or len(batch) < len(self.waiting):
            return bool(batch)
        if self.groups is not None:
            return len(batch) == self.groups
        assert self.tokens is not None
        return sum(tokens for _, tokens, _ in batch) >= self.tokens

    def due(self, now_s: float, awaited: bool) -> bool:
        if not awaited or self.since_s is None or self.max_wait_s is None:
            return self.full()
        return self.full() or self.since_s + self.max_wait_s <= now_s

    def recall(self) -> None:
        self.waiting = [*(one for batch in self.ready for one in batch), *self.waiting]
        self.ready = []

    def held(self) -> list[int]:
        batches = [self.waiting, *self.ready, *self.out.values()]
        return [group for batch in batches for group, _, _ in batch]


def call(planner: Planner, oracle: Oracle, what: str, now_s: float, rng: random.Random) -> None:
    if what == "add":
        new = [(oracle.names + i, rng.randrange(1, 30)) for i in range(rng.randrange(4))]
        planner.add(new, now_s)  # type: ignore[arg-type]
        oracle.waiting += [(group, size, oracle.shards) for group, size in new]
        oracle.names, oracle.shards = oracle.names + len(new), oracle.shards + 1
    elif what == "make" and oracle.due(now_s, awaited=True):
        groups = planner.next_groups()
        assert [tuple(one) for one in groups] == oracle.batch()
        oracle.ready.append(oracle.batch())
        del oracle.waiting[: len(groups)]
        planner.made(groups, [one.group for one in groups])
    elif what == "hand out" and oracle.ready:
        batch = oracle.out[oracle.steps] = oracle.ready.pop(0)
        assert planner.hand_out(oracle.steps) == [group for group, _, _ in batch]
        oracle.steps += 1
    elif what == "ack" and oracle.out:
        step = rng.choice(list(oracle.out))
        planner.acknowledged(step)
        oracle.ended |= {group for group, _, _ in oracle.out.pop(step)}
    elif what == "give back" and oracle.out:
        step = rng.choice(list(oracle.out))
        planner.give_back(step, now_s)
        oracle.recall()
        oracle.waiting = oracle.out.pop(step) + oracle.waiting
    elif what == "recall":
        planner.recall(now_s)
        oracle.recall()
    elif what == "keep" and oracle.waiting:
        gone = rng.choice(oracle.waiting)[0]
        planner.keep(lambda group: group != gone)  # type: ignore[comparison-overlap]
        oracle.waiting = [one for one in oracle.waiting if one[0] != gone]
        oracle.ended.add(gone)
    elif what == "restart":
        planner.restart_wait(now_s)
        oracle.since_s = None
    if not oracle.waiting:
        oracle.since_s = None
    elif oracle.since_s is None:
        oracle.since_s = now_s


@pytest.mark.parametrize(
    ("tokens", "groups", "ranks"), [(20, None, 1), (None, 3, 1), (20, None, 2), (None, 3, 2)]
)
@pytest.mark.parametrize("max_wait_s", [None, 0.0, 2.0])
def test_any_order_of_calls_does_what_the_oracle_says_and_loses_no_group(
    tokens: int | None, groups: int | None, ranks: int, max_wait_s: float | None, seed: int
) -> None:
    rng = random.Random(seed)
    planner = planned(tokens, groups, max_wait_s, ranks)
    oracle = Oracle(tokens, groups, max_wait_s, ranks)
    now_s = 0.0
    for _ in range(400):
        now_s += rng.choice([0.0, 0.25, 1.0])
        call(planner, oracle, rng.choice(CALLS), now_s, rng)
        assert [tuple(one) for one in planner.waiting] == oracle.waiting
        made = [one for one in planner.ready if isinstance(one, MadeBatch)]
        assert [[tuple(one) for one in batch.planned] for batch in made] == oracle.ready
        out = {step: [tuple(one) for one in batch.planned] for step, batch in planner.out.items()}
        assert out == oracle.out
        assert planner.full == oracle.full()
        for awaited in (False, True):
            assert planner.due(now_s, awaited=awaited) == oracle.due(now_s, awaited)
        assert sorted([*oracle.held(), *oracle.ended]) == list(range(oracle.names))
