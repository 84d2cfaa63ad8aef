"""The policy's training side: a small decoder-only transformer over packed sequences, in torch.

It reads a packed batch as the trainer's handler gives it, with attention through
`varlen_attention`, so that sequences of any lengths share one row of tokens and no padding is
computed. `sampler.py` runs the same weights in numpy; `PolicyConfig` fixes the flat layout.

Invariants:

- A sequence's output depends on that sequence alone, not on its neighbours in the row.
- ``export_weights`` and ``load_weights`` are inverse to each other, bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_adapter.attention.varlen import varlen_attention
from trainer_adapter.demo.sampler import NORM_EPS, PolicyConfig


class Policy(nn.Module):
    """The transformer that the demo trains from random weights."""

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for name, shape in config.parameters():
            self.weights[name] = nn.Parameter(_initial(config, name, shape, generator))

    def forward(
        self, tokens: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        """Run a packed batch up to the last norm; `logits` does the rest."""
        config, w = self.config, self.weights
        x = w["token_embedding"][tokens] + w["position_embedding"][position_ids]
        for i in range(config.layers):
            prefix = f"block{i}_"
            h = self._norm(x, w[prefix + "attn_norm"])
            q, k, v = (h @ w[prefix + "qkv"]).view(-1, 3, config.heads, config.head_dim).unbind(1)
            mixed = varlen_attention(
                q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0)
            )
            x = x + mixed.reshape(-1, config.width) @ w[prefix + "attn_out"]
            h = self._norm(x, w[prefix + "mlp_norm"])
            x = x + functional.relu(h @ w[prefix + "mlp_in"]) @ w[prefix + "mlp_out"]
        return self._norm(x, w["final_norm"])

    def logits(self, states: Tensor) -> Tensor:
        """Turn states into logits."""
        head: Tensor = self.weights["head"]
        return states @ head

    def export_weights(self, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Write all weights to one flat vector."""
        if out is None:
            out = np.empty(self.config.num_parameters, np.float32)
        self._check(out)
        with torch.no_grad():
            torch.cat([p.reshape(-1) for p in self._ordered()], out=torch.from_numpy(out))
        return out

    def load_weights(self, flat: npt.NDArray[np.float32]) -> None:
        """Read all weights from one flat vector."""
        self._check(flat)
        # A copy, since torch warns about arrays that it may not write to, such as views of the bus.
        source = torch.from_numpy(flat.copy())
        start = 0
        with torch.no_grad():
            for p in self._ordered():
                p.copy_(source[start : start + p.numel()].view_as(p))
                start += p.numel()

    def _check(self, flat: npt.NDArray[np.float32]) -> None:
        """Raise ValueError unless `flat` has this policy's length and dtype."""
        expected = (self.config.num_parameters,)
        if flat.shape != expected or flat.dtype != np.float32:
            raise ValueError(
                f"flat weights are {flat.dtype} {flat.shape}, this policy needs float32 "
                f"{expected}; give trainer and workers the same PolicyConfig"
            )

    def _ordered(self) -> list[Tensor]:
        """Return the weights in the order of the flat vector."""
        return [self.weights[name] for name, _ in self.config.parameters()]

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMS norm over the last axis."""
        return functional.rms_norm(x, (self.config.width,), gain, NORM_EPS)


def _initial(
    config: PolicyConfig, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Return random weights: norms 1, head 0 (a uniform policy explores best), others normal."""
    if name.endswith("norm"):
        return torch.ones(shape)
    if name == "head":
        return torch.zeros(shape)
    std = 1.0 if name.endswith("embedding") else math.sqrt(1.0 / shape[0])
    if name.endswith(("attn_out", "mlp_out")):
        std /= math.sqrt(2 * config.layers)
    return torch.randn(shape, generator=generator) * std
