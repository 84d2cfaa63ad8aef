"""Messages to the page: differences, curves, percentiles. Pure, without processes."""

import asyncio
import random
from typing import Any

import pytest
from pages import apply

from shmbus.web import settings
from shmbus.web.picture import NAMES, Curves, difference, percentile
from shmbus.web.polling import Viewer


def random_picture(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in draw.sample("abcdefgh", draw.randrange(6)):
        kind = draw.randrange(5)
        if kind == 0 and depth:
            found[key] = random_picture(draw, depth - 1)
        elif kind == 1:
            found[key] = [draw.randrange(3) for _ in range(draw.randrange(3))]
        else:
            found[key] = draw.choice([0, 1, 2.5, "", "x", True])
    return found


def test_a_difference_turns_each_picture_into_each_other() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(2000):
        old, new = random_picture(draw), random_picture(draw)
        assert apply(old, difference(old, new)) == new
        assert difference(new, new) == {}


def test_what_did_not_change_is_not_sent() -> None:
    old = {"rows": {"1": {"x": 1}, "2": {"x": 2}}, "gone": 1}
    new = {"rows": {"1": {"x": 1}, "2": {"x": 3}}}
    assert difference(old, new) == {"rows": {"2": {"x": 3}}, "gone": None}


def of(now: float, buckets: list[int], total: float) -> dict[str, Any]:
    scores = {"bounds": [0.0, 0.5, 1.0], "buckets": buckets, "sum": total}
    return {
        "now": now, "used": 1, "capacity": 4, "policy_version": 3, "rates": {"committed": 2.0},
        "delivered": {"score": scores, "age": scores},
    }  # fmt: skip


def test_the_reward_of_a_point_is_of_what_came_since_the_one_before() -> None:
    curves = Curves()
    at = NAMES.index("reward") + 1
    assert curves.add(of(1.0, [5, 0, 0, 0], 0.0))[at] is None
    assert curves.add(of(2.0, [5, 0, 4, 0], 3.0))[at] == 0.75
    assert curves.add(of(3.0, [5, 0, 4, 0], 3.0))[at] is None
    # A successor of the bus counts from nothing.
    assert curves.add(of(4.0, [0, 1, 0, 0], 0.5))[at] is None
    assert curves.add(of(5.0, [0, 2, 0, 0], float("nan")))[at] is None


@pytest.mark.parametrize(
    ("buckets", "part", "expected"),
    [([0, 10, 0, 0], 0.5, 0.25), ([0, 0, 0, 4], 0.99, 1.0), ([0, 1, 99, 0], 0.99, 0.9949495)],
)
def test_a_percentile_fits_its_bucket(buckets: list[int], part: float, expected: float) -> None:
    assert percentile([0.0, 0.5, 1.0], buckets, part) == pytest.approx(expected)


def test_what_waits_for_a_page_that_reads_nothing_is_bounded() -> None:
    async def fill(size: int) -> int:
        viewer = Viewer()
        offered = 0
        while not viewer.closed:
            viewer.offer(bytes(size))
            offered += 1
            assert offered < 1000
        assert await viewer.next() is None  # and no waiting message
        return (offered - 1) * size

    for size in (10, 100_000, settings.MAX_BEHIND_BYTES + 1):
        assert asyncio.run(fill(size)) <= settings.MAX_BEHIND_BYTES
