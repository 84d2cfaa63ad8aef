"""The plan of a packed batch: sequences of a call, and a single place for each token."""

import numpy as np
import pytest
import torch
from test_attention import visible_keys

from trainer_adapter.attention import plan as planning
from trainer_adapter.attention import sdpa as moving

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (2, 0), (-1, 2), (2, -1), (3, 1), (40, 40)]


def plan_of(
    lengths: list[tuple[int, int]], window: tuple[int, int] = (-1, 0), work: int = 512
) -> planning.Plan:
    n_q, n_k = np.array(lengths, np.int64).reshape(-1, 2).T
    return planning.make_plan(n_q.tobytes(), n_k.tobytes(), window, work, "cpu")


def test_equal_sequences_share_one_call_and_large_ones_go_alone() -> None:
    assert len(plan_of([(16, 16)] * 1000).buckets) == 1
    apart = plan_of([(100, 100), (800, 800), (400, 400)])
    assert [b.rows for b in apart.buckets] == [100, 800, 400]
    assert apart.queries.starts == apart.keys.starts == (0, 100, 900)


def test_only_tokens_of_sequences_that_share_a_call_move() -> None:
    plan = plan_of([(2, 2), (900, 900), (3, 3), (2, 2), (700, 700)])
    assert [(b.rows, len(b.row_counts)) for b in plan.buckets] == [(3, 3), (900, 1), (700, 1)]
    assert plan.queries.starts == plan.keys.starts == (-1, 2, 907)


def test_a_causal_batch_needs_no_mask_even_where_key_lengths_differ() -> None:
    kinds = [b.kind for b in plan_of([(5, 5), (7, 7), (9, 3), (1, 8)]).buckets]
    assert set(kinds) == {"causal", "full"}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_tokens_that_meet_have_one_slot(window: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [(int(a), int(b)) for a, b in rng.integers(0, 30, (40, 2))]
    plan = plan_of(lengths, window)
    seen_by = [visible_keys(a, b, window) for a, b in lengths]
    for moves, axis in ((plan.queries, 1), (plan.keys, 0)):
        needed = np.concatenate([visible.any(dim=axis).numpy() for visible in seen_by])
        placed = moves.places >= 0
        assert (placed == needed).all()
        assert sorted(moves.slots[moves.slots >= 0]) == np.flatnonzero(placed).tolist()
        assert (moves.slots[moves.places[placed]] == np.flatnonzero(placed)).all()


def test_padding_never_costs_more_than_one_call_a_bucket(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for bucket in plan_of([(int(n), int(n)) for n in rng.integers(1, 200, 500)]).buckets:
        padding = bucket.rows * bucket.keys * len(bucket.row_counts) - int(
            (bucket.row_counts * bucket.key_counts).sum()
        )
        assert padding <= planning.CALL_WORK["cpu"] // 512


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("way", ["_taken", "_put"])
def test_tokens_come_to_their_buckets_and_back_with_their_gradients(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int], way: str, seed: int
) -> None:
    monkeypatch.setattr(moving, "_taken", getattr(moving, way))
    rng = np.random.default_rng(seed)
    lengths = [(int(a), int(b)) for a, b in rng.integers(0, 30, (40, 2))] + [(300, 300)]
    plan = plan_of(lengths, window)
    for moves in (plan.queries, plan.keys):
        placed = torch.from_numpy(moves.places >= 0)
        x = torch.randn(len(placed), 3, 5, dtype=torch.float64).requires_grad_()
        parts = moving.spread(x, moves)
        assert [len(part) for part in parts] == list(moves.counts)
        slots = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
        assert [part.shape[0] * part.shape[2] for part in parts] == list(moves.sizes)
        rows = torch.from_numpy(moves.slots)
        assert torch.equal(slots[rows >= 0], x[rows[rows >= 0]])
        assert not slots[rows < 0].any()
        back = moving.collect(parts, moves)
        assert torch.equal(back[placed], x[placed])
        assert not back[~placed].any()
        upstream = torch.randn_like(slots)
        (to_x,) = torch.autograd.grad(slots, x, upstream, retain_graph=True)
        right = torch.zeros_like(x).index_copy(0, rows[rows >= 0], upstream[rows >= 0])
        assert torch.equal(to_x, right)
        upstream = torch.randn_like(back)
        (to_x,) = torch.autograd.grad(back, x, upstream)
        assert torch.equal(to_x, upstream * placed[:, None, None])
