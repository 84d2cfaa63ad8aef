"""Short sequences as one jagged tensor: when that is chosen, and that it changes only the time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_attention import (
    assert_no_worse_than_torch,
    borders,
    in_float64,
    lse_by_hand,
    make_case,
    packed,
)

from trainer_adapter.attention import dispatch
from trainer_adapter.attention.jagged import is_less_work_jagged, may_be_jagged
from trainer_adapter.attention.plan import make_plan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WORK = 16 * 128


def as_bytes(lengths: Any) -> bytes:
    return np.asarray(lengths, np.int64).tobytes()


def is_better(lengths: Any) -> bool:
    plan = make_plan(as_bytes(lengths), as_bytes(lengths), (-1, 0), WORK, "cuda")
    return is_less_work_jagged(plan)


def test_short_sequences_are_less_work_jagged_and_long_ones_are_not() -> None:
    long = np.random.default_rng(2).lognormal(7.2, 0.8, 64).astype(np.int64)
    short = np.random.default_rng(3).integers(16, 129, 2048)
    assert is_better(short)
    assert is_better([*short, 4000])
    assert not is_better(long)
    assert not is_better([4000] * 16)
    assert not is_better([4000, 3000, 7000, *short[:20]])
    assert not is_better([])
    # Of one length they lie in a bucket as they are.
    assert not is_better([64] * 512)


def test_the_cpu_has_no_kernel_for_jagged_tensors() -> None:
    case = make_case([(5, 5), (3, 3)], (2, 2), 0, torch.float32)
    lengths = as_bytes(case.n_q)
    assert not may_be_jagged(case.q, case.k, lengths, lengths, (-1, 0))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call that goes as a jagged tensor, which every one is asked to that may."""
    found: list[int] = []
    attend = dispatch.attend_jagged

    def noted(*operands: Any, **options: Any) -> Any:
        found.append(len(operands[0]))
        return attend(*operands, **options)

    monkeypatch.setattr(dispatch, "attend_jagged", noted)
    monkeypatch.setattr(dispatch, "is_less_work_jagged", lambda plan: True)
    return found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_jagged_tensor_gives_each_sequence_what_it_would_get_alone(
    dtype: torch.dtype, window: tuple[int, int], heads: tuple[int, int], seed: int, taken: list[int]
) -> None:
    lengths = [*np.random.default_rng(seed).integers(1, 90, 40).tolist(), 0, 300, 1, 0]
    case = make_case([(n, n) for n in lengths], heads, seed, dtype, "cuda", head_dim=64)
    assert_no_worse_than_torch(case, window, backend="sdpa")
    assert taken == [sum(lengths)]


@pytest.mark.gpu
@needs_gpu
def test_a_jagged_tensor_has_the_log_sum_exp_and_its_gradient(seed: int, taken: list[int]) -> None:
    case = make_case([(7, 7), (33, 33), (2, 2)], (2, 2), seed, torch.float32, "cuda", head_dim=64)
    _, lse = packed(case, (-1, 0), backend="sdpa", return_lse=True)
    wide = in_float64(case)
    exact = lse_by_hand(wide, (-1, 0))
    torch.testing.assert_close(lse.double(), exact, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(lse)
    got = torch.autograd.grad(lse, case[:2], upstream)
    right = torch.autograd.grad(exact, wide[:2], upstream.double())
    for mine, wanted in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-3, atol=1e-4)
    assert taken


@pytest.mark.gpu
@needs_gpu
def test_what_has_no_kernel_goes_by_buckets(seed: int, taken: list[int]) -> None:
    def attends(dtype: torch.dtype, head_dim: int, pairs: Any, window: tuple[int, int]) -> None:
        case = make_case(pairs, (2, 2), seed, dtype, "cuda", head_dim=head_dim)
        assert packed(case, window, backend="sdpa").shape == case.q.shape

    same = [(5, 5), (9, 9)]
    attends(torch.float64, 64, same, (-1, 0))
    attends(torch.float32, 36, same, (-1, 0))
    attends(torch.float32, 64, same, (3, 0))
    attends(torch.float32, 64, [(5, 7), (9, 9)], (-1, 0))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attends(torch.float32, 64, same, (-1, 0))
    assert taken == []


@pytest.mark.gpu
@needs_gpu
def test_borders_that_inference_has_made_serve_training_too(seed: int, taken: list[int]) -> None:
    case = make_case([(5, 5), (11, 11)], (2, 2), seed, torch.bfloat16, "cuda", head_dim=64)
    with torch.inference_mode():
        packed(case, (-1, 0), backend="sdpa")
    out = packed(case, (-1, 0), backend="sdpa")
    torch.autograd.grad(out, case[:3], torch.ones_like(out))
    assert len(taken) == 2
    assert borders(case.n_q).tolist() == [0, 5, 16]
