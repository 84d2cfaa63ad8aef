"""Pieces that a source gives again for each version, and how they get into one slot of a pool.

A thousand small tensors cost more to look at than to copy, so what was found out for the first
version in a slot is used for those that follow.

Invariant: whoever uses it has made sure that the pieces are the same objects; a source gives others
where anything but values has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from trainer_adapter.weights.copies import Batch, Pair
from trainer_adapter.weights.source import LocalPiece
from trainer_adapter.weights.staging import HostBatch, HostTransfers, transfers_of

__all__ = ["LastingPieces"]


class LastingPieces:
    """Copies of pieces, sorted once.

    Parameters
    ----------
    pieces : sequence of LocalPiece
        Kept, so that no other ones are the same objects.
    targets : sequence of Tensor
        The place of each, in memory that outlives this.
    may_cross : callable
        Which of them cross from a device together with their neighbours.
    """

    def __init__(
        self,
        pieces: Sequence[LocalPiece],
        targets: Sequence[torch.Tensor],
        may_cross: Callable[[LocalPiece], bool],
    ) -> None:
        self.pieces: Final = pieces
        rest: list[Pair] = []
        crossing: dict[torch.device, list[Pair]] = {}
        for piece, target in zip(pieces, targets, strict=True):
            source = piece.tensor
            found = crossing.setdefault(source.device, []) if may_cross(piece) else rest
            found.append((target, source))
        self._rest = Batch(rest)
        ways = {device: transfers_of(device) for device in crossing}
        self.crossing: list[tuple[HostTransfers, HostBatch]] = [
            (ways[device], HostBatch(ways[device], pairs)) for device, pairs in crossing.items()
        ]

    def copy(self) -> int:
        """Copy all of them; when it returns, those that cross are there.

        Returns
        -------
        int
            Their bytes.
        """
        self._rest.begin()
        for way, batch in self.crossing:
            with way.lock:
                batch.begin()
                way.settle()
        return self._rest.nbytes + sum(batch.nbytes for _, batch in self.crossing)
