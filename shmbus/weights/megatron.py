"""Shards of a decoder in Megatron Core's layout, in the names and shapes of its checkpoint.

A rank holds a part of the layers (pipeline), of each layer's matrices (tensor), of the experts
(expert), and with a sharded optimizer some rows of these (data). q, k and v are fused by head
group: per group the query heads, the key, the value. Gate and up are fused, one after the other.
The vocabulary is padded. Shards are views; nothing is copied or gathered.

Source: megatron/core/transformer/attention.py, mlp.py, moe/experts.py and
megatron/core/tensor_parallel/layers.py of Megatron Core 0.14; checkpoint names as in Llama, Qwen2,
Qwen3 and Qwen3-MoE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shmbus.weights.sharded_source import Shard


@dataclass(frozen=True, kw_only=True)
class MegatronLayout:
    """Sizes of a decoder, and a rank's part of it.

    Attributes
    ----------
    hidden, heads, kv_heads, head_dim, inner, vocab : int
        As in the checkpoint's configuration; `vocab` without padding.
    experts, expert_inner : int
        Mixture of experts: experts per layer, and their inner size.
    tp, tp_rank, ep, ep_rank, etp, etp_rank : int
        Sizes of tensor, expert and expert-tensor parallelism, and this rank's place in each.
    first_layer : int
        The number of this rank's first layer, by pipeline parallelism.

    Raises
    ------
    ValueError
        Heads, groups, inner sizes or experts are no multiple of the ranks that share them.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    experts: int = 0
    expert_inner: int = 0
    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    first_layer: int = 0

    def __post_init__(self) -> None:
        uneven = [
            f"{name} {getattr(self, name)} by {by} {getattr(self, by)}"
            for name, by in (
                ("kv_heads", "tp"), ("heads", "kv_heads"), ("inner", "tp"), ("experts", "ep"),
                ("expert_inner", "etp"),
            )
            if getattr(self, name) % getattr(self, by)
        ]  # fmt: skip
        if uneven:
            raise ValueError(f"layout: expected whole parts, cannot divide {', '.join(uneven)}")


class _Segment(NamedTuple):
    """Rows of a rank's parameter, and their place in the checkpoint."""

    rows: int
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


#: Layer's parameter -> the checkpoint's, for parameters equal on every rank of a tensor group.
_ALIKE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d+)?")


def megatron_shards(
    named: Iterable[tuple[str, torch.Tensor]],
    layout: MegatronLayout,
    *,
    first_row: dict[str, int] | None = None,
) -> Iterator[Shard]:
    """Yield a rank's shards.

    Parameters
    ----------
    named : iterable of (str, Tensor)
        Megatron Core's parameters by their own names, for example ``named_parameters()``.
    layout : MegatronLayout
        This rank's part of the model.
    first_row : dict, optional
        First row of each parameter held only in part by this rank.

    Yields
    ------
    Shard

    Raises
    ------
    ValueError
        A parameter is unknown, or its shape contradicts the layout.
    """
    for name, tensor in named:
        own = name.removeprefix("module.")
        segments = list(_segments(own, tensor, layout))
        at = -(first_row or {}).get(name, 0)
        for rows, of, shape, start in segments:
            first, last = max(at, 0), min(at + rows, len(tensor))
            room = max(0, min(shape[0] - start[0], rows))  # without the padding of a vocabulary
            last = min(last, at + room)
            if first < last:
                begin = (start[0] + first - at, *start[1:])
                yield Shard(of, shape, begin, tensor[first:last])
            at += rows
        if at < len(tensor):
            raise ValueError(
                f"{name!r}: expected at most {at} more rows by the layout, got {len(tensor)}"
            )


def _segments(name: str, tensor: torch.Tensor, layout: MegatronLayout) -> Iterator[_Segment]:
    hidden, width = layout.hidden, tuple(tensor.shape[1:])
    found = _LAYER.fullmatch(name)
    if found is not None:
        at = f"model.layers.{layout.first_layer + int(found[1])}"
        yield from _of_layer(at, found[2], tensor, layout)
    elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        own = "lm_head.weight" if name.startswith("output") else "model.embed_tokens.weight"
        # Padding gives every rank equal rows; this parameter holds exactly one rank's rows.
        rows = -(-layout.vocab // (VOCAB_MULTIPLE * layout.tp)) * VOCAB_MULTIPLE
        yield _Segment(rows, own, (layout.vocab, hidden), (layout.tp_rank * rows, 0))
    elif name == "decoder.final_layernorm.weight":
        yield _Segment(hidden, "model.norm.weight", (hidden, *width), (0,))
    else:
        raise ValueError(
            f"{name!r}: expected a parameter of a decoder of Megatron Core; name its shards by a "
            "function of your own, beside megatron_shards"
        )


#: Rows to multiples of which Megatron pads a vocabulary, times the tensor ranks.
VOCAB_MULTIPLE = 128


def _of_layer(
    at: str, name: str, tensor: torch.Tensor, layout: MegatronLayout
) -> Iterator[_Segment]:
    hidden, width = layout.hidden, tuple(tensor.shape[1:])
    expert = _EXPERT.fullmatch(name)
    if name in _ALIKE:
        of = f"{at}.{_ALIKE[name]}"
        rows = {"mlp.router.weight": layout.experts}.get(name, hidden)
        rows = layout.head_dim if "q_layernorm" in name or "k_layernorm" in name else rows
        yield _Segment(rows, of, (rows, *width), (0,) * (1 + len(width)))
    elif name.startswith("self_attention.linear_qkv."):
        yield from _of_qkv(f"{at}.self_attn", name.rpartition(".")[2], width, layout)
    elif name == "self_attention.linear_proj.weight":
        columns = layout.heads * layout.head_dim
        start = layout.tp_rank * (columns // layout.tp)
        yield _Segment(hidden, f"{at}.self_attn.o_proj.weight", (hidden, columns), (0, start))
    elif expert is not None:
        number = int(expert[1] or expert[3] or 0) + layout.ep_rank * (layout.experts // layout.ep)
        parts = layout.etp, layout.etp_rank
        mlp = f"{at}.mlp.experts.{number}"
        yield from _of_mlp(mlp, expert[2], "weight", layout.expert_inner, parts, hidden, width)
    elif name.startswith(("mlp.linear_fc1.", "mlp.linear_fc2.")):
        _, which, kind = name.split(".")
        parts = layout.tp, layout.tp_rank
        yield from _of_mlp(f"{at}.mlp", which, kind, layout.inner, parts, hidden, width)
    else:
        raise ValueError(
            f"{name!r} of a layer: expected a parameter of Megatron Core's attention, MLP or "
            "experts; name its shards by a function of your own, beside megatron_shards"
        )


def _of_qkv(
    at: str, kind: str, width: tuple[int, ...], layout: MegatronLayout
) -> Iterator[_Segment]:
    """Yield segments by head group: queries, key, value."""
    size, queries = layout.head_dim, layout.heads // layout.kv_heads
    groups = layout.kv_heads // layout.tp
    zeros = (0,) * len(width)
    for group in range(layout.tp_rank * groups, (layout.tp_rank + 1) * groups):
        for which, count, heads in (
            ("q_proj", queries, layout.heads),
            ("k_proj", 1, layout.kv_heads),
            ("v_proj", 1, layout.kv_heads),
        ):
            rows = count * size
            shape = heads * size, *width
            yield _Segment(rows, f"{at}.{which}.{kind}", shape, (group * rows, *zeros))


def _of_mlp(
    at: str,
    which: str,
    kind: str,
    inner: int,
    parts: tuple[int, int],
    hidden: int,
    width: tuple[int, ...],
) -> Iterator[_Segment]:
    """Yield gate, then up, in rows; down in columns."""
    ranks, rank = parts
    own = inner // ranks
    zeros = (0,) * len(width)
    if which == "linear_fc1":
        for name in ("gate_proj", "up_proj"):
            yield _Segment(own, f"{at}.{name}.{kind}", (inner, *width), (rank * own, *zeros))
    else:
        yield _Segment(hidden, f"{at}.down_proj.{kind}", (hidden, inner), (0, rank * own))
