"""A stand-in of an engine's model: what a rank of several has, filled as engines' loaders fill it.

Fused q, k, v by head group, fused gate and up, rows and columns narrowed by rank, a padded
vocabulary, experts in one stack. `load_weights` takes a checkpoint's tensors in any order.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    layers: int = 2
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head: int = 32
    inner: int = 256
    vocab: int = 130
    experts: int = 0
    dtype: torch.dtype = torch.bfloat16
    tied: bool = False


def checkpoint(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a checkpoint, as Hugging Face names them."""
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (q, shape.hidden),
            f"{at}.self_attn.k_proj.weight": (kv, shape.hidden),
            f"{at}.self_attn.v_proj.weight": (kv, shape.hidden),
            f"{at}.self_attn.o_proj.weight": (shape.hidden, q),
            f"{at}.input_layernorm.weight": (shape.hidden,),
            f"{at}.post_attention_layernorm.weight": (shape.hidden,),
        }
        mlps = [f"{at}.mlp.experts.{n}" for n in range(shape.experts)] or [f"{at}.mlp"]
        for mlp in mlps:
            found |= {
                f"{mlp}.gate_proj.weight": (shape.inner, shape.hidden),
                f"{mlp}.up_proj.weight": (shape.inner, shape.hidden),
                f"{mlp}.down_proj.weight": (shape.hidden, shape.inner),
            }
        if shape.experts:
            found[f"{at}.mlp.gate.weight"] = (shape.experts, shape.hidden)
    found["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocab, shape.hidden)
    return found


class FusedLayer(torch.nn.Module):
    """The tensors of one decoder layer that a rank has."""

    def __init__(self, shape: Shape, ranks: int, device: torch.device | str) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head // ranks, shape.kv_heads * shape.head // ranks
        inner, experts = shape.inner // ranks, (shape.experts,) if shape.experts else ()

        def empty(*sizes: int) -> torch.nn.Parameter:
            made = torch.zeros(sizes, dtype=shape.dtype, device=device)
            return torch.nn.Parameter(made, requires_grad=False)

        self.qkv = empty(q + 2 * kv, shape.hidden)
        self.o = empty(shape.hidden, q)
        self.input_norm, self.post_norm = empty(shape.hidden), empty(shape.hidden)
        self.gate_up = empty(*experts, 2 * inner, shape.hidden)
        self.down = empty(*experts, shape.hidden, inner)
        self.router = empty(shape.experts, shape.hidden) if shape.experts else None


class FusedModel(torch.nn.Module):
    #: Rows to multiples of which a rank's part of a vocabulary is padded.
    PADDED = 64

    def __init__(
        self, shape: Shape, rank: int = 0, ranks: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.shape, self.rank, self.ranks = shape, rank, ranks
        self.layers = torch.nn.ModuleList(
            FusedLayer(shape, ranks, device) for _ in range(shape.layers)
        )
        rows = -(-shape.vocab // (self.PADDED * ranks)) * self.PADDED
        sizes = {"embed": (rows, shape.hidden), "norm": (shape.hidden,)}
        if not shape.tied:
            sizes["head"] = rows, shape.hidden
        for name, size in sizes.items():
            made = torch.zeros(size, dtype=shape.dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            parts = name.split(".")
            if parts[0] == "lm_head":
                self.fill_rows(self.head, tensor)
            elif parts[1] == "embed_tokens":
                self.fill_rows(self.embed, tensor)
            elif parts[1] == "norm":
                self.get_parameter("norm").data.copy_(tensor)
            else:
                self.fill_layer(self.layers[int(parts[2])], parts[3:], tensor)

    def fill_rows(self, parameter: Any, tensor: torch.Tensor) -> None:
        """Take this rank's rows of a vocabulary, and pad them."""
        rows = parameter.shape[0]
        first = min(self.rank * rows, len(tensor))
        part = tensor[first : first + rows]
        parameter.data[: len(part)].copy_(part)
        parameter.data[len(part) :].fill_(0)

    def narrowed(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)

    def fill_layer(self, layer: Any, parts: list[str], tensor: torch.Tensor) -> None:
        kind = parts[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            q, kv = (
                n * self.shape.head // self.ranks for n in (self.shape.heads, self.shape.kv_heads)
            )
            start, size = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv)}[kind]
            layer.qkv.data.narrow(0, start, size).copy_(self.narrowed(tensor, 0))
        elif kind == "o_proj":
            layer.o.data.copy_(self.narrowed(tensor, 1))
        elif kind in ("gate_proj", "up_proj", "down_proj"):
            at = int(parts[2]) if self.shape.experts else slice(None)
            if kind == "down_proj":
                layer.down.data[at].copy_(self.narrowed(tensor, 1))
            else:
                inner = self.shape.inner // self.ranks
                fused = layer.gate_up.data[at]
                fused.narrow(0, inner * (kind == "up_proj"), inner).copy_(self.narrowed(tensor, 0))
        elif kind == "gate":
            layer.router.data.copy_(tensor)
        else:
            own = layer.input_norm if kind == "input_layernorm" else layer.post_norm
            own.data.copy_(tensor)
