"""Attention over packed batches against plain float64 attention of single sequences."""

import itertools
import math
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_adapter.attention import attention_backend, dispatch, native, varlen_attention
from trainer_adapter.attention import plan as planning

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD_DIM = 16
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (2, 0), (-1, 2), (2, -1), (3, 1), (40, 40)]
HEADS = [(2, 2), (4, 2), (4, 1)]
BATCHES = {
    "empty": [],
    "nothing to see": [(0, 3), (2, 0), (0, 0)],
    "square": [(5, 5), (0, 0), (1, 1), (9, 9), (9, 9), (33, 33)],
    "cross": [(3, 7), (7, 3), (0, 4), (4, 0), (1, 9), (6, 6), (9, 1)],
    "several blocks": [(300, 300), (2, 5), (140, 400), (400, 140)],
}


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    n_q: list[int]
    n_k: list[int]


def make_case(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    seed: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    head_dim: int = HEAD_DIM,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    n_q, n_k = [a for a, _ in lengths], [b for _, b in lengths]

    def rows(count: int, n_heads: int) -> Tensor:
        values = torch.randn(count, n_heads, head_dim, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    return Case(
        rows(sum(n_q), heads[0]), rows(sum(n_k), heads[1]), rows(sum(n_k), heads[1]), n_q, n_k
    )


def borders(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def packed(case: Case, window: tuple[int, int], **options: Any) -> Any:
    device = case.q.device.type
    return varlen_attention(
        *case[:3],
        borders(case.n_q, device),
        borders(case.n_k, device),
        max(case.n_q, default=0),
        max(case.n_k, default=0),
        window_size=window,
        enable_gqa=True,
        **options,
    )


def visible_keys(n_q: int, n_k: int, window: tuple[int, int]) -> Tensor:
    left, right = window
    row = torch.arange(n_q)[:, None] - n_q
    key = torch.arange(n_k) - n_k
    ahead = key - row
    no_limit = torch.ones(n_q, n_k, dtype=torch.bool)
    return (no_limit if right < 0 else ahead <= right) & (no_limit if left < 0 else -ahead <= left)


def one_by_one(case: Case, window: tuple[int, int], attend: Any) -> Tensor:
    """Run `attend(q, k, v, visible)` over [H, n, D] of each sequence, blind rows left out."""
    shared = case.q.shape[1] // case.k.shape[1]
    outs = []
    for q, k, v in zip(
        case.q.split(case.n_q), case.k.split(case.n_k), case.v.split(case.n_k), strict=True
    ):
        visible = visible_keys(len(q), len(k), window).to(q.device)
        sighted = visible.any(dim=1)
        out = torch.zeros_like(q)
        if sighted.any():
            keys, values = (x.repeat_interleave(shared, dim=1).transpose(0, 1) for x in (k, v))
            found = attend(q[sighted].transpose(0, 1), keys, values, visible[sighted])
            out = out.index_put((sighted,), found.transpose(0, 1))
        outs.append(out)
    return torch.cat(outs)


def by_hand(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ v


def by_torch(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]


def lse_by_hand(case: Case, window: tuple[int, int]) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        lse = scores.masked_fill(~visible, -math.inf).logsumexp(dim=-1)
        return lse.unsqueeze(-1).expand(-1, -1, q.shape[-1])

    return one_by_one(case, window, attend)[:, :, 0].t()


def blind_rows(case: Case, window: tuple[int, int]) -> Tensor:
    lengths = zip(case.n_q, case.n_k, strict=True)
    return torch.cat([~visible_keys(a, b, window).any(dim=1) for a, b in lengths])


def gradients(out: Tensor, case: Case, upstream: Tensor) -> list[Tensor]:
    """Gradients of q, k and v; zeros where the reference never touched an operand."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in case[:3]]
    found = torch.autograd.grad(out, case[:3], upstream.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(case[:3], found, strict=True)]


def in_float64(case: Case) -> Case:
    return Case(*(x.detach().double().requires_grad_() for x in case[:3]), case.n_q, case.n_k)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("batch", [name for name in BATCHES if name != "empty"])
def test_each_sequence_gets_what_it_would_get_alone(
    batch: str, window: tuple[int, int], heads: tuple[int, int], seed: int
) -> None:
    case = make_case(BATCHES[batch], heads, seed)
    out, expected = packed(case, window), one_by_one(case, window, by_hand)
    assert_close(out, expected)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, case[:3], upstream)
    for gradient, wanted in zip(got, gradients(expected, case, upstream), strict=True):
        assert_close(gradient, wanted)


def assert_no_worse_than_torch(case: Case, window: tuple[int, int], **options: Any) -> None:
    """Bound: twice the errors of torch's SDPA over single sequences, plus a few roundings."""
    wide = in_float64(case)
    exact = one_by_one(wide, window, by_hand)
    ours, theirs = packed(case, window, **options), one_by_one(case, window, by_torch)
    upstream = torch.randn_like(ours)
    compared = [
        (ours, theirs, exact),
        *zip(
            gradients(ours, case, upstream),
            gradients(theirs, case, upstream),
            gradients(exact, wide, upstream),
            strict=True,
        ),
    ]
    assert ours.dtype == case.q.dtype
    for mine, torchs, right in compared:
        floor = 4 * torch.finfo(mine.dtype).eps * right.abs().max()
        error = (mine.double() - right).abs().max()
        assert error <= 2 * (torchs.double() - right).abs().max() + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 1)], ids=str)
@pytest.mark.parametrize("batch", ["square", "cross", "several blocks"])
def test_errors_are_at_most_twice_those_of_torch_alone(
    batch: str, window: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    try:
        assert_no_worse_than_torch(make_case(BATCHES[batch], (4, 2), seed, dtype), window)
    except AssertionError:  # the worst element of thousands, by luck: once in 6,000 comparisons
        assert_no_worse_than_torch(make_case(BATCHES[batch], (4, 2), seed + 1, dtype), window)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 1)], ids=str)
@pytest.mark.parametrize("longest", [3, 8, 20])
def test_of_many_tiny_ones_errors_add_up(longest: int, window: tuple[int, int], seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, longest, 64).tolist()
    case = make_case([(n, n) for n in lengths], (4, 2), seed, torch.float32)
    wide = in_float64(case)
    ways = (
        packed(case, window),
        one_by_one(case, window, by_torch),
        one_by_one(wide, window, by_hand),
    )
    upstream = torch.randn_like(ways[0])
    found = [
        (out.detach(), *gradients(out, operands, upstream))
        for out, operands in zip(ways, (case, case, wide), strict=True)
    ]
    # The worst elements of both may differ by luck.
    for mine, torchs, right in zip(*found, strict=True):
        assert (mine - right).norm() <= 2 * (torchs - right).norm()


def test_padding_costs_the_gradient_of_a_single_token_no_precision(seed: int) -> None:
    lengths = [37, *[1] * 8, 5]
    case = make_case([(n, n) for n in lengths], (2, 2), seed, torch.float32)
    # A power of two, as head_dim ** -0.5 here, scales scores without rounding.
    out = packed(case, (-1, -1), scale=0.3)
    upstream = torch.randn_like(out)
    (to_values,) = torch.autograd.grad(out, case.v, upstream)
    torch.testing.assert_close(to_values[37:45], upstream[37:45], rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_rows_without_keys_give_zero_and_minus_infinity(window: tuple[int, int], seed: int) -> None:
    case = make_case([(7, 3), (4, 0), (2, 2), (0, 5)], (2, 2), seed)
    out, lse = packed(case, window, return_lse=True)
    blind = blind_rows(case, window)
    assert blind.sum() == (4 if window[1] < 0 else max(0, 4 - window[1]) + 4)
    assert (out[blind] == 0).all()
    assert (lse[:, blind] == -math.inf).all()
    assert lse[:, ~blind].isfinite().all()


def test_an_empty_batch_and_one_without_keys_have_zero_gradients(seed: int) -> None:
    for lengths in ([], [(0, 0)], [(3, 0)], [(0, 3)]):
        case = make_case(lengths, (2, 1), seed)
        out, lse = packed(case, (-1, 0), return_lse=True)
        assert out.shape == case.q.shape
        assert lse.shape == (2, len(case.q))
        found = torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), case[:3])
        assert all((g == 0).all() for g in found)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=str)
def test_nothing_leaks_from_one_sequence_into_another(window: tuple[int, int], seed: int) -> None:
    lengths = [(6, 6), (7, 7), (5, 5), (150, 150)]
    case = make_case(lengths, (2, 2), seed, torch.float32)
    clean = packed(case, window)
    spoilt = Case(*(x.detach().clone() for x in case[:3]), case.n_q, case.n_k)
    for x in spoilt[:3]:
        x[6:13] = math.nan
        x.requires_grad_()
    out = packed(spoilt, window)
    others = torch.ones(len(out), dtype=torch.bool)
    others[6:13] = False
    torch.testing.assert_close(out[others], clean[others])
    got = torch.autograd.grad(out[others].sum(), spoilt[:3])
    wanted = torch.autograd.grad(clean[others].sum(), case[:3])
    for gradient, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient[others], expected[others])


def test_operands_may_be_views_of_a_fused_projection(seed: int) -> None:
    case = make_case([(5, 5), (8, 8)], (2, 2), seed)
    views = Case(*torch.stack(case[:3], dim=1).detach().unbind(1), case.n_q, case.n_k)
    assert_close(packed(views, (-1, 0)), packed(case, (-1, 0)))


@pytest.mark.parametrize("scale", [3.0, 0.0, -0.3])
def test_a_scale_of_ones_own_replaces_the_default(scale: float, seed: int) -> None:
    case = make_case([(5, 5), (8, 3)], (2, 2), seed)
    scaled = Case(case.q * scale * math.sqrt(HEAD_DIM), *case[1:])
    assert_close(packed(case, (-1, 0), scale=scale), one_by_one(scaled, (-1, 0), by_hand))


def test_int64_borders_in_a_rewritten_array_and_longest_lengths_with_slack(seed: int) -> None:
    case = make_case([(5, 5), (2, 2)], (2, 2), seed)
    edges = np.array([0, 3, 7])
    cu = torch.from_numpy(edges)
    varlen_attention(*case[:3], cu, cu, 100, 100, window_size=(-1, 0))
    edges[:] = borders(case.n_q)
    out = varlen_attention(*case[:3], cu, cu, 100, 100, window_size=(-1, 0))
    assert_close(out, packed(case, (-1, 0)))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("batch", ["square", "cross"])
def test_log_sum_exp_and_its_gradient_agree(batch: str, window: tuple[int, int], seed: int) -> None:
    case = make_case(BATCHES[batch], (4, 2), seed)
    _, lse = packed(case, window, return_lse=True)
    sighted = ~blind_rows(case, window)
    expected = lse_by_hand(case, window)[:, sighted]
    assert_close(lse[:, sighted], expected)
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(lse[:, sighted], case[:2], upstream)
    for gradient, right in zip(got, torch.autograd.grad(expected, case[:2], upstream), strict=True):
        assert_close(gradient, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_log_sum_exp_is_float32_whatever_the_operands(dtype: torch.dtype, seed: int) -> None:
    case = make_case([(20, 20), (3, 9)], (2, 1), seed, dtype)
    _, lse = packed(case, (-1, 0), return_lse=True)
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 23))
    exact = lse_by_hand(in_float64(case), (-1, 0))
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


def test_calls_and_masks_never_span_the_row(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    calls: list[tuple[int, int]] = []
    real = F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        mask = options.get("attn_mask")
        calls.append((q.shape[0] * q.shape[2] * k.shape[2], 0 if mask is None else mask.numel()))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(planning, "MASK_ELEMENTS", 2**15)
    planning.make_plan.cache_clear()
    lengths = [(300, 300)] * 8 + [(10, 10)] * 100
    case = make_case(lengths, (1, 1), seed, torch.float32)
    for window in ((-1, 0), (20, 0), (-1, 3)):
        calls.clear()
        packed(case, window)
        pairs, elements = zip(*calls, strict=True)
        assert sum(pairs) <= 2 * sum(a * b for a, b in lengths)
        assert max(elements) <= max(2**15, planning.MIN_BLOCK_ROWS * 300)
    planning.make_plan.cache_clear()


def test_the_backend_on_the_cpu_is_sdpa_and_native_says_why_not(seed: int) -> None:
    case = make_case([(4, 4)], (2, 2), seed, torch.bfloat16)
    assert attention_backend(case.q, case.k, 4, 4) == "sdpa"
    assert attention_backend(case.q, case.k, 4, 4, backend="sdpa") == "sdpa"
    with pytest.raises(ValueError, match=r"'native' cannot run here: it needs a CUDA device.*auto"):
        packed(case, (-1, 0), backend="native")


def on_gpu(**facts: Any) -> Any:
    """Attributes of an operand read by `attention_backend`, as if on a GPU."""
    shape = facts.pop("shape", (8, 2, 64))
    return SimpleNamespace(
        is_cuda=True,
        device="cuda:0",
        dtype=facts.pop("dtype", torch.bfloat16),
        shape=shape,
        numel=lambda: math.prod(shape),
    )


TORCH_2_10 = frozenset({"is_causal", "return_aux"})
TORCH_2_11 = frozenset({"return_aux", "scale", "window_size"})
TORCH_2_12 = TORCH_2_11 | {"enable_gqa"}


@pytest.mark.parametrize(
    ("parameters", "facts", "options", "obstacle"),
    [
        (TORCH_2_12, {}, {}, None),
        (TORCH_2_12, {}, {"window_size": (3, 4)}, None),
        (TORCH_2_12, {}, {"scale": 2.0}, None),
        (TORCH_2_10, {}, {"window_size": (-1, 0), "scale": 64**-0.5}, None),
        (None, {}, {}, "2.10 has"),
        (TORCH_2_10, {}, {"window_size": (3, 0)}, "windows need torch 2.11"),
        (TORCH_2_10, {}, {"scale": 2.0}, "scale of one's own needs torch 2.11"),
        (TORCH_2_12, {"dtype": torch.float32}, {}, "float16 or bfloat16"),
        (TORCH_2_12, {"capability": (7, 5)}, {}, "capability 8.0, got 7.5"),
        (TORCH_2_12, {"shape": (8, 2, 60)}, {}, "multiple of 8"),
        (TORCH_2_12, {"shape": (8, 2, 264)}, {}, "up to 256"),
        (TORCH_2_12, {"shape": (8, 2, 256)}, {}, None),
        (TORCH_2_12, {"shape": (8, 2, 256), "capability": (8, 9)}, {}, "up to 192"),
        (TORCH_2_12, {"shape": (0, 2, 64)}, {}, "at least one"),
        (TORCH_2_12, {}, {"window_size": (-1, 8), "longest": (9, 8)}, "not what it computes"),
        (TORCH_2_12, {}, {"window_size": (3, -1), "longest": (9, 8)}, "not what it computes"),
        (TORCH_2_12, {}, {"window_size": (3, 0), "longest": (9, 8)}, None),
    ],
)
def test_native_is_taken_only_where_it_can_run_and_is_right(
    monkeypatch: pytest.MonkeyPatch,
    parameters: frozenset[str] | None,
    facts: dict[str, Any],
    options: dict[str, Any],
    obstacle: str | None,
) -> None:
    capability = facts.pop("capability", (9, 0)) if facts else (9, 0)
    longest = options.get("longest", (8, 8))
    options = {name: value for name, value in options.items() if name != "longest"}
    entry = None if parameters is None else native.NativeEntry(print, None, parameters)
    monkeypatch.setattr(native, "native_entry", lambda: entry)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = on_gpu(**facts)
    assert attention_backend(q, q, *longest, **options) == ("sdpa" if obstacle else "native")
    if obstacle:
        with pytest.raises(ValueError, match=obstacle):
            attention_backend(q, q, *longest, backend="native", **options)


@pytest.mark.parametrize("parameters", [TORCH_2_10, TORCH_2_11, TORCH_2_12], ids=len)
def test_the_native_function_is_called_as_its_version_wants(
    monkeypatch: pytest.MonkeyPatch, parameters: frozenset[str], seed: int
) -> None:
    def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        assert options.keys() <= parameters
        assert options.pop("return_aux") == "lse, please"
        if not options.pop("enable_gqa", False):
            assert q.shape[1] == k.shape[1]
        if "is_causal" in options:
            options["window_size"] = (-1, 0) if options.pop("is_causal") else (-1, -1)
        assert [x.dtype for x in rest[:2]] == [torch.int32] * 2
        out, lse = varlen_attention(
            q, k, v, *rest, enable_gqa=True, return_lse=True, backend="sdpa", **options
        )
        return out, lse.masked_fill(lse == -math.inf, math.inf)

    entry = native.NativeEntry(varlen_attn, "lse, please", parameters)
    monkeypatch.setattr(native, "native_entry", lambda: entry)
    monkeypatch.setattr(dispatch, "native_obstacle", lambda *args: None)
    case = make_case([(5, 5), (7, 3)], (4, 2), seed)
    for window in ((-1, -1), (-1, 0)):
        out, lse = packed(case, window, return_lse=True)
        wanted, right = packed(case, window, return_lse=True, backend="sdpa")
        assert_close(out, wanted)
        assert_close(lse, right)
        finite = right.isfinite()
        for got, expected in zip(
            torch.autograd.grad(out.sum() + lse[finite].sum(), case[:3]),
            torch.autograd.grad(wanted.sum() + right[finite].sum(), case[:3]),
            strict=True,
        ):
            assert_close(got, expected)


def native_runs(window: tuple[int, int], longest: tuple[int, int]) -> bool:
    """Return True if torch's native kernel computes bfloat16 heads of 64 correctly here."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has none")
    left, right = window
    # The kernel computes wrong values for rows far above their first key.
    astray = longest[0] > longest[1] and (right >= longest[1] or (left >= 0 and right < 0))
    return (
        torch.cuda.get_device_capability() >= (8, 0)
        and (
            window in ((-1, -1), (-1, 0))
            or "window_size" in signature(varlen.varlen_attn).parameters
        )
        and not astray
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("batch", ["square", "cross", "several blocks"])
def test_on_a_gpu_both_backends_give_what_each_sequence_would_get_alone(
    batch: str, window: tuple[int, int], heads: tuple[int, int], backend: Any, seed: int
) -> None:
    case = make_case(BATCHES[batch], heads, seed, torch.bfloat16, "cuda", head_dim=64)
    longest = max(case.n_q), max(case.n_k)
    if backend == "native":
        if not native_runs(window, longest):
            with pytest.raises(ValueError, match="backend 'native' cannot run here"):
                packed(case, window, backend=backend)
            return
        assert attention_backend(case.q, case.k, *longest, window_size=window) == "native"
    assert_no_worse_than_torch(case, window, backend=backend)
    _, lse = packed(case, window, backend=backend, return_lse=True)
    exact = lse_by_hand(in_float64(case), window).to("cuda")
    blind = blind_rows(case, window).to("cuda")
    assert (lse[:, blind] == -math.inf).all()
    torch.testing.assert_close(lse[:, ~blind].double(), exact[:, ~blind], rtol=1e-4, atol=1e-4)
