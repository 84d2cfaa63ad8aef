"""What is judged by a bound: made-up series, where each answer is known."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from bench.bounds import CONFIDENCE, MOVED, Beside, Bound, interval, width
from bench.rows.row import Row, table
from bench.rows.targets import Target

MEMCPY = Bound(name="memcpy", unit="GB/s")
FUTEX = Bound(name="raw futex", unit="us", sense="cost")


def beside(values: tuple[float, ...], fences: tuple[float, ...], bound: Bound = MEMCPY) -> Beside:
    """Runs with the bound before, between and behind them."""
    around = tuple(itertools.pairwise(fences))
    return Beside(bound=bound, values=values, bounds=around)


def row(values: tuple[float, ...], bounds: tuple[float, ...], others: float = 0.0) -> Row:
    found = beside(values, bounds)
    return Row(
        name="n",
        title="t",
        measured="m",
        value=statistics.median(found.ratios),
        target=Target("at least", 0.5, "of memcpy"),
        bound=found,
        others=others,
    )


@pytest.mark.parametrize(
    ("count", "rank"), [(1, 1), (2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (30, 10)]
)
def test_an_interval_is_that_of_the_sign_test(count: int, rank: int) -> None:
    assert interval(range(count)) == (rank - 1, count - rank)


def test_an_interval_holds_the_median_as_often_as_it_says(seed: int) -> None:
    generator = random.Random(seed)
    held = 0
    for _ in range(2000):
        low, high = interval([generator.gauss(0.0, 1.0) for _ in range(15)])
        held += low <= 0.0 <= high
    # Six deviations of the count below what is said.
    assert held >= 2000 * CONFIDENCE - 6 * (2000 * 0.05 * 0.95) ** 0.5


def test_one_value_out_of_nine_widens_no_interval() -> None:
    assert width([10.0] * 8 + [30.0]) == 0.0
    assert width([10.0] * 2 + [30.0]) == pytest.approx(2.0)
    assert width([0.0, 1.0]) == float("inf")


def test_a_run_is_compared_with_the_bound_right_before_and_behind_it() -> None:
    # The machine slows down to a half and the row with it: its share stays.
    found = beside((7.5, 5.25, 4.5), (16.0, 14.0, 7.0, 11.0))
    assert found.ratios == found.shares == [0.5, 0.5, 0.5]
    in_turns = Beside(bound=MEMCPY, values=(7.5, 5.0), bounds=((15.0,), (10.0,)))
    assert in_turns.ratios == [0.5, 0.5] and in_turns.measured == [15.0, 10.0]


def test_the_share_of_a_cost_is_what_is_left_when_all_else_is_free() -> None:
    found = beside((20.0, 10.0), (5.0, 5.0, 5.0), FUTEX)
    assert found.ratios == [4.0, 2.0]
    assert found.shares == [0.25, 0.5]
    assert "raw futex: 5 us, 0.38 of it" in str(found)


@pytest.mark.parametrize("slowest", [0.5, 1 / (1 + MOVED) - 0.01])
def test_a_bound_that_moved_leaves_no_verdict(slowest: float) -> None:
    found = row((7.0, 7.0, 7.0), (10.0, 10.0, 10.0 * slowest, 10.0))
    assert found.met is None
    assert found.verdict.startswith("machine not quiet: memcpy moved by ")
    assert found.as_json()["not_quiet"] in found.verdict
    assert "machine not quiet" in table([found])


def test_a_bound_that_stood_still_judges_by_its_share() -> None:
    assert row((7.0, 7.0), (10.0, 10.5, 10.0)).met is True
    assert row((4.0, 4.1), (10.0, 10.5, 10.0)).met is False
    assert row((4.0, 4.1), (10.0, 10.5, 10.0)).verdict == "NOT met"


def difference(added: tuple[float, ...]) -> Row:
    """A row of what is added to a bound that moves by far more than a tenth."""
    bounds = tuple(20.0 * 3.0**number for number in range(len(added)))
    values = tuple(bound + more for bound, more in zip(bounds, added, strict=True))
    return Row(
        name="n",
        title="t",
        measured="m",
        value=statistics.median(added),
        spread=interval(added),
        target=Target("at most", 10.0, "us more"),
        bound=Beside(bound=FUTEX, values=values, bounds=tuple((one,) for one in bounds)),
        difference=True,
    )


def test_what_is_added_is_judged_by_the_interval_of_the_differences_however_the_bound_moved() -> (
    None
):
    assert difference((4.0, 5.0, 6.0)).verdict == "met"
    assert difference((14.0, 15.0, 60.0)).verdict == "NOT met"
    unclear = difference((4.0, 9.0, 11.0))
    assert unclear.met is None
    assert unclear.verdict == "machine not quiet: from 4 to 11, on both sides of the target"
    # What a bound comes to says nothing about what is added to it.
    assert difference((14.0, 15.0, 60.0)).best is None


def test_a_target_that_the_bound_alone_would_miss_is_told_beside_the_verdict() -> None:
    # At half of its bound a run comes to 0.4 of memcpy, so that nothing comes to more than 0.8.
    found = beside((4.0, 4.0), (8.0, 8.0, 8.0))
    for wanted, far in ((0.85, True), (0.75, False)):
        row = Row(
            name="n",
            title="t",
            measured="m",
            value=0.4,
            target=Target("at least", wanted, "of memcpy"),
            bound=found,
        )
        assert row.met is False and row.best == pytest.approx(0.8)
        assert bool(row.out_of_reach) is far
        told = "NOT met; out of reach here, where its bound alone comes to 0.8"
        assert row.verdict == (told if far else "NOT met")
        assert bool(row.as_json()["out_of_reach"]) is far
    cost = Row(
        name="n",
        title="t",
        measured="m",
        value=100.0,
        target=Target("at most", 25.0, "us"),
        bound=beside((100.0, 100.0), (50.0, 50.0, 50.0), FUTEX),
    )
    assert cost.best == pytest.approx(50.0) and cost.out_of_reach


def test_a_row_that_beats_its_bound_says_nothing_of_what_it_would_be_there() -> None:
    assert row((20.0, 20.0), (10.0, 10.0, 10.0)).best is None


def test_what_others_took_of_the_processors_leaves_no_verdict() -> None:
    found = row((7.0, 7.0), (10.0, 10.0, 10.0), others=0.4)
    assert found.met is None
    assert found.verdict == "machine not quiet: others took 0.40 of a processor meanwhile"


def test_runs_are_enough_when_their_interval_is_narrow_and_the_bound_stands() -> None:
    assert not beside((7.0,), (10.0, 10.0)).narrow
    assert beside((7.0, 7.1), (10.0, 10.0, 10.0)).narrow
    assert not beside((7.0, 8.0), (10.0, 10.0, 10.0)).narrow
    assert not beside((7.0, 5.2), (10.0, 10.0, 5.0)).narrow


def test_a_row_says_its_bound_and_its_share_in_table_and_json() -> None:
    found = row((5.0, 6.0, 7.0), (10.0, 10.0, 10.0, 10.0))
    assert "memcpy: 10 GB/s, 0.6 of it" in table([found])
    told = found.as_json()["bound"]
    assert told["share"] == pytest.approx(0.6) and told["median"] == 10.0
    assert told["share_interval"] == pytest.approx((0.5, 0.7))


def test_every_run_has_a_bound_of_its_own() -> None:
    for values, bounds in (((1.0, 2.0), ((1.0,),)), ((1.0,), ((),)), ((), ())):
        with pytest.raises(AssertionError):
            Beside(bound=MEMCPY, values=values, bounds=bounds)
