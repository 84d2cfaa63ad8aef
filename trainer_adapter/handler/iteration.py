"""Iteration over the batches of a handler.

Invariant: an exception does not end `for batch in handler`: the next one goes on behind it.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

import shmbus
from shmbus._arguments import check_timeout
from trainer_adapter._arguments import check_loader
from trainer_adapter.batches.batch import Batch
from trainer_adapter.handler.requests import PromptsEndedError

__all__ = ["BatchIteration"]


class BatchIteration(IterableDataset[Batch], abc.ABC):
    """What can be iterated over, as a torch `IterableDataset`."""

    @abc.abstractmethod
    def next_batch(self, timeout: float | None = None) -> Batch:
        """Wait for the next batch."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether there are no more batches."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until `close`, or the end of what `offer` was given.

        An exception does not end the iteration.
        """
        if get_worker_info() is not None:
            raise RuntimeError(
                "OnlineDataHandler: expected to be iterated by the process that made it, got a "
                "DataLoader's worker; pass num_workers=0, and prefetch=1 to have batches ready"
            )
        check_loader(sys._getframe(1))
        return self

    def __next__(self) -> Batch:
        try:
            return self.next_batch()
        except PromptsEndedError:
            raise StopIteration from None
        except shmbus.BusClosedError:
            if self.closed:
                raise StopIteration from None
            raise

    def iter(self, timeout: float | None = None) -> Iterator[Batch]:
        """Yield batches until `close` or the end of the prompts, and wait only so long for each.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a batch, as for `next_batch`.

        Yields
        ------
        Batch

        Raises
        ------
        TimeoutError
            As for `next_batch`. It ends this iteration; another one goes on behind it.
        ValueError, BusClosedError
            As for `next_batch`.
        """
        check_timeout(timeout)
        return self._iterate(timeout)

    def _iterate(self, timeout: float | None) -> Iterator[Batch]:
        while True:
            try:
                yield self.next_batch(timeout)
            except PromptsEndedError:
                return
            except shmbus.BusClosedError:
                if self.closed:
                    return
                raise
