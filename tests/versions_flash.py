"""Padding against the installed flash-attn package itself.

Outside of the suite: ``make versions`` runs it in environments with the package's Python files.
Without their CUDA extension, modules are loaded beside it, and no kernel runs.
"""

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_adapter.compat import pad_input, unpad_input

FLASH = tuple(int(part) for part in version("flash-attn").split(".")[:2])
#: From here on with a mask of unused places, and a fifth value.
COUNTS_USED = FLASH >= (2, 7)
MASKS = ["bool", "int64", "uint8"]


def _padding() -> Any:
    """`flash_attn.bert_padding` by its path, since the package above it needs the extension."""
    package = importlib.util.find_spec("flash_attn")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "bert_padding.py")
    spec = importlib.util.spec_from_file_location("bert_padding", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


theirs = _padding()


def masks(seed: int, kind: str, unused: bool) -> list[Tensor]:
    """Return a mask of tokens, and on demand a mask of unused places, perhaps in every row."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.random((6, 9)) < 0.6)
    tokens[0] = False
    tokens[1] = True
    # Integers would add up if both exist.
    free = torch.from_numpy(rng.random((6, 9)) < 0.3) & ~tokens
    dtype = getattr(torch, kind)
    return [tokens.to(dtype), free.to(dtype)][: 1 + unused]


@pytest.mark.parametrize("unused", [False, True] if COUNTS_USED else [False])
@pytest.mark.parametrize("tail", [(3,), (2, 4)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_unpadding_returns_what_flash_attn_returns(
    kind: str, tail: tuple[int, ...], unused: bool, seed: int
) -> None:
    given = masks(seed, kind, unused)
    hidden = torch.randn(6, 9, *tail)
    right = theirs.unpad_input(hidden, *given)
    got = unpad_input(hidden, *given)
    assert len(right) == (5 if COUNTS_USED else 4)
    for mine, wanted in zip(got, right, strict=COUNTS_USED):
        assert type(mine) is type(wanted)
        if isinstance(wanted, Tensor):
            assert mine.dtype == wanted.dtype
            assert torch.equal(mine, wanted)
        else:
            assert mine == wanted


@pytest.mark.parametrize("tail", [(3,), (2, 4)], ids=str)
def test_padding_returns_what_flash_attn_returns_for_either_ones_indices(
    tail: tuple[int, ...], seed: int
) -> None:
    hidden = torch.randn(6, 9, *tail)
    (mask,) = masks(seed, "bool", unused=False)
    for unpad in (unpad_input, theirs.unpad_input):
        packed, indices, *_ = unpad(hidden, mask)
        wanted = theirs.pad_input(packed, indices, 6, 9)
        assert torch.equal(pad_input(packed, indices, 6, 9), wanted)


@pytest.mark.parametrize("unused", [False, True] if COUNTS_USED else [False])
@pytest.mark.parametrize("tail", [(3,), (2, 4)], ids=str)
def test_gradients_through_both_are_those_of_flash_attn(
    tail: tuple[int, ...], unused: bool, seed: int
) -> None:
    given = masks(seed, "bool", unused)
    hidden = torch.randn(6, 9, *tail, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(6, 9, *tail, dtype=torch.float64)
    gradients = []
    for unpad, pad in ((unpad_input, pad_input), (theirs.unpad_input, theirs.pad_input)):
        packed, indices, *_ = unpad(hidden, *given)
        # Squared, to make the output differ from the input.
        padded = pad(packed.square(), indices, 6, 9)
        gradients.append(torch.autograd.grad(padded, [packed, hidden], upstream))
    for mine, wanted in zip(*gradients, strict=True):
        assert torch.equal(mine, wanted)
