"""Common base of batch and micro-batch: tensors moved together.

Invariant: a copy keeps every tensor of the original on the one device, tensors in its dicts
included, and the rest unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from trainer_adapter._arguments import check_device

PartsT = TypeVar("PartsT", bound="TensorParts")

#: Dtypes that torch stores and moves, but cannot index or fill on every device.
_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **{
        getattr(torch, name): torch.int8
        for name in (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    },
}


def indexable(values: Tensor) -> Tensor:
    """Return a view of the same bits in a dtype that torch can index everywhere."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


class TensorParts:
    """Tensors and values in attributes, moved to a device together."""

    def to(self: PartsT, device: torch.device | str | int, *, non_blocking: bool = False) -> PartsT:
        """Return a copy with its tensors on a device.

        Parameters
        ----------
        device : torch.device, str or int
            As for `torch.Tensor.to`; a dtype is a TypeError, an absent device a ValueError.
        non_blocking : bool
            Do not wait for copies from pinned memory; see `pin_memory`. Keep the original until the
            copies finish.

        Returns
        -------
        Batch, MicroBatch or PrefixTree
            Of the same sequences. Tensors already on the device are not copied.
        """
        place = check_device(device)
        return self._with(lambda one: one.to(place, non_blocking=non_blocking))

    def pin_memory(self: PartsT, device: torch.device | str | None = None) -> PartsT:
        """Return a copy with its tensors in pinned memory; a DataLoader calls this.

        Parameters
        ----------
        device : torch.device or str, optional
            The accelerator; by default the current one. torch deprecated the argument.

        Returns
        -------
        Batch, MicroBatch or PrefixTree
            Of the same sequences. Tensors on an accelerator stay unchanged.

        Raises
        ------
        RuntimeError
            torch finds no accelerator.
        """
        return self._with(lambda one: one.pin_memory() if one.device.type == "cpu" else one)

    def _with(self: PartsT, change: Callable[[Tensor], Tensor]) -> PartsT:
        """Return a copy with every tensor changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, TensorParts):
                return value._with(change)
            if isinstance(value, dict):
                return {name: changed(one) for name, one in value.items()}
            return value

        values = {name: changed(value) for name, value in vars(self).items()}
        return type(self)(**values)


class TensorHolder(TensorParts):
    """Some sequences, as tensors and values in attributes."""

    cu_seqlens: Tensor
    instance_ids: list[str]

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences."""
        return len(self.instance_ids)

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the sequences, without padding."""
        facts = getattr(self, "facts", None)
        return int(self.cu_seqlens[-1]) if facts is None else facts.tokens
