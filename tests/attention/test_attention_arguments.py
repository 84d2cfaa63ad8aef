"""Arguments of attention that do not fit are refused by their names."""

from typing import Any

import pytest
import torch

from trainer_adapter.attention import varlen_attention


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
        ({"q": torch.zeros(1, 5, 2, 4)}, ValueError, "q: expected a packed"),
        ({"q": torch.zeros(5, 2, 4).int()}, TypeError, "q: expected one floating dtype"),
        ({"k": torch.zeros(5, 2, 4).double()}, TypeError, "k: expected one floating dtype"),
        ({"v": torch.zeros(5, 2, 4, device="meta")}, ValueError, "v: expected it on cpu"),
        ({"v": torch.zeros(4, 2, 4)}, ValueError, "k and v: expected one shape"),
        ({"q": torch.zeros(5, 2, 8)}, ValueError, "k: expected head dimension 8"),
        ({"q": torch.zeros(5, 3, 4)}, ValueError, "multiple of k's heads"),
        ({"q": torch.zeros(5, 4, 4)}, ValueError, "pass enable_gqa=True"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size: expected two integers"),
        ({"window_size": (0.5, 0)}, TypeError, "window_size: expected two integers"),
        ({"scale": "0.5"}, TypeError, "scale: expected a number, got str"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: expected numbers from -1"),
        ({"window_size": (-1, 2**31)}, ValueError, "window_size: expected numbers from -1"),
        ({"max_k": 2}, ValueError, "cu_seqlens_k: expected at most 2 tokens.*max_k.*got 3"),
        ({"cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q: expected an int32 or int64.*list"),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q: expected an int32.*float32"),
        ({"cu_seqlens_q": torch.zeros(0).int()}, ValueError, "cu_seqlens_q: expected shape"),
        ({"cu_seqlens_q": torch.tensor([0, 5])}, ValueError, "as many sequences in both"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 4])}, ValueError, "rise from 0 to 5.*0 to 4"),
        ({"cu_seqlens_q": torch.tensor([1, 3, 5])}, ValueError, "rise from 0 to 5"),
        ({"cu_seqlens_k": torch.tensor([0, 6, 5])}, ValueError, "smallest step -1"),
    ],
)
def test_misfits_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        **{name: torch.zeros(5, 2, 4) for name in "qkv"},
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 5], dtype=torch.int32),
        "max_q": 3,
        "max_k": 3,
        **change,
    }
    with pytest.raises(error, match=message):
        varlen_attention(**arguments)
