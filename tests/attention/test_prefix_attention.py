"""Attention over shared prefixes: each row as in every sequence alone, forward and gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_adapter.attention import prefix_attention, prefixes, varlen_attention
from trainer_adapter.batches import prefix_tree
from trainer_adapter.batches.prefix_tree import PrefixTree, share_prefixes

pytestmark = pytest.mark.usefixtures("one_thread")


def random_sequences(rng: np.random.Generator, longest: int) -> list[list[np.ndarray[Any, Any]]]:
    """Groups of sequences that branch off, end inside of, or share nothing with their siblings."""
    groups = []
    for _ in range(int(rng.integers(1, 4))):
        found = [rng.integers(0, 5, int(rng.integers(1, longest)))]
        for _ in range(int(rng.integers(0, 6))):
            other = found[int(rng.integers(len(found)))]
            kept = int(rng.integers(0, len(other) + 1))
            more = rng.integers(0, 5, int(rng.integers(0, longest)))
            joined = np.concatenate([other[:kept], more])
            found.append(joined if len(joined) else other)
        groups.append(found)
    return groups


def tree_of(
    groups: list[list[np.ndarray[Any, Any]]],
) -> tuple[PrefixTree, list[np.ndarray[Any, Any]]]:
    sequences = [one for group in groups for one in group]
    sizes = np.array([len(group) for group in groups], np.int64)
    lengths = np.array([len(one) for one in sequences], np.int64)
    return share_prefixes(np.concatenate(sequences), lengths, sizes), sequences


def operands(
    rows: int,
    heads: tuple[int, int],
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    dim: int = 8,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, n, dim, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]


def alone(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """One sequence by plain arithmetic, in float64."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(len(q))
    hidden = at[None, :] > at[:, None]
    if window >= 0:
        hidden = hidden | (at[:, None] - at[None, :] > window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def by_hand(given: list[Tensor], tree: PrefixTree, lengths: list[int], window: int) -> Tensor:
    wide = [x.to("cpu", torch.float64) for x in given]
    parts = tree.rows.cpu().split(lengths)
    return torch.cat([alone(*(x[rows] for x in wide), window) for rows in parts])


@pytest.mark.parametrize("part", range(5))
def test_500_random_trees_are_exact(part: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([seed, part])
    shared = 0
    for turn in range(100):
        monkeypatch.setattr(prefix_tree, "LEAST_SAVED", int(rng.choice([1, 4])))
        tree, sequences = tree_of(random_sequences(rng, 12))
        lengths = list(map(len, sequences))
        shared += sum(lengths) - tree.num_rows
        window = int(rng.choice([-1, 0, 3, 7]))
        heads = [(2, 2), (4, 2), (3, 1)][turn % 3]
        given = operands(tree.num_rows, heads, turn, torch.float64)
        upstream = torch.randn(sum(lengths), heads[0], 8, dtype=torch.float64)
        wanted = by_hand(given, tree, lengths, window)
        right = torch.autograd.grad(wanted, given, upstream)
        got = tree.of_tokens(prefix_attention(*given, tree, window=window, enable_gqa=True))
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        for mine, theirs in zip(torch.autograd.grad(got, given, upstream), right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert shared > 500


@pytest.mark.parametrize("window", [-1, 5])
def test_bfloat16_is_no_less_exact(seed: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "LEAST_SAVED", 4)
    rng = np.random.default_rng(seed)
    errors = np.zeros((2, 4))
    for turn in range(20):
        tree, sequences = tree_of(random_sequences(rng, 40))
        lengths = list(map(len, sequences))
        given = operands(tree.num_rows, (4, 2), turn, torch.bfloat16)
        upstream = torch.randn(sum(lengths), 4, 8).bfloat16()
        exact = [x.detach().double().requires_grad_() for x in given]
        wanted = by_hand(exact, tree, lengths, window)
        truth = [wanted, *torch.autograd.grad(wanted, exact, upstream.double())]
        borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        longest = max(lengths)
        plain = [tree.of_tokens(x).detach().requires_grad_() for x in given]
        ways = [
            (tree.of_tokens(prefix_attention(*given, tree, window=window, enable_gqa=True)), given),
            (
                varlen_attention(
                    *plain, borders, borders, longest, longest,
                    window_size=(window, 0), enable_gqa=True,
                ),
                plain,
            ),
        ]  # fmt: skip
        for way, (out, leaves) in enumerate(ways):
            grads = torch.autograd.grad(out, leaves, upstream)
            if leaves is plain:
                summed = torch.zeros(tree.num_rows, 1, 1)
                grads = tuple(
                    summed.expand(-1, *x.shape[1:])
                    .clone()
                    .index_add(0, tree.rows, x.float())
                    .bfloat16()
                    for x in grads
                )
            for part, (mine, right) in enumerate(zip([out, *grads], truth, strict=True)):
                errors[way, part] += float((mine.detach().double() - right.detach()).square().sum())
    # By squares: the largest of few values is a matter of where it lies between two bfloat16.
    # PyTorch's rule for fused kernels allows twice the error of the plain way in the same dtype.
    assert (np.sqrt(errors[0]) <= 1.25 * np.sqrt(errors[1])).all(), errors


def test_blocks_follow_the_masks_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", 4)
    monkeypatch.setattr(prefix_tree, "LEAST_SAVED", 1)
    rng = np.random.default_rng(seed)
    for _ in range(200):
        tree, _ = tree_of(random_sequences(rng, 20))
        window = int(rng.choice([-1, 0, 3, 9]))
        rows, at = tree.num_rows, np.arange(tree.num_rows)
        ends, positions = tree.ends.numpy(), tree.position_ids.numpy()
        sees = (at[None] <= at[:, None]) & (at[:, None] < ends[None])
        if window >= 0:
            sees &= positions[:, None] - positions[None] <= window
        some, full = prefixes.visible_blocks(tree, window)
        assert not (some & full).any()
        for i, j in np.ndindex(some.shape):
            block = sees[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            if full[i, j]:
                assert block.all()
                assert 4 * j + 4 <= rows
            elif not some[i, j]:
                assert not block.any()


def test_rows_see_only_their_own_past(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "LEAST_SAVED", 1)
    rng = np.random.default_rng(seed)
    for _ in range(100):
        tree, sequences = tree_of(random_sequences(rng, 12))
        wanted = np.zeros((tree.num_rows, tree.num_rows), bool)
        for rows in tree.rows.split(list(map(len, sequences))):
            for place, row in enumerate(rows.tolist()):
                wanted[row, rows[: place + 1]] = True
        at = np.arange(tree.num_rows)
        assert ((at[None] <= at[:, None]) & (at[:, None] < tree.ends.numpy()[None]) == wanted).all()


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    tree, _ = tree_of([[np.array([1, 2, 3])]])
    q = torch.zeros(3, 2, 4)
    with pytest.raises(TypeError, match=r"tree: expected a PrefixTree, got Tensor; pass batch\."):
        prefix_attention(q, q, q, q)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q: expected 3 tokens, the tree's rows, got 2"):
        prefix_attention(q[:2], q[:2], q[:2], tree)
    with pytest.raises(ValueError, match="backend 'flex' cannot run here: it needs a CUDA device"):
        prefix_attention(q, q, q, tree, backend="flex")


def test_where_flex_attention_cannot_be_compiled_it_goes_by_paths_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    tree, _ = tree_of(random_sequences(np.random.default_rng(seed), 12))
    given = operands(tree.num_rows, (4, 2), seed, torch.float32)
    wanted = prefix_attention(*given, tree, enable_gqa=True)
    tried: list[int] = []

    def broken() -> Any:
        tried.append(1)
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    monkeypatch.setattr(prefixes, "_flex_obstacle", lambda q: "")
    monkeypatch.setattr(prefixes, "_compiled_flex", broken)
    monkeypatch.setattr(prefixes, "_refused", [])
    for _ in range(2):
        assert torch.equal(prefix_attention(*given, tree, enable_gqa=True), wanted)
    assert len(tried) == 1
    assert caplog.text.count("FlexAttention cannot be compiled here") == 1
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        prefix_attention(*given, tree, enable_gqa=True, backend="flex")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("backend", ["flex", "native", "sdpa"])
@pytest.mark.gpu
def test_a_gpu_gives_the_same_by_each_backend(seed: int, backend: Any, window: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = torch.bfloat16
    for turn in range(3):
        tree, sequences = tree_of(random_sequences(rng, 700))
        lengths = list(map(len, sequences))
        given = operands(tree.num_rows, (4, 2), turn, dtype, "cuda", 64)
        exact = [x.detach().cpu().double().requires_grad_() for x in given]
        upstream = torch.randn(sum(lengths), 4, 64).to(dtype)
        wanted = by_hand(exact, tree, lengths, window)
        right = torch.autograd.grad(wanted, exact, upstream.double())
        on_gpu = tree.to("cuda")
        got = on_gpu.of_tokens(
            prefix_attention(*given, on_gpu, window=window, enable_gqa=True, backend=backend)
        )
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=0.05, atol=0.05)
        for mine, theirs in zip(
            torch.autograd.grad(got, given, upstream.cuda()), right, strict=True
        ):
            assert (mine.cpu().double() - theirs).norm() / theirs.norm() < 0.02
