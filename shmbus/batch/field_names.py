"""What producers call the fields that a batch is made of."""

from __future__ import annotations

import msgspec


class FieldNames(msgspec.Struct, frozen=True, kw_only=True):
    """The producers' names of the fields that a batch is made of; None for one that is not used.

    Attributes
    ----------
    tokens : str
        Token ids: integers, [n]. Every trajectory needs it.
    loss_mask : str | None
        Which tokens were sampled: boolean or numeric, [n]; all of them in a group without it.
    logprobs : str | None
        The producer's logprobs of these tokens: float32 or float64, [n]; a batch of groups without
        them has none.
    advantages : str | None
        The producer's own token-level advantages: float32 or float64, [n]; they win.

    Notes
    -----
    A field is in every sample of a group, or in none; else the group is malformed.
    """

    tokens: str = "tokens"
    loss_mask: str | None = "loss_mask"
    logprobs: str | None = "logprobs"
    advantages: str | None = "advantages"

    def as_tuple(self) -> tuple[str, str | None, str | None, str | None]:
        """Return the names in the order in which the core takes them."""
        return self.tokens, self.loss_mask, self.logprobs, self.advantages
