"""Shared prefixes of a group's sequences: each prefix once, as a tree of segments.

Sequences of one group mostly begin alike: with the prompt, and in an agent's tree with each turn
before a branch. A causal model's output for a token depends on the preceding tokens alone, so
sequences with equal beginnings share it. A *segment* is a run of tokens shared by the same
sequences; a sequence is the path of segments from a root to its leaf.

Invariants:

- Rows are the tokens of the segments, depth first: a segment's successors lie below it. So row k is
  on the path to row q if, and only if, ``k <= q < ends[k]``.
- Sequences share a segment only if the model's whole input up to its end is equal in them.
- Training decides nothing here: rows are computed once, and per-sequence values stay per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_adapter.batches.tensors import TensorParts, indexable

IntArray = NDArray[np.int64]

#: Least rows saved by a segment: a tile of the attention kernels. Answers with the same first few
#: words form no segment.
LEAST_SAVED: Final = 128


@dataclass(frozen=True)
class Segments:
    """The shape of a tree of N segments and S sequences, on the host."""

    #: int64 [N]. Tokens per segment.
    lengths: IntArray
    #: int64 [N]. The preceding segment, -1 at the beginning of a sequence.
    parents: IntArray
    #: int64 [S]. The last segment of each sequence.
    leaves: IntArray

    @cached_property
    def borders(self) -> IntArray:
        """Start of each segment in the rows: int64 [N + 1]."""
        return _borders(self.lengths)

    @cached_property
    def depths(self) -> IntArray:
        """Tokens of the path before each segment: int64 [N]."""
        depths = np.zeros(len(self.lengths), np.int64)
        for at, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                depths[at] = depths[parent] + self.lengths[parent]
        return depths

    @cached_property
    def positions(self) -> IntArray:
        """Position of each row in a sequence: int64 [R]."""
        return runs(self.depths, self.lengths)

    @cached_property
    def ends(self) -> IntArray:
        """End of the successors of each row: int64 [R]."""
        last = self.borders[1:].copy()
        for at in range(len(last) - 1, -1, -1):
            if (parent := self.parents[at]) >= 0:
                last[parent] = max(last[parent], last[at])
        return np.repeat(last, self.lengths)

    @cached_property
    def predictors(self) -> IntArray:
        """Preceding row of each row in a sequence, -1 at the start: int64 [R]."""
        rows = np.arange(int(self.borders[-1])) - 1
        before = np.where(self.parents < 0, -1, self.borders[self.parents + 1] - 1)
        rows[self.borders[:-1]] = before
        return rows

    def path(self, segment: int) -> list[int]:
        """Return the path from a root to this segment, inclusive."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = int(self.parents[segment])
        return found[::-1]

    def rows_of(self, segments: Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of the paths to some segments, [P], and their borders, [n + 1]."""
        paths = [self.path(int(each)) for each in segments]
        joined = np.array([one for path in paths for one in path], np.int64)
        lengths = np.array([self.lengths[path].sum() for path in paths], np.int64)
        return runs(self.borders[joined], self.lengths[joined]), _borders(lengths)

    @cached_property
    def paths(self) -> tuple[IntArray, IntArray]:
        """Rows visible to each segment's last row, itself included: [P], and [N + 1]."""
        return self.rows_of(np.arange(len(self.lengths)))

    def select(self, sequences: Sequence[int]) -> tuple[Segments, IntArray]:
        """Return the tree of some sequences, and its rows in the original tree."""
        leaves = self.leaves[list(sequences)]
        kept = sorted({one for leaf in set(leaves.tolist()) for one in self.path(leaf)})
        number = np.full(len(self.lengths) + 1, -1, np.int64)
        number[kept] = np.arange(len(kept))
        rows = runs(self.borders[kept], self.lengths[kept])
        parents = number[self.parents[kept]]
        return Segments(self.lengths[kept], parents, number[leaves]), rows


@dataclass(eq=False)
class PrefixTree(TensorParts):
    """T tokens of S sequences in R rows: each shared prefix of a group once.

    A model computes the R rows; losses are of the T tokens. `rows` leads from the tokens to the
    rows, `sources` back to the first token of each row.

    Attributes
    ----------
    tokens, position_ids : int64 [R]
        The model's input. Attention by `prefix_attention`.
    rows : int64 [T]
        The row of each token of the packed sequences.
    sources : int64 [R]
        The first token of each row, among the T.
    predictors : int64 [R]
        The row with the logits of this row's token; -1 at the beginning of a sequence.
    ends : int32 [R]
        Row q sees row k if ``k <= q < ends[k]``.
    segments : Segments
        Its shape, on the host: lengths and parents of the segments, the leaf of each sequence.
    """

    tokens: Tensor
    position_ids: Tensor
    rows: Tensor
    sources: Tensor
    predictors: Tensor
    ends: Tensor
    segments: Segments
    #: Data kept by attention kernels, by window and device.
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.tokens)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return values of tokens, [T, ...], as a model's inputs: those of the first sequence."""
        return indexable(values).index_select(0, self.sources).view(values.dtype)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return values of rows, [R, ...], for each sequence's tokens; differentiable."""
        return gathered(values, self.rows)

    def select(self, sequences: Sequence[int]) -> PrefixTree:
        """Return the tree of some sequences, in the order given."""
        segments, rows = self.segments.select(sequences)
        kept = torch.from_numpy(rows).to(self.tokens.device)
        return _tree(segments, self.tokens.index_select(0, kept))

    def _with(self, change: Callable[[Tensor], Tensor]) -> PrefixTree:
        changed = super()._with(change)
        changed.kept = {}
        return changed

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": {}}


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Take rows by an index with repeats; the gradient is added up in float32 at least."""
    if not x.requires_grad:
        return x.index_select(0, rows)
    found: Tensor = _Gather.apply(x, rows)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = grad.new_zeros((ctx.count, *grad.shape[1:]), dtype=wide)
        return summed.index_add_(0, rows, grad.to(wide)).to(grad.dtype), None


def share_prefixes(
    tokens: IntArray, lengths: IntArray, group_sizes: IntArray, inputs: IntArray | None = None
) -> PrefixTree:
    """Find shared prefixes in each group; sequences with different `inputs` share nothing."""
    borders = _borders(lengths)
    views = [tokens[borders[at] : borders[at + 1]] for at in range(len(lengths))]
    builder = _Builder(views)
    last = 0
    for size in group_sizes.tolist():
        first, last = last, last + size
        members = range(first, last)
        for kind in [0] if inputs is None else dict.fromkeys(inputs[first:last].tolist()):
            alike = [at for at in members if inputs is None or inputs[at] == kind]
            builder.add(alike)
    segments = Segments(
        np.array(builder.lengths, np.int64), np.array(builder.parents, np.int64), builder.leaves
    )
    found = [views[at][first : first + n] for at, first, n in builder.pieces]
    return _tree(segments, torch.from_numpy(np.concatenate([tokens[:0], *found])))


class _Builder:
    """Grows a tree, depth first."""

    def __init__(self, views: list[IntArray]) -> None:
        self._views = views
        self.lengths: list[int] = []
        self.parents: list[int] = []
        #: Per segment: one of its sequences, the start there, and the tokens.
        self.pieces: list[tuple[int, int, int]] = []
        self.leaves = np.full(len(views), -1, np.int64)

    def add(self, members: list[int]) -> None:
        # Members, the tokens of their path up to here, and its last segment.
        open_ = [(members, 0, -1)]
        while open_:
            members, depth, parent = open_.pop()
            if len(members) == 1:
                self._end(members[0], depth, parent)
                continue
            shared = self._shared(members, depth)
            split = depth + shared
            if shared * (len(members) - 1) >= LEAST_SAVED:
                parent = self._segment(members[0], depth, shared, parent)
                depth = split
            ahead: dict[int, list[int]] = {}
            for at in members:
                view = self._views[at]
                if len(view) == split:
                    self._end(at, depth, parent)
                else:
                    ahead.setdefault(int(view[split]), []).append(at)
            open_ += [(each, depth, parent) for each in reversed(ahead.values())]

    def _shared(self, members: list[int], depth: int) -> int:
        """Count the common tokens of the members from a depth on."""
        first = self._views[members[0]][depth:]
        shared = len(first)
        for at in members[1:]:
            shared = min(shared, same_tokens(first[:shared], self._views[at][depth:]))
        return shared

    def _segment(self, at: int, depth: int, length: int, parent: int) -> int:
        self.lengths.append(length)
        self.parents.append(parent)
        self.pieces.append((at, depth, length))
        return len(self.lengths) - 1

    def _end(self, at: int, depth: int, parent: int) -> None:
        left = len(self._views[at]) - depth
        self.leaves[at] = self._segment(at, depth, left, parent) if left else parent


def same_tokens(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Count the common tokens of two sequences from their beginning."""
    shortest = min(len(one), len(other))
    differ = one[:shortest] != other[:shortest]
    first = int(differ.argmax()) if shortest else 0
    return first if shortest and differ[first] else shortest


def runs(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return consecutive runs of numbers, joined."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _borders(lengths: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _tree(segments: Segments, tokens: Tensor) -> PrefixTree:
    """Derive the tensors from the shape, on the device of the tokens."""
    rows, _ = segments.rows_of(segments.leaves)
    sources = np.empty(len(tokens), np.int64)
    sources[rows[::-1]] = np.arange(len(rows))[::-1]

    def sent(values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(tokens.device)

    return PrefixTree(
        tokens=tokens,
        position_ids=sent(segments.positions),
        rows=sent(rows),
        sources=sent(sources),
        predictors=sent(segments.predictors),
        ends=sent(segments.ends.astype(np.int32)),
        segments=segments,
    )
