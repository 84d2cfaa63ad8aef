"""The demo's trainer step: GRPO on one packed batch of complete groups.

Invariants:

- The ratio is taken against the logprobs of the tokens, by the policy version that sampled them, so
  batches a few versions old are corrected for and then clipped.
- Every completion token weighs the same, whatever the length of its sequence.
- A batch whose loss or gradient is not finite changes no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer_adapter.demo.policy import Policy
from trainer_adapter.losses import kl_estimate, policy_loss


class PackedBatch(Protocol):
    """The attributes of a batch that a step reads; the handler's batches have them."""

    @property
    def tokens(self) -> Tensor:
        """Packed tokens, int64 [T]."""

    @property
    def position_ids(self) -> Tensor:
        """Positions, int64 [T], from 0 in each sequence."""

    @property
    def cu_seqlens(self) -> Tensor:
        """Offsets of the sequences, int32 [S + 1]."""

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""

    @property
    def loss_mask(self) -> Tensor:
        """True on completion tokens, bool [T]."""

    @property
    def logprobs(self) -> Tensor | None:
        """Logprob of each token when it was sampled, float32 [T]; None where none was sent."""

    @property
    def advantages(self) -> Tensor:
        """Advantage of each token, float32 [T]."""

    @property
    def scores(self) -> Tensor:
        """Rewards, float32 [S]."""


@dataclass(frozen=True)
class LearnerConfig:
    """Hyper-parameters of the step."""

    #: Peak learning rate of Adam.
    lr: float = 3e-3
    #: Steps over which the rate rises linearly to `lr`.
    warmup_steps: int = 10
    #: Adam's averaging factors.
    betas: tuple[float, float] = (0.9, 0.99)
    #: The ratio is clipped to ``[1 - clip_low, 1 + clip_high]``.
    clip_low: float = 0.2
    clip_high: float = 0.28
    #: Weight of the mean token entropy in the objective. Without it the policy settles early on
    #: answers that are partly right.
    entropy_bonus: float = 0.1
    #: Gradients longer than this are scaled down to it.
    max_grad_norm: float = 0.3


@dataclass(frozen=True)
class StepMetrics:
    """What one step saw and did."""

    #: Mean reward of the batch's sequences.
    mean_score: float
    #: Clipped policy loss; mean token entropy in nats; gradient length before clipping.
    loss: float
    entropy: float
    grad_norm: float
    #: Share of completion tokens whose gradient the clip took away; estimate in nats of how far the
    #: policy has moved since the tokens were sampled.
    clip_fraction: float
    approx_kl: float
    #: Size of the batch.
    tokens: int
    completion_tokens: int
    sequences: int
    #: False if the step was skipped because its gradient was not finite.
    applied: bool


class Learner:
    """Policy, optimizer and step count; one call of `step` a batch."""

    def __init__(self, policy: Policy, config: LearnerConfig | None = None) -> None:
        self.policy = policy
        self.config = config or LearnerConfig()
        self.steps = 0
        self._optimizer = torch.optim.Adam(
            policy.parameters(), lr=self.config.lr, betas=self.config.betas, fused=True
        )

    def step(self, batch: PackedBatch) -> StepMetrics:
        """Take one gradient step."""
        config = self.config
        logprobs, entropies = token_logprobs(self.policy, batch)
        where = batch.loss_mask
        if batch.logprobs is None:
            raise ValueError("expected logprobs in the batch, got None; workers have to put them")
        advantages, old = batch.advantages[where], batch.logprobs[where]
        counted = torch.ones_like(logprobs, dtype=torch.bool)
        loss, clip_fraction, _ = policy_loss(
            logprobs,
            old,
            advantages,
            counted,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        entropy = entropies.mean()
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss - config.entropy_bonus * entropy)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
        applied = bool(torch.isfinite(grad_norm))
        if applied:
            self.steps += 1
            for group in self._optimizer.param_groups:
                group["lr"] = config.lr * min(1.0, self.steps / max(1, config.warmup_steps))
            self._optimizer.step()
        # The tokens are of the old policy, so it is the divergence of the old from the new.
        moved = kl_estimate(old, logprobs.detach(), counted)
        return StepMetrics(
            mean_score=float(batch.scores.mean()),
            loss=loss.item(),
            entropy=entropy.item(),
            grad_norm=float(grad_norm),
            clip_fraction=float(clip_fraction),
            approx_kl=float(moved.mean()),
            tokens=len(batch.tokens),
            completion_tokens=len(old),
            sequences=len(batch.scores),
            applied=applied,
        )


def token_logprobs(policy: Policy, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the policy's logprob of each completion token, and the entropy at it."""
    where = batch.loss_mask.nonzero().squeeze(1)
    if bool((batch.position_ids[where] == 0).any()):
        raise ValueError("a sequence begins with a completion token: nothing predicts it")
    states = policy(batch.tokens, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    # The token at i is predicted by the state at i - 1; the head runs on those rows alone.
    all_logprobs = torch.log_softmax(policy.logits(states[where - 1]), dim=-1)
    picked = all_logprobs.gather(1, batch.tokens[where, None]).squeeze(1)
    return picked, -(all_logprobs.exp() * all_logprobs).sum(-1)
