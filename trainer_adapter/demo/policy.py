"""The policy's training side, in torch: a small decoder-only transformer, and its GRPO step.

The policy reads a packed batch of the trainer's handler, with attention through `varlen_attention`:
sequences of any lengths share one row of tokens and no padding is computed. `sampler.py` runs the
same weights in numpy; `PolicyConfig` fixes the flat layout.

Invariants:

- A sequence's output depends on its own tokens alone, not on its neighbours in the row.
- The ratio is taken against the logprobs of the tokens under their sampling policy version, so
  batches a few versions old are corrected and then clipped.
- Every completion token weighs the same, for any length of its sequence.
- A batch with a non-finite loss or gradient changes no weight.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_adapter.attention.varlen import varlen_attention
from trainer_adapter.batches.batch import Batch
from trainer_adapter.demo.sampler import NORM_EPS, PolicyConfig
from trainer_adapter.losses import policy_loss

#: Peak learning rate of Adam, its warm-up steps, and Adam's averaging factors.
LEARNING_RATE: Final = 3e-3
WARMUP_STEPS: Final = 10
BETAS: Final = (0.9, 0.99)
#: The ratio is clipped to ``[1 - CLIP_LOW, 1 + CLIP_HIGH]``.
CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
#: Weight of the mean token entropy in the objective. Without it the policy settles early on partly
#: right answers.
ENTROPY_BONUS: Final = 0.1
#: Gradients are scaled down to this norm.
MAX_GRAD_NORM: Final = 0.3


class Policy(nn.Module):
    """The transformer, trained by the demo from random weights."""

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
        """Run a packed batch up to the last norm; ``states @ weights["head"]`` does the rest."""
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

    def export_weights(self) -> npt.NDArray[np.float32]:
        """Return the weights as one flat vector."""
        with torch.no_grad():
            ordered = [self.weights[name].reshape(-1) for name, _ in self.config.parameters()]
            flat: npt.NDArray[np.float32] = torch.cat(ordered).numpy()
        return flat

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMS norm over the last axis."""
        return functional.rms_norm(x, (self.config.width,), gain, NORM_EPS)


def _initial(
    config: PolicyConfig, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Return random weights: norms 1, head 0 (a uniform policy explores best), the rest normal."""
    if name.endswith("norm"):
        return torch.ones(shape)
    if name == "head":
        return torch.zeros(shape)
    std = 1.0 if name.endswith("embedding") else math.sqrt(1.0 / shape[0])
    if name.endswith(("attn_out", "mlp_out")):
        std /= math.sqrt(2 * config.layers)
    return torch.randn(shape, generator=generator) * std


class StepResult(NamedTuple):
    """Mean reward of a batch's sequences; False for a step skipped on a non-finite gradient."""

    mean_score: float
    applied: bool


class Learner:
    """Policy, optimizer and step count; one call of `step` a batch."""

    def __init__(self, policy: Policy, learning_rate: float = LEARNING_RATE) -> None:
        self.policy = policy
        self.steps = 0
        self._rate = learning_rate
        self._optimizer = torch.optim.Adam(
            policy.parameters(), lr=learning_rate, betas=BETAS, fused=True
        )

    def step(self, batch: Batch) -> StepResult:
        """Take one gradient step."""
        logprobs, entropies = token_logprobs(self.policy, batch)
        if batch.logprobs is None:
            raise ValueError("expected logprobs in the batch, got None; workers have to put them")
        loss, _, _ = policy_loss(
            logprobs,
            batch.logprobs[batch.loss_mask],
            batch.advantages[batch.loss_mask],
            torch.ones_like(logprobs, dtype=torch.bool),
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
        )
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss - ENTROPY_BONUS * entropies.mean())
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        applied = bool(torch.isfinite(grad_norm))
        if applied:
            self.steps += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * min(1.0, self.steps / WARMUP_STEPS)
            self._optimizer.step()
        return StepResult(float(batch.scores.mean()), applied)


def token_logprobs(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the policy's logprob of each completion token, and the entropy there."""
    where = batch.loss_mask.nonzero().squeeze(1)
    if bool((batch.position_ids[where] == 0).any()):
        raise ValueError("a sequence begins with a completion token: nothing predicts it")
    states = policy(batch.tokens, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    # The state at i - 1 predicts the token at i; the head runs on those rows alone.
    all_logprobs = torch.log_softmax(states[where - 1] @ policy.weights["head"], dim=-1)
    picked = all_logprobs.gather(1, batch.tokens[where, None]).squeeze(1)
    return picked, -(all_logprobs.exp() * all_logprobs).sum(-1)
