"""Samples of several rows: each row becomes a sequence of the batch.

The rows of a sample lie one behind the other in its record, so the packed row is the same for one
sequence or for several. Only the borders differ, and what there is of each sequence.

Invariants:

- A sample's score counts once for its group; all of its rows have its advantage.
- Extra fields of the whole sample are repeated for each of its rows, those of rows are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.rows import row_fields, row_lengths
from trainer_adapter.batches.batch import Batch
from trainer_adapter.batches.tensors import indexable

__all__ = ["RowSplit", "split_rows"]


class RowSplit(NamedTuple):
    """How N samples are S sequences.

    Attributes
    ----------
    lengths : int64 [S]
        Tokens of each sequence.
    sample_of : int64 [S]
        The sample of each.
    starts : int64 [S]
        Where each begins within its sample.
    cut_fields : list
        Of each sample, the names of the fields of its rows; None where it was put without rows.
    """

    lengths: NDArray[np.int64]
    sample_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    cut_fields: list[frozenset[str] | None]

    @classmethod
    def of(
        cls, trajectories: list[shmbus.Trajectory], lengths: NDArray[np.int64], tokens: str
    ) -> RowSplit:
        """Find the rows of samples, after their checks.

        Parameters
        ----------
        trajectories : list[shmbus.Trajectory]
            Leased; N of them.
        lengths : int64 [N]
            Tokens of each.
        tokens : str
            The producers' name of the tokens.

        Returns
        -------
        RowSplit

        Raises
        ------
        ValueError
            A sample was put with rows that have no tokens.
        """
        every: list[NDArray[np.int64]] = []
        cut_fields: list[frozenset[str] | None] = []
        for t, length in zip(trajectories, lengths, strict=True):
            rows = row_lengths(t)
            names = row_fields(t.keys())
            if rows is not None and tokens not in names:
                raise ValueError(
                    f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field "
                    f"{tokens!r}: expected in each row, got it beside rows=; put it in the rows"
                )
            every.append(np.array([length], np.int64) if rows is None else rows[:, 0])
            cut_fields.append(None if rows is None else frozenset(names))
        counts = np.array([len(rows) for rows in every])
        joined = np.concatenate(every)
        ends = np.cumsum(joined)
        firsts = np.cumsum(counts) - counts
        return cls(
            joined,
            np.repeat(np.arange(len(every)), counts),
            ends - joined - np.repeat((ends - joined)[firsts], counts),
            cut_fields,
        )

    @property
    def borders(self) -> NDArray[np.int32]:
        """Where each sequence begins in the packed row: int32 [S + 1]."""
        borders = np.zeros(len(self.lengths) + 1, np.int32)
        np.cumsum(self.lengths, out=borders[1:])
        return borders


def split_rows(batch: Batch, split: RowSplit, ragged: dict[str, str]) -> None:
    """Make sequences of the rows of a batch's samples, in place.

    Parameters
    ----------
    batch : Batch
        Packed, on the host, with a sequence a sample.
    split : RowSplit
        Of its samples.
    ragged : dict of str to str
        The producers' names of its "ragged" extra fields, by the batch's.
    """
    borders = split.borders
    sample_of = torch.from_numpy(split.sample_of)
    positions = np.arange(len(batch.tokens)) - np.repeat(
        borders[:-1].astype(np.int64), split.lengths
    )
    batch.position_ids.copy_(torch.from_numpy(positions))
    batch.cu_seqlens = torch.from_numpy(borders)
    batch.max_seqlen = int(split.lengths.max())
    batch.scores = batch.scores[sample_of]
    batch.policy_versions = batch.policy_versions[sample_of]
    batch.newest_policy_versions = batch.newest_policy_versions[sample_of]
    batch.instance_ids = [batch.instance_ids[sample] for sample in split.sample_of.tolist()]
    group_of = torch.repeat_interleave(torch.arange(len(batch.group_sizes)), batch.group_sizes)
    batch.group_sizes = torch.bincount(group_of[sample_of], minlength=len(batch.group_sizes))
    batch.sample_of = sample_of.to(torch.int32)
    if batch.facts is not None:
        batch.facts = batch.facts._replace(row_lengths=split.lengths)
    for name, kind in batch.extra_kinds.items():
        if kind == "meta":
            batch.extra[name] = [batch.extra[name][sample] for sample in split.sample_of.tolist()]
        elif kind == "sequence":
            batch.extra[name] = _select(batch.extra[name], sample_of)
        elif kind == "ragged":
            _split_ragged(batch, name, ragged[name], split)


def _split_ragged(batch: Batch, name: str, source: str, split: RowSplit) -> None:
    """Cut the rows of a field that is of rows, and repeat those of one that is of samples."""
    borders = batch.extra_offsets[name].numpy()
    cut = np.array([names is not None and source in names for names in split.cut_fields])
    cut = cut[split.sample_of]
    starts = borders[split.sample_of] + np.where(cut, split.starts, 0)
    counts = np.where(cut, split.lengths, np.diff(borders)[split.sample_of])
    ends = np.cumsum(counts)
    places = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]))
    batch.extra[name] = _select(batch.extra[name], torch.from_numpy(places))
    batch.extra_offsets[name] = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int64))


def _select(values: Tensor, positions: Tensor) -> Tensor:
    return indexable(values).index_select(0, positions).view(values.dtype)
