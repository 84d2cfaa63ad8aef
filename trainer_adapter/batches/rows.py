"""Samples put with rows: each row becomes a sequence of the batch.

Invariant: rows are cut before a batch exists; no stage changes its tensors afterwards.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.data.sample_rows import row_fields, row_lengths
from trainer_adapter.batches.tensors import indexable


class RowSplit:
    """Split of N samples into S sequences.

    Attributes
    ----------
    lengths : int64 [S]
        Tokens per sequence.
    sample_of : int64 [S]
        Sample per sequence.
    """

    def __init__(self, trajectories: list[shmbus.Trajectory], tokens: str) -> None:
        every: list[NDArray[np.int64]] = []
        self._cut_fields: list[frozenset[str]] = []
        for t in trajectories:
            rows = row_lengths(t)
            names = row_fields(t.keys())
            if rows is not None and tokens not in names:
                raise ValueError(
                    f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field "
                    f"{tokens!r}: expected in each row, got it beside rows=; put it in the rows"
                )
            every.append(np.array(t.shape(tokens), np.int64) if rows is None else rows[:, 0])
            self._cut_fields.append(frozenset() if rows is None else frozenset(names))
        counts = np.array([len(rows) for rows in every])
        self.lengths: NDArray[np.int64] = np.concatenate(every)
        self.sample_of: NDArray[np.int64] = np.repeat(np.arange(len(every)), counts)
        ends = np.cumsum(self.lengths)
        firsts = np.cumsum(counts) - counts
        starts = ends - self.lengths
        self._starts = starts - np.repeat(starts[firsts], counts)

    @cached_property
    def borders(self) -> NDArray[np.int32]:
        """Start of each sequence in the packed row: int32 [S + 1]."""
        borders = np.zeros(len(self.lengths) + 1, np.int32)
        np.cumsum(self.lengths, out=borders[1:])
        return borders

    def parts(self, instance_ids: list[str]) -> dict[str, Any]:
        """Return the parts of a batch that count sequences, beside its facts."""
        starts = np.repeat(self.borders[:-1].astype(np.int64), self.lengths)
        return {
            "position_ids": torch.from_numpy(np.arange(int(self.borders[-1])) - starts),
            "cu_seqlens": torch.from_numpy(self.borders),
            "max_seqlen": int(self.lengths.max()),
            "instance_ids": self.repeated(instance_ids),
        }

    def repeated(self, values: list[Any]) -> list[Any]:
        """Repeat the values of samples for their sequences."""
        return [values[sample] for sample in self.sample_of.tolist()]

    def cut(
        self, values: Tensor, borders: NDArray[np.int64], name: str
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Cut a "ragged" field of rows at the rows, and repeat a field of samples for its rows."""
        cut = np.array([name in names for names in self._cut_fields])[self.sample_of]
        starts = borders[self.sample_of] + np.where(cut, self._starts, 0)
        counts = np.where(cut, self.lengths, np.diff(borders)[self.sample_of])
        ends = np.cumsum(counts)
        places = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]))
        return selected(values, places), np.concatenate([np.zeros(1, np.int64), ends])


def selected(values: Tensor, positions: NDArray[np.int64]) -> Tensor:
    """Return the rows of a tensor at some positions."""
    at = torch.from_numpy(positions).to(values.device)
    return indexable(values).index_select(0, at).view(values.dtype)
