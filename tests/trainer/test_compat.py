"""Padding and unpadding: values, borders, gradients, and a single signature."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_adapter.attention.native import native_entry
from trainer_adapter.compat import HuggingFaceStorageReader, pad_input, unpad_input


def random_mask(seed: int, batch: int = 6, seqlen: int = 9) -> Tensor:
    mask = torch.from_numpy(np.random.default_rng(seed).random((batch, seqlen)) < 0.6)
    mask[0] = False
    mask[1] = True
    return mask


@pytest.mark.parametrize("tail", [(), (3,), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
def test_marked_tokens_are_packed(dtype: torch.dtype, tail: tuple[int, ...], seed: int) -> None:
    mask = random_mask(seed)
    hidden = torch.randn(*mask.shape, *tail)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, mask.to(dtype))
    assert torch.equal(packed, torch.cat([h[m] for h, m in zip(hidden, mask, strict=True)]))
    assert (indices.dtype, cu_seqlens.dtype, seqused.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )
    assert cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    assert (type(max_seqlen), max_seqlen) == (int, mask.shape[1])
    assert seqused.tolist() == mask.sum(1).tolist()


def test_unused_places_are_packed_but_not_counted(seed: int) -> None:
    mask = random_mask(seed)
    unused = random_mask(seed + 1) & ~mask
    hidden = torch.randn(*mask.shape, 2)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, mask, unused)
    both = mask | unused
    assert torch.equal(packed, hidden[both])
    assert torch.equal(indices, both.flatten().nonzero().flatten())
    assert cu_seqlens.diff().tolist() == both.sum(1).tolist()
    assert max_seqlen == int(both.sum(1).max())
    assert seqused.tolist() == mask.sum(1).tolist()


def test_padding_undoes_unpadding_and_filler_gets_zeros_and_no_gradient(seed: int) -> None:
    mask = random_mask(seed)
    hidden = torch.randn(*mask.shape, 3, dtype=torch.float64, requires_grad=True)
    packed, indices, *_ = unpad_input(hidden, mask)
    upstream = torch.randn(*mask.shape, 3, dtype=torch.float64)
    restored = pad_input(packed, indices, *mask.shape)
    assert torch.equal(restored, hidden * mask[..., None])
    (gradient,) = torch.autograd.grad(restored, hidden, upstream)
    assert torch.equal(gradient, upstream * mask[..., None])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)], ids=str)
def test_batches_without_tokens_come_back_as_zeros(shape: tuple[int, int]) -> None:
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(
        torch.ones(*shape, 2), torch.zeros(shape, dtype=torch.bool)
    )
    assert packed.shape == (0, 2)
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert (max_seqlen, seqused.tolist()) == (0, [0] * shape[0])
    assert torch.equal(pad_input(packed, indices, *shape), torch.zeros(*shape, 2))


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
HAS_READER = (2, 7)


@pytest.mark.skipif(TORCH < HAS_READER, reason="this torch has no such reader")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_safetensors_checkpoint_loads_under_each_name_of_torchs_reader(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    import torch.distributed.checkpoint as dcp

    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    safetensors.save_file(weights, tmp_path / "model-00001-of-00001.safetensors")
    index = dict.fromkeys(weights, "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded = {name: torch.zeros_like(value) for name, value in weights.items()}
    reader = HuggingFaceStorageReader(str(tmp_path))
    dcp.load(loaded, storage_reader=reader, **({"no_dist": True} if TORCH >= (2, 8) else {}))
    for name, value in weights.items():
        assert torch.equal(loaded[name], value)


@pytest.mark.skipif(TORCH < (2, 9), reason="this torch takes a token, or has no such reader")
def test_a_token_is_refused_where_torch_takes_none(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"takes no token; for the hub's token set HF_TOKEN"):
        HuggingFaceStorageReader(str(tmp_path), token="hf_x")


def test_a_torch_without_the_reader_says_which_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_adapter import compat

    if TORCH >= HAS_READER:
        # Equals torch 2.6, without any of these places.
        monkeypatch.setattr(compat, "_READERS", [("torch.distributed.checkpoint.no_such", "X")])
    with pytest.raises(ImportError, match=r"expected torch 2.7 or later, got"):
        HuggingFaceStorageReader("anywhere")


def test_a_reader_for_want_of_a_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_adapter import compat

    # Equals torch 2.7 without huggingface_hub, imported by a new reader.
    module = ModuleType("hf_storage")

    def reader(path: str) -> None:
        raise ModuleNotFoundError("No module named 'huggingface_hub'", name="huggingface_hub")

    module.__dict__["reader"] = reader
    monkeypatch.setitem(sys.modules, "hf_storage", module)
    monkeypatch.setattr(compat, "_READERS", [("hf_storage", "reader")])
    with pytest.raises(ImportError, match=r"which needs huggingface_hub; install that, or load"):
        HuggingFaceStorageReader("anywhere")


def test_what_torch_offers_here_is_recognised_by_its_signature() -> None:
    entry = native_entry()
    # Varlen attention came with 2.10.
    assert (entry is not None) == (TORCH >= (2, 10))
    if entry is None:
        return
    assert "return_aux" in entry.parameters
    assert entry.parameters & {"is_causal", "window_size"}
