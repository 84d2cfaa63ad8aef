"""Advantages: against the formulas written out group by group, and what must never come out."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer_adapter import advantages, group_advantages
from trainer_adapter.advantages import DEFAULT_EPS, MAX_SCORE

KINDS = ["grpo", "dr_grpo", "rloo", "none"]


def advantages_for_groups(scores: Any, sizes: Any, *more: Any, **options: Any) -> Any:
    arrays = np.asarray(scores, np.float64), np.asarray(sizes, np.int64)
    return advantages.advantages_for_groups(*arrays, *more, **options)


def by_hand(scores: list[float], kind: str, std: str = "bessel", eps: float = DEFAULT_EPS) -> Any:
    n = len(scores)
    if kind == "none":
        return scores
    if n < 2 or min(scores) == max(scores):
        return [0.0] * n
    mean = math.fsum(scores) / n
    if kind == "dr_grpo":
        return [s - mean for s in scores]
    if kind == "rloo":
        return [s - math.fsum(scores[:i] + scores[i + 1 :]) / (n - 1) for i, s in enumerate(scores)]
    squares = math.fsum((s - mean) ** 2 for s in scores)
    deviation = math.sqrt(squares / (n - 1 if std == "bessel" else n))
    return [(s - mean) / (deviation + eps) for s in scores]


def ragged(seed: int, groups: int = 50) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(2, 3, size=int(n)).tolist() for n in rng.integers(0, 9, groups)]


@pytest.mark.parametrize("std", ["bessel", "biased"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_equals_each_group_alone(kind: Any, std: Any, seed: int) -> None:
    batch = ragged(seed)
    flat = np.array([s for group in batch for s in group])
    got = advantages_for_groups(flat, [len(group) for group in batch], kind, std=std, eps=0.1)
    expected = [a for group in batch for a in by_hand(group, kind, std, 0.1)]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_the_default_standard_deviation_is_torchs() -> None:
    scores = torch.tensor([0.0, 1.0, 1.0, 4.0])
    expected = (scores - scores.mean()) / (scores.std() + 1e-6)
    torch.testing.assert_close(group_advantages(scores), expected)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("group", [[3.0], [0.1] * 3, [0.7] * 7, [0.0] * 8, [-1e38] * 3], ids=str)
def test_a_group_with_nothing_to_compare_gives_exactly_zero(group: list[float], kind: Any) -> None:
    assert group_advantages(group, kind, eps=0.0) == [0.0] * len(group)
    got = advantages_for_groups([1.0, 2.0, *group], [2, len(group)], kind)
    assert (got[2:] == 0).all()
    assert (got[:2] != 0).all()


@settings(max_examples=250, deadline=None)
@given(
    groups=st.lists(st.lists(st.floats(-MAX_SCORE, MAX_SCORE), max_size=6), max_size=5),
    kind=st.sampled_from([*KINDS, "batch", "batch_std"]),
    std=st.sampled_from(["bessel", "biased"]),
    eps=st.sampled_from([0.0, 1e-6, 1e300]),
)
@example(groups=[[0.0, 1e-104]], kind="batch_std", std="bessel", eps=1e300)
def test_scores_stay_finite(groups: list[list[float]], kind: Any, std: Any, eps: float) -> None:
    flat = np.array([s for group in groups for s in group], dtype=np.float64)
    got = advantages_for_groups(flat, [len(group) for group in groups], kind, std=std, eps=eps)
    assert np.isfinite(got).all()


def test_rows_are_groups_and_sizes_cut_a_flat_row() -> None:
    rows = np.array([[0.0, 2.0], [5.0, 5.0]])
    assert group_advantages(rows, "dr_grpo").tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    flat = group_advantages(rows.ravel(), "dr_grpo", sizes=[3, 0, 1])
    np.testing.assert_allclose(flat, [-7 / 3, -1 / 3, 8 / 3, 0.0])


@pytest.mark.parametrize(
    ("scores", "dtype"),
    [
        (np.array([0, 1]), np.float32),
        (np.array([False, True]), np.float32),
        (np.array([0, 1], np.float16), np.float32),
        (np.array([0, 1], np.float32), np.float32),
        (np.array([0, 1], np.float64), np.float64),
        (torch.tensor([0, 1]), torch.float32),
        (torch.tensor([0, 1], dtype=torch.bfloat16), torch.float32),
        (torch.tensor([0.0, 1.0]), torch.float32),
        (torch.tensor([[0.0, 1.0]]).double(), torch.float64),
    ],
)
def test_container_and_float64_stay_and_all_else_is_float32(scores: Any, dtype: Any) -> None:
    got = group_advantages(scores, "dr_grpo")
    assert type(got) is type(scores)
    assert got.dtype == dtype
    assert got.shape == scores.shape
    assert got.ravel().tolist() == [-0.5, 0.5]


def test_lists_give_lists() -> None:
    assert group_advantages([0, 1], "dr_grpo") == [-0.5, 0.5]
    assert group_advantages([[0, 1], [2, 2]], "rloo") == [[-1.0, 1.0], [0.0, 0.0]]
    assert group_advantages([]) == []


def test_advantages_are_constants_of_the_loss_and_scores_stay_untouched() -> None:
    assert not group_advantages(torch.tensor([0.0, 1.0], requires_grad=True)).requires_grad
    array = np.array([3.0, 4.0])
    for kind in KINDS:
        group_advantages(array, kind)[:] = 7
    assert array.tolist() == [3.0, 4.0]


def test_a_callable_gets_each_group_once() -> None:
    seen = []

    def best_only(scores: Any) -> Any:
        seen.append(scores.tolist())
        return scores == scores.max()

    got = advantages_for_groups([1.0, 2.0, 3.0], [1, 2], best_only)
    assert seen == [[1.0], [2.0, 3.0]]
    assert got.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_callable_may_return_a_tensor_with_or_without_a_graph(dtype: torch.dtype) -> None:
    def doubled(scores: Any) -> torch.Tensor:
        given = torch.tensor(scores, dtype=dtype)
        return (given.requires_grad_() if given.is_floating_point() else given) * 2

    assert advantages_for_groups([1.0, 2.0, 3.0], [1, 2], doubled).tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0.0, math.nan],), ValueError, "got nan at 1; drop the group"),
        (([[0.0], [-math.inf]],), ValueError, r"got -inf at \(1, 0\)"),
        (([1e39],), ValueError, "up to 1e\\+38"),
        ((["good"],), TypeError, "expected real numbers"),
        (([1j],), TypeError, "expected real numbers"),
        (([[1.0], [1.0, 2.0]],), ValueError, "ragged list; flatten it and pass sizes"),
        ((np.zeros((1, 1, 1)),), ValueError, r"got shape \(1, 1, 1\)"),
        ((np.ma.array([1.0, 2.0], mask=[0, 1]),), TypeError, "scores: .* MaskedArray.*compressed"),
        ((np.float64(1),), ValueError, r"got shape \(\)"),
        (([1.0], "best"), ValueError, "kind: expected 'grpo'"),
        *(
            (([1.0], wrong), ValueError, "advantages: expected 1 finite real numbers from .*lambda")
            for wrong in (
                lambda s: [1.0, 2.0],
                lambda s: s * math.nan,
                lambda s: s * 1j,
                lambda s: torch.tensor([1j]),
                lambda s: ["a"],
                lambda s: [[1.0], [1.0, 2.0]],
                lambda s: None,
                lambda s: 1.0,
            )
        ),
    ],
)
def test_what_makes_no_advantage_is_named(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        group_advantages(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sizes": [1, 2]}, ValueError, "expected 2 samples in all.*got 3"),
        ({"sizes": [3, -1]}, ValueError, "none below 0"),
        ({"sizes": [1 << 62] * 4 + [2]}, ValueError, "expected 2 samples in all"),
        ({"sizes": [1.0, 1.0]}, TypeError, "sizes: expected integers"),
        ({"sizes": [1, 10**400]}, TypeError, "sizes: expected integers"),
        ({"sizes": [[1], [1, 2]]}, ValueError, "sizes: expected rows of one length"),
        ({"sizes": np.ma.array([1, 1])}, TypeError, "sizes: .* MaskedArray"),
        ({"eps": 10**400}, ValueError, "eps: expected a number that a float can hold"),
        ({"std": "torch"}, ValueError, "std: expected 'bessel'"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite"),
        ({"eps": math.nan}, ValueError, "eps: expected a finite"),
        ({"eps": "small"}, TypeError, "eps: expected a number, got str"),
    ],
)
def test_options_that_do_not_fit_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        group_advantages([1.0, 2.0], **options)


@pytest.mark.gpu
def test_the_result_is_on_the_device_of_the_scores() -> None:
    got = group_advantages(torch.tensor([0.0, 1.0], device="cuda"), "dr_grpo")
    assert got.device.type == "cuda"
    assert got.tolist() == [-0.5, 0.5]


def test_few_samples_and_many_give_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for kind in ("grpo", "dr_grpo", "rloo"):
        for std in ("bessel", "biased"):
            for _ in range(200):
                sizes = rng.integers(1, 9, rng.integers(1, 8))
                scores = rng.choice([0.0, 1.0, -3.5, 1e-30, 1e30], sizes.sum())
                few = advantages_for_groups(scores, sizes, kind, std=std)
                many = advantages_for_groups(
                    np.tile(scores, 100), np.tile(sizes, 100), kind, std=std
                )
                np.testing.assert_allclose(few, many[: len(few)], rtol=1e-6)


@pytest.mark.parametrize("std", ["bessel", "biased"])
def test_normalisation_over_the_batch_is_by_its_formulas(std: Any, seed: int) -> None:
    batch = [group for group in ragged(seed) if group]
    flat = [s for group in batch for s in group]
    sizes = [len(group) for group in batch]
    mean = math.fsum(flat) / len(flat)
    squares = math.fsum((s - mean) ** 2 for s in flat)
    deviation = math.sqrt(squares / (len(flat) - (std == "bessel"))) + 0.1
    got = group_advantages(np.array(flat), "batch", sizes=sizes, std=std, eps=0.1)
    np.testing.assert_allclose(got, [(s - mean) / deviation for s in flat], rtol=1e-9, atol=1e-12)
    got = group_advantages(np.array(flat), "batch_std", sizes=sizes, std=std, eps=0.1)
    expected = [
        (s - math.fsum(group) / len(group)) / deviation if len(group) > 1 else 0.0
        for group in batch
        for s in group
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_over_the_batch_a_group_of_one_is_compared_and_equal_scores_are_not() -> None:
    got = group_advantages(np.array([0.0, 2.0]), "batch", sizes=[1, 1], eps=0.0)
    np.testing.assert_allclose(got, [-(0.5**0.5), 0.5**0.5])
    assert group_advantages(np.array([0.0, 2.0]), "batch_std", sizes=[1, 1]).tolist() == [0, 0]
    for kind in ("batch", "batch_std"):
        assert group_advantages([0.1] * 7, kind) == [0.0] * 7
