"""Pieces that a source gives again for each version, and how they get into one slot of a pool.

A thousand small tensors cost more to look at than to copy, so what was found out for the first
version in a slot is used for those that follow.

Invariant: whoever uses it has made sure that the pieces are the same objects; a source gives others
where anything but values has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import torch

from shmbus.tensors.copy_plan import Batch, Pair
from shmbus.tensors.host_transfer import HostBatch, HostTransfers, transfers_of
from shmbus.tensors.tensor_cache import are_same
from shmbus.weights.source import LocalPiece

__all__ = ["LastingCopies", "LastingPieces"]


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
        #: The same, as the source has foreseen them.
        self.foreseen: Sequence[LocalPiece] | None = None
        rest: list[Pair] = []
        crossing: dict[torch.device, list[Pair]] = {}
        for piece, target in zip(pieces, targets, strict=True):
            source = piece.tensor
            found = crossing.setdefault(source.device, []) if may_cross(piece) else rest
            found.append((target, source))
        self._rest = Batch(rest)
        # In one order everywhere, since the ways are locked together.
        devices = sorted(crossing, key=str)
        self.crossing: list[tuple[HostTransfers, HostBatch]] = [
            (way, HostBatch(way, crossing[way.device])) for way in map(transfers_of, devices)
        ]

    def begin(self) -> ExitStack:
        """Begin to copy those that cross from a device.

        Returns
        -------
        ExitStack
            To be closed by the same thread: they are there then.
        """
        with ExitStack() as stack:
            for way, batch in self.crossing:
                stack.enter_context(way.lock)
                stack.callback(way.settle)
                batch.begin()
            return stack.pop_all()

    def copy_rest(self) -> int:
        """Copy those that do not cross; the bytes of all of them."""
        self._rest.begin()
        return self._rest.nbytes + sum(batch.nbytes for _, batch in self.crossing)


class LastingCopies:
    """The copies of one version into its slot.

    Parameters
    ----------
    known : dict of LastingPieces
        By slot, what was found out for versions before.
    slot : int
        Which this version has.
    """

    def __init__(self, known: dict[int, LastingPieces], slot: int) -> None:
        self._known, self._slot = known, slot
        self._begun: tuple[LastingPieces, ExitStack] | None = None

    def foresee(self, pieces: Sequence[LocalPiece], register: Callable[[], object]) -> None:
        """Begin to copy those of devices, where they were copied into this slot before."""
        known = self._known.get(self._slot)
        if known is None:
            return
        if pieces is known.foreseen or are_same(known.pieces, pieces):
            known.foreseen = pieces
            self._begin(known, register)

    def copy(
        self,
        pieces: Sequence[LocalPiece],
        make: Callable[[], LastingPieces],
        register: Callable[[], object],
    ) -> int:
        """Copy pieces; when it returns, all of them are there.

        Parameters
        ----------
        pieces : sequence of LocalPiece
        make : callable
            Sorts them, where they are not those of the version before.
        register : callable
            Has devices write the slot directly; called before something crosses.

        Returns
        -------
        int
            Their bytes.
        """
        known = self._known.get(self._slot)
        if known is None or not are_same(known.pieces, pieces):
            known = self._known[self._slot] = make()
        if self._begun is None or self._begun[0] is not known:
            self.settle()
            self._begin(known, register)
        written = known.copy_rest()
        self.settle()
        return written

    def _begin(self, known: LastingPieces, register: Callable[[], object]) -> None:
        if known.crossing:
            register()
        self._begun = known, known.begin()

    def settle(self) -> None:
        """Wait for what was begun."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].close()
