"""Batch: the tensors of one training step, in packed rows or padded ones.

Invariants:

- A batch holds whole groups, each with its samples ordered by index.
- `cu_seqlens` says where each sequence begins in the packed row, in either layout.
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
from shmbus._format import several
from trainer_adapter.batches.prefix_tree import PrefixTree
from trainer_adapter.batches.tensors import TensorHolder, indexable

__all__ = ["Batch", "BatchFacts", "Layout", "copy_to_device", "pad_batch"]

Layout = Literal["packed", "padded", "prefix"]

#: Tensors of a batch with an element a token.
PER_TOKEN: Final = ("tokens", "position_ids", "loss_mask", "logprobs", "advantages")


def _not_given() -> Any:
    """Stand for a tensor that a caller leaves out."""
    return None


@dataclass(eq=False, repr=False)
class Batch(TensorHolder):
    """One batch of whole groups. T tokens in S sequences, the longest of L tokens.

    Its tensors may share one block of memory, which lives as long as any of them. `clone` a tensor
    that you keep longer than the rest.

    `to` and `pin_memory` return a copy of the same groups, which `OnlineDataHandler.ack` takes as
    well. A batch pickles without its groups: they are leased to this process.

    Attributes
    ----------
    tokens : int64 [T], or [S, L] padded with 0
    position_ids : int64 [T] or [S, L]
        From 0 in every sequence.
    cu_seqlens : int32 [S + 1]
        Where each sequence begins in the packed row; kept for padded batches too.
    max_seqlen : int
        L.
    loss_mask : bool [T] or [S, L]
    logprobs : float32 [T] or [S, L], or None
        The producer's, aligned to their own token; 0 where loss_mask is False. None where the
        groups have none, or where ``FieldNames(logprobs=None)`` says that none are read.
    advantages : float32 [T] or [S, L]
        Broadcast from the group, or the producer's own.
    scores : float32 [S]
    instance_ids : list[str], one a sequence
    policy_versions : int64 [S]
        The oldest of each sample.
    newest_policy_versions : int64 [S]
    sample_of : int32 [S]
        Which sample each sequence belongs to, from 0 in the batch's order. A sample that was put
        with ``rows=`` is a sequence for each row; all others are one.
    group_sizes : int64 [G]
        Sequences of each group, in order: samples, or the rows of samples.
    groups : list[shmbus.Group]
        The leased groups, which `OnlineDataHandler.ack` acknowledges together; none in a batch that
        was pickled.
    layout : "packed" | "padded" | "prefix"
        A batch of the last one is packed, and has a `prefix_tree`.
    step : int
        The handler's count of batches, from 0; -1 for one that `pack` made.
    transport : str
        How it was moved to its device: "cpu", "gather", "pinned" or "copy" (`GpuPacker`).
    extra : dict[str, Tensor | list]
        The `extra_fields` that were asked for. "token": [T, ...] or [S, L, ...]; "sequence":
        [S, ...]; "ragged" and "group": [rows, ...]; "support": [ids]; "meta": a list of S values.
    extra_offsets : dict[str, int64]
        Where the rows of each sequence begin, [S + 1], of a "ragged" one; of each group, [G + 1],
        of a "group" one; of each token, [T + 1], of a "support" one.
    extra_kinds : dict[str, str]
        The kind of each.
    facts : BatchFacts or None
        What is known of it on the host.
    prefix_tree : PrefixTree or None
        What sequences of a group share, once: the model's input of ``layout="prefix"``.
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
    # By a factory, so that the class has no attribute of these names: see __getattr__.
    newest_policy_versions: Tensor = field(default_factory=_not_given)
    sample_of: Tensor = field(default_factory=_not_given)

    def __post_init__(self) -> None:
        # A batch that a caller makes: samples of one row, each of one policy.
        if self.newest_policy_versions is None:
            self.newest_policy_versions = self.policy_versions
        if self.sample_of is None:
            self.sample_of = _one_each(self)

    @classmethod
    def of_facts(cls, facts: BatchFacts, **parts: Any) -> Batch:
        """Make a batch whose tensors of sequences are made when they are first asked for.

        Parameters
        ----------
        facts : BatchFacts
            Of samples of one row each.
        **parts
            The other attributes, but for those that have a default.

        Returns
        -------
        Batch
        """
        made = object.__new__(cls)
        vars(made).update(parts, facts=facts)
        return made

    if not TYPE_CHECKING:  # mypy would let any name pass

        def __getattr__(self, name: str) -> Any:
            make = MADE_LATER.get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            found = vars(self)[name] = make(self)
            return found

    def _complete(self) -> None:
        """Make what nobody has asked for yet."""
        for name in MADE_LATER:
            getattr(self, name)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        self._complete()
        return super()._with(change)

    @property
    def total_tokens(self) -> int:
        """T, as `num_tokens`."""
        return self.num_tokens

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; without waiting for the device, of a batch that was packed."""
        if self.facts is not None:
            return [int(length) for length in self.facts.lengths.tolist()]
        return [int(length) for length in self.cu_seqlens.diff().tolist()]

    def asdict(self) -> dict[str, Any]:
        """Return tensors and values by their names, without the groups, for a function or a file.

        Returns
        -------
        dict
            The attributes of this batch; tensors are not copied. `extra` and `extra_offsets` are
            dicts in it.
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
            f"<Batch{step}: {several(groups, 'group')}, {several(self.sequences, 'sequence')}, "
            f"{self.total_tokens} tokens, {self.layout} on {self.tokens.device}"
            f"{', without logprobs' if self.logprobs is None else ''}{extra}>"
        )


def _one_each(batch: Batch) -> Tensor:
    device = batch.cu_seqlens.device
    return torch.arange(batch.sequences, dtype=torch.int32, device=device)


def _known(batch: Batch) -> BatchFacts:
    assert batch.facts is not None, "only a batch of facts lacks tensors"
    return batch.facts


#: Tensors that a trainer rarely reads, and how each is made: of memory of its own, so that what is
#: written to one changes nothing else. And the fields that most batches lack.
MADE_LATER: Final[dict[str, Callable[[Batch], Any]]] = {
    "scores": lambda batch: torch.from_numpy(_known(batch).scores.astype(np.float32)),
    "policy_versions": lambda batch: torch.from_numpy(_known(batch).policy_versions.copy()),
    "newest_policy_versions": lambda batch: torch.from_numpy(
        _known(batch).newest_policy_versions.copy()
    ),
    "group_sizes": lambda batch: torch.from_numpy(_known(batch).group_sizes.copy()),
    "sample_of": _one_each,
    "extra": lambda batch: {},
    "extra_offsets": lambda batch: {},
    "extra_kinds": lambda batch: {},
}


def _own(values: Tensor) -> Tensor:
    """Return a tensor that pickles without the rest of the block that it lies in."""
    whole = values.untyped_storage().nbytes()
    return values if whole == values.numel() * values.element_size() else values.clone()


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"list [{len(value)}]"


def pad_batch(batch: Batch) -> None:
    """Turn a packed batch into a padded one, in place, on its device."""
    device = batch.tokens.device
    borders = batch.cu_seqlens.to(torch.int64)
    total = len(batch.tokens)
    rows = torch.repeat_interleave(
        torch.arange(batch.sequences, device=device), borders.diff(), output_size=total
    )
    columns = torch.arange(total, device=device) - borders[rows]

    def padded(packed: Tensor) -> Tensor:
        values = indexable(packed)
        wide = values.new_zeros((batch.sequences, batch.max_seqlen, *values.shape[1:]))
        wide[rows, columns] = values
        return wide.view(packed.dtype)

    for name in PER_TOKEN:
        packed: Tensor | None = getattr(batch, name)
        if packed is not None:
            setattr(batch, name, padded(packed))
    for name, kind in batch.extra_kinds.items():
        if kind == "token":
            batch.extra[name] = padded(batch.extra[name])
    batch.layout = "padded"


def copy_to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on another device, with the same groups."""
    copied = batch.to(device)
    copied.transport = "copy"
    return copied


class BatchFacts(NamedTuple):
    """Figures of the N samples, S sequences and G groups of a batch; N is S without rows."""

    #: int64 [4, N]. Of each sample its score, the bits of a float64, its policy version, the newest
    #: one, and its tokens.
    samples: NDArray[np.int64]
    #: int64 [G]. Samples of each group.
    group_sizes: NDArray[np.int64]
    #: Of all sequences.
    tokens: int
    #: int64 [S] or None. Tokens of each sequence, where samples have several.
    row_lengths: NDArray[np.int64] | None = None

    @property
    def scores(self) -> NDArray[np.float64]:
        """Of each sample: float64 [N]."""
        scores: NDArray[np.float64] = self.samples[0].view(np.float64)
        return scores

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """Of each sample the oldest: int64 [N]."""
        versions: NDArray[np.int64] = self.samples[1]
        return versions

    @property
    def newest_policy_versions(self) -> NDArray[np.int64]:
        """Of each sample: int64 [N]."""
        newest: NDArray[np.int64] = self.samples[2]
        return newest

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence: int64 [S]."""
        if self.row_lengths is not None:
            return self.row_lengths
        lengths: NDArray[np.int64] = self.samples[3]
        return lengths
