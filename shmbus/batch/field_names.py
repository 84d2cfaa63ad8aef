"""Producers' names of a batch's fields."""

from __future__ import annotations

import msgspec


class FieldNames(msgspec.Struct, frozen=True, kw_only=True):
    """The producers' names of a batch's fields; None for an unused field.

    Attributes
    ----------
    tokens : str
        Token ids: integers, [n]. Required in every trajectory.
    loss_mask : str | None
        Sampled tokens: boolean or numeric, [n]; all tokens in a group without the field.
    logprobs : str | None
        The producer's logprobs of these tokens: float32 or float64, [n]; missing from a batch of
        groups without them.
    advantages : str | None
        The producer's own token-level advantages: float32 or float64, [n]; they win.

    Notes
    -----
    Either every sample of a group contains a field, or no sample; else the group is malformed.
    """

    tokens: str = "tokens"
    loss_mask: str | None = "loss_mask"
    logprobs: str | None = "logprobs"
    advantages: str | None = "advantages"

    def as_tuple(self) -> tuple[str, str | None, str | None, str | None]:
        """Return the names in the core's order."""
        return self.tokens, self.loss_mask, self.logprobs, self.advantages
