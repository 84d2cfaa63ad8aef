"""Sharing out by tokens: against longest-first greedy, and against the best there is."""

import functools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from counted_work import instructions

from trainer_adapter import balance as module
from trainer_adapter.balance import balance, by_budget


def sums(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def best(lengths: list[int], parts: int) -> int:
    order = sorted(lengths, reverse=True)
    found = sum(lengths)

    def place(item: int, loads: tuple[int, ...]) -> None:
        nonlocal found
        if max(loads) >= found:
            return
        if item == len(order):
            found = max(loads)
            return
        for part in {load: p for p, load in enumerate(loads)}.values():
            place(item + 1, (*loads[:part], loads[part] + order[item], *loads[part + 1 :]))

    place(0, (0,) * parts)
    return found


def mixes() -> dict[str, Callable[[random.Random, int], list[int]]]:
    return {
        "even": lambda rng, n: [rng.randrange(1, 100) for _ in range(n)],
        "log-normal": lambda rng, n: [int(rng.lognormvariate(6, 1)) + 1 for _ in range(n)],
        "one giant": lambda rng, n: [10_000] + [rng.randrange(0, 50) for _ in range(n - 1)],
        "equal": lambda rng, n: [7] * n,
        "zeros": lambda rng, n: [0] * n,
    }


@pytest.mark.parametrize("mix", mixes())
def test_every_item_is_shared_out_once_within_the_bounds(mix: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        parts = rng.randrange(1, 12)
        lengths = mixes()[mix](rng, rng.randrange(parts, 60))
        shared = balance(lengths, parts)
        assert sorted(i for part in shared for i in part) == list(range(len(lengths)))
        assert len(shared) == parts and all(part == sorted(part) and part for part in shared)
        got = sums(lengths, shared)
        assert max(got) - min(got) <= max(lengths)
        assert shared == balance(list(lengths), parts)


@pytest.mark.parametrize("mix", mixes())
def test_the_fullest_part_is_within_grahams_bound_of_the_best(mix: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        parts = rng.randrange(2, 5)
        lengths = mixes()[mix](rng, rng.randrange(parts, 10))
        assert max(sums(lengths, balance(lengths, parts))) <= best(lengths, parts) * (
            4 / 3 - 1 / (3 * parts)
        )


def test_a_world_that_no_batch_can_fill_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts: expected at most 2, one item.*got 3.*world_size"):
        balance([5, 5], 3)
    with pytest.raises(ValueError, match="parts: expected 1 or more, got 0"):
        balance([1], 0)
    with pytest.raises(ValueError, match="lengths: expected 0 or more, got -2"):
        balance([1, -2], 1)


def parts_by_scanning(lengths: list[int], budget: int) -> int:
    """The parts of first fit, or the fewest below into which `balance` divides the items."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[at:] = rooms[at:] or [budget]
        rooms[at] -= length
    counts = range(-(-sum(lengths) // budget), len(rooms))
    divided = (n for n in counts if max(sums(lengths, balance(lengths, n))) <= budget)
    return next(divided, len(rooms))


@pytest.mark.parametrize("low, high", [(1, 1000), (1, 90), (300, 700), (251, 420), (500, 510)])
def test_a_budget_needs_no_more_parts_than_a_scan_of_all(low: int, high: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        lengths = [rng.randint(low, high) for _ in range(rng.randint(1, 150))]
        assert len(by_budget(lengths, 1000)) <= parts_by_scanning(lengths, 1000)


BUDGET = 16_384
#: Six parts of 8292 + 4196 + 3896, and three of 2 * 4296 + 2 * 3896.
NINE = [8292] * 6 + [4296] * 6 + [4196] * 6 + [3896] * 12
HARD: dict[str, Callable[[random.Random, int], list[int]]] = {
    "near a half": lambda rng, n: [BUDGET // 2 + rng.randint(-60, 60) for _ in range(n)],
    "near a third": lambda rng, n: [BUDGET // 3 + rng.randint(-60, 60) for _ in range(n)],
    "powers of two": lambda rng, n: [1 << rng.randint(0, 14) for _ in range(n)],
    "one less than powers of two": lambda rng, n: [(1 << rng.randint(4, 14)) - 1 for _ in range(n)],
    "a giant": lambda rng, n: [BUDGET, *(rng.randint(1, 200) for _ in range(n - 1))],
    "giants": lambda rng, n: [16_000 if i % 10 else rng.randint(1, 800) for i in range(n)],
    "eleven parts of first fit where nine suffice": lambda rng, n: [NINE[i % 30] for i in range(n)],
}


@pytest.mark.parametrize("mix", HARD)
def test_hard_lengths_cost_n_log_n_and_no_more_parts_than_first_fit(mix: str, seed: int) -> None:
    rng = random.Random(seed)
    for count in (2_000, 6_000):
        lengths = HARD[mix](rng, count)
        assert instructions(functools.partial(by_budget, lengths, BUDGET)) <= (
            100 * count * math.log2(count)
        )
    for _ in range(5):
        lengths = HARD[mix](rng, 60)
        shared = by_budget(lengths, BUDGET)
        assert sorted(i for part in shared for i in part) == list(range(60))
        assert max(sums(lengths, shared)) <= BUDGET
        assert len(shared) <= parts_by_scanning(lengths, BUDGET)


@pytest.mark.parametrize("share", [1, 2, 3, 4, 7])
def test_lengths_just_above_a_part_of_the_budget_need_no_search(
    share: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    lengths = [BUDGET // (share + 1) + rng.randint(1, 50) for _ in range(360)]
    monkeypatch.setattr(module, "_first_fit", None)
    assert len(by_budget(lengths, BUDGET)) == -(-len(lengths) // share)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_lengths_may_be_an_array(dtype: str) -> None:
    lengths = np.array([9, 60_000, 3, 40_000, 7], np.uint16).astype(dtype)
    assert by_budget(lengths, 70_000) == by_budget(lengths.tolist(), 70_000)
    assert balance(lengths, 2) == balance(lengths.tolist(), 2)
    assert by_budget(lengths[:0], 1) == []


def test_a_sequence_above_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected at most 4 tokens.*got 9 at 1; raise"):
        by_budget([3, 9], 4)
    assert by_budget([], 4) == []
