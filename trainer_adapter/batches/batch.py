"""Batch: the tensors of one training step, in packed or padded rows.

Invariants:

- A batch holds whole groups, each with its samples ordered by index.
- `cu_seqlens` holds each sequence's start in the packed row, in either layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.base.format import several
from trainer_adapter.batches.prefix_tree import PrefixTree
from trainer_adapter.batches.rows import RowSplit
from trainer_adapter.batches.tensors import TensorHolder, indexable

Layout = Literal["packed", "padded", "prefix"]

#: Tensors of a batch with an element a token.
PER_TOKEN: Final = ("tokens", "position_ids", "loss_mask", "logprobs", "advantages")


def _not_given() -> Any:
    """Stand for a tensor left out by the caller."""
    return None


@dataclass(eq=False, repr=False)
class Batch(TensorHolder):
    """One batch of whole groups. T tokens in S sequences, the longest of L tokens.

    Its tensors may share one block of memory, alive until the last tensor goes. `clone` a tensor to
    keep it longer.

    `to` and `pin_memory` return a copy of the same groups, accepted by `OnlineDataHandler.ack` as
    well. A batch pickles without its groups: they are leased to this process.

    Attributes
    ----------
    tokens : int64 [T], or [S, L] padded with 0
    position_ids : int64 [T] or [S, L]
        From 0 in every sequence.
    cu_seqlens : int32 [S + 1]
        Start of each sequence in the packed row; kept for padded batches too.
    max_seqlen : int
        L.
    loss_mask : bool [T] or [S, L]
    logprobs : float32 [T] or [S, L], or None
        The producer's, aligned to their own token; 0 where loss_mask is False. None if the groups
        carry none, or under ``FieldNames(logprobs=None)``.
    advantages : float32 [T] or [S, L]
        Broadcast from the group, or the producer's own.
    scores : float32 [S]
    instance_ids : list[str], one a sequence
    policy_versions : int64 [S]
        The oldest of each sample.
    newest_policy_versions : int64 [S]
    sample_of : int32 [S]
        Sample of each sequence, from 0 in the batch's order. A sample put with ``rows=`` forms a
        sequence per row; any other sample forms a single sequence.
    group_sizes : int64 [G]
        Sequences of each group, in order: samples, or the rows of samples.
    groups : list[shmbus.Group]
        The leased groups, acknowledged together by `OnlineDataHandler.ack`; empty after pickling.
    layout : "packed" | "padded" | "prefix"
        A "prefix" batch is packed, with a `prefix_tree`.
    step : int
        The handler's count of batches, from 0; -1 for a batch of `pack`.
    transport : str
        Transport to its device: "cpu", "gather", "pinned" or "copy" (`GpuPacker`).
    extra : dict[str, Tensor | list]
        The requested `extra_fields`. "token": [T, ...] or [S, L, ...]; "sequence": [S, ...];
        "ragged" and "group": [rows, ...]; "support": [ids]; "meta": a list of S values.
    extra_offsets : dict[str, int64]
        Start of the rows of each sequence, [S + 1], for a "ragged" field; of each group, [G + 1],
        for a "group" field; of each token, [T + 1], for a "support" field.
    extra_kinds : dict[str, str]
        The kind of each extra field.
    facts : BatchFacts or None
        Facts of the batch on the host.
    prefix_tree : PrefixTree or None
        Shared prefixes of the sequences of a group, once: the model's input of ``layout="prefix"``.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_mask: Tensor
    logprobs: Tensor | None
    advantages: Tensor
    scores: Tensor
    instance_ids: list[str]
    policy_versions: Tensor
    group_sizes: Tensor
    groups: list[shmbus.Group]
    layout: Layout = "packed"
    step: int = -1
    transport: str = "cpu"
    extra: dict[str, Any] = field(default_factory=dict)
    extra_offsets: dict[str, Tensor] = field(default_factory=dict)
    extra_kinds: dict[str, str] = field(default_factory=dict)
    facts: BatchFacts | None = None
    prefix_tree: PrefixTree | None = None
    # By a factory: the class must lack attributes of these names, see __getattr__.
    newest_policy_versions: Tensor = field(default_factory=_not_given)
    sample_of: Tensor = field(default_factory=_not_given)

    def __post_init__(self) -> None:
        # A batch made by a caller: samples of one row, each of one policy.
        if self.newest_policy_versions is None:
            self.newest_policy_versions = self.policy_versions
        if self.sample_of is None:
            self.sample_of = _one_each(self)

    @classmethod
    def of_facts(cls, facts: BatchFacts, **parts: Any) -> Batch:
        """Make a batch with sequence tensors created on first use.

        Parameters
        ----------
        facts : BatchFacts
        **parts
            The remaining attributes without a default.

        Returns
        -------
        Batch
        """
        made = object.__new__(cls)
        vars(made).update(parts, facts=facts)
        return made

    if not TYPE_CHECKING:  # else mypy would accept any name

        def __getattr__(self, name: str) -> Any:
            make = MADE_LATER.get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            found = vars(self)[name] = make(self)
            return found

    def _complete(self) -> None:
        """Make the tensors not yet requested."""
        for name in MADE_LATER:
            getattr(self, name)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        self._complete()
        return super()._with(change)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; for a packed batch without waiting for the device."""
        if self.facts is not None:
            return [int(length) for length in self.facts.lengths.tolist()]
        return [int(length) for length in self.cu_seqlens.diff().tolist()]

    def asdict(self) -> dict[str, Any]:
        """Return tensors and values by their names, without the groups, for a function or a file.

        Returns
        -------
        dict
            The attributes of this batch; tensors are not copied. `extra` and `extra_offsets` stay
            nested dicts.
        """
        self._complete()
        left_out = ("groups", "facts")
        names = [each.name for each in fields(self)]
        return {name: getattr(self, name) for name in names if name not in left_out}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self._with(_own)), "groups": []}

    def __repr__(self) -> str:
        step = "" if self.step < 0 else f" step {self.step}"
        groups = len(self.groups) or len(self.group_sizes)
        extra = "".join(f", {name} {_shape(value)}" for name, value in self.extra.items())
        return (
            f"<Batch{step}: {several(groups, 'group')}, {several(self.num_sequences, 'sequence')}, "
            f"{self.num_tokens} tokens, {self.layout} on {self.tokens.device}"
            f"{', without logprobs' if self.logprobs is None else ''}{extra}>"
        )


def _one_each(batch: Batch) -> Tensor:
    if batch.facts is not None and batch.facts.rows is not None:
        return torch.from_numpy(batch.facts.rows.sample_of.astype(np.int32))
    device = batch.cu_seqlens.device
    return torch.arange(batch.num_sequences, dtype=torch.int32, device=device)


def _known(batch: Batch) -> BatchFacts:
    assert batch.facts is not None, "only a batch of facts lacks tensors"
    return batch.facts


def _of_samples(name: str, dtype: type[Any]) -> Callable[[Batch], Tensor]:
    """Return the maker of a tensor from facts of samples: an element a sequence."""

    def make(batch: Batch) -> Tensor:
        facts = _known(batch)
        values = getattr(facts, name).astype(dtype)
        rows = facts.rows
        return torch.from_numpy(values if rows is None else values[rows.sample_of])

    return make


#: Rarely read tensors, and their makers: in separate memory, since a write to a tensor must not
#: change the rest. Also the fields absent from most batches.
MADE_LATER: Final[dict[str, Callable[[Batch], Any]]] = {
    "scores": _of_samples("scores", np.float32),
    "policy_versions": _of_samples("policy_versions", np.int64),
    "newest_policy_versions": _of_samples("newest_policy_versions", np.int64),
    "group_sizes": lambda batch: torch.from_numpy(_known(batch).sequences_of_groups()),
    "sample_of": _one_each,
    "extra": lambda batch: {},
    "extra_offsets": lambda batch: {},
    "extra_kinds": lambda batch: {},
}


def _own(values: Tensor) -> Tensor:
    """Return a tensor that pickles without the rest of its block."""
    whole = values.untyped_storage().nbytes()
    return values if whole == values.numel() * values.element_size() else values.clone()


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"list [{len(value)}]"


def padded(batch: Batch) -> Batch:
    """Return a padded batch of a packed batch, on its device."""
    device = batch.tokens.device
    borders = batch.cu_seqlens.to(torch.int64)
    total = len(batch.tokens)
    rows = torch.repeat_interleave(
        torch.arange(batch.num_sequences, device=device), borders.diff(), output_size=total
    )
    columns = torch.arange(total, device=device) - borders[rows]

    def wide(packed: Tensor) -> Tensor:
        values = indexable(packed)
        filled = values.new_zeros((batch.num_sequences, batch.max_seqlen, *values.shape[1:]))
        filled[rows, columns] = values
        return filled.view(packed.dtype)

    parts: dict[str, Any] = {name: getattr(batch, name) for name in PER_TOKEN}
    parts = {name: None if packed is None else wide(packed) for name, packed in parts.items()}
    if batch.extra:
        kinds = batch.extra_kinds
        extra = batch.extra.items()
        parts["extra"] = {
            name: wide(value) if kinds[name] == "token" else value for name, value in extra
        }
    return replaced(batch, **parts, layout="padded")


def replaced(batch: Batch, **parts: Any) -> Batch:
    """Return a batch of the same groups with other parts."""
    made = object.__new__(Batch)
    vars(made).update(vars(batch), **parts)
    return made


class BatchFacts(NamedTuple):
    """Figures of the N samples, S sequences and G groups of a batch; N is S without rows."""

    #: int64 [4, N]. Per sample: score as the bits of a float64, oldest policy version, newest
    #: policy version, tokens.
    samples: NDArray[np.int64]
    #: int64 [G]. Samples per group.
    group_sizes: NDArray[np.int64]
    #: Total of the sequences.
    tokens: int
    #: Of samples put with rows, else None.
    rows: RowSplit | None = None

    @property
    def scores(self) -> NDArray[np.float64]:
        """Score per sample: float64 [N]."""
        scores: NDArray[np.float64] = self.samples[0].view(np.float64)
        return scores

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """Oldest version per sample: int64 [N]."""
        versions: NDArray[np.int64] = self.samples[1]
        return versions

    @property
    def newest_policy_versions(self) -> NDArray[np.int64]:
        """Newest version per sample: int64 [N]."""
        newest: NDArray[np.int64] = self.samples[2]
        return newest

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per sequence: int64 [S]."""
        if self.rows is not None:
            return self.rows.lengths
        lengths: NDArray[np.int64] = self.samples[3]
        return lengths

    def sequences_of_groups(self) -> NDArray[np.int64]:
        """Sequences per group: a new int64 [G]."""
        sizes: NDArray[np.int64] = self.group_sizes.copy()
        if self.rows is not None:
            group_of = np.repeat(np.arange(len(sizes)), sizes)
            sizes = np.bincount(group_of[self.rows.sample_of], minlength=len(sizes))
        return sizes
