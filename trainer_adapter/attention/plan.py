"""The plan of a packed batch for SDPA: groups of sequences per call, by lengths and window alone.

A *bucket* is one call: one sequence, or several of like shape padded to one.

Invariants:

- Pure numpy: no tensor, no device, no clock. Equal lengths give equal plans.
- A plan holds only rows with a visible key and keys visible to a row, each in one slot of one
  bucket. So a plan contains no blind row; SDPA kernels disagree on blind rows.
- Padding never costs more than one further call for each bucket.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

CALL_WORK: Final = {"cpu": 2**19, "cuda": 2**31}
"""Cost of one more SDPA call, forward and backward, in multiply-adds of the score matrix (rows x
keys x heads x head dimension) that the device does in that time: 0.1 ms on one CPU core at 5e9 a
second; on a GPU, 0.1 ms at 2e13 a second. There the host needs 0.3 ms a call, but it is ahead of
the device as long as calls are large, and padding costs memory too."""

MOVE_KEYS: Final = {"cpu": 32, "cuda": 160}
"""Cost of copying a slot to its bucket and back, with its gradients, in keys that its row could see
in that time: some 16 passes over its bytes at 10 GB/s on one CPU core, at 4 TB/s on a GPU. A
sequence alone in its bucket is not copied; padding is copied as tokens are."""

MASK_ELEMENTS: Final = 2**23
"""Most elements of one mask: 8 MiB of bool, and 32 MiB where SDPA turns it into float32."""

MIN_BLOCK_ROWS: Final = 128
"""Fewest rows of a block under a mask, since kernels work on tiles of 64 to 128 rows."""

UNLIMITED: Final = -1
"""In a window: no limit on that side, as in `torch.nn.attention.varlen`."""

Window = tuple[int, int]
IntArray = npt.NDArray[np.int64]
Kind = Literal["full", "causal", "band"]


@dataclass(frozen=True)
class Bucket:
    """Sequences of one SDPA call, without blind rows and unseen keys."""

    #: "full": each row sees each key. "causal": the diagonal begins in the first row, and hides all
    #: padding. "band": any other case.
    kind: Kind
    #: Common padded shape.
    rows: int
    keys: int
    #: int64 [B]. Real rows and keys of each sequence, and the key aligned with its first row.
    row_counts: IntArray
    key_counts: IntArray
    diagonals: IntArray


@dataclass(frozen=True, eq=False)
class Moves:
    """The moves of queries, or of keys: packed rows to the slots of all buckets, and back."""

    #: Packed row of each slot, or -1 for padding.
    slots: IntArray
    #: int64 [T]. Slot of each packed row, or -1 for a row outside of every bucket.
    places: IntArray
    #: Sequences of the bucket; their total of slots; the first packed row of consecutive slots, and
    #: -1 for scattered slots.
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    #: Slots equal packed rows.
    identity: bool


@dataclass(frozen=True)
class Plan:
    """The buckets of a packed batch, and the moves of its tokens to them and back."""

    buckets: tuple[Bucket, ...]
    queries: Moves
    keys: Moves
    window: Window


@functools.lru_cache(maxsize=8)
def make_plan(lengths_q: bytes, lengths_k: bytes, window: Window, work: int, device: str) -> Plan:
    """Trim blind rows and unseen keys off each sequence, and assign sequences to calls."""
    n_q = np.frombuffer(lengths_q, np.int64)
    n_k = np.frombuffer(lengths_k, np.int64)
    left, right = window
    # With the last row and key aligned, only rows before the first key can be blind, and only
    # keys before the first row's window can be unseen.
    diagonal = n_k - n_q
    blind = np.clip(-(diagonal + right), 0, n_q) if right != UNLIMITED else np.zeros_like(n_q)
    blind = np.where(n_k == 0, n_q, blind)
    unseen = np.clip(blind + diagonal - left, 0, n_k) if left != UNLIMITED else np.zeros_like(n_q)
    rows, keys, diagonal = n_q - blind, n_k - unseen, diagonal + blind - unseen

    all_ahead = (diagonal + right >= keys - 1) | (right == UNLIMITED)
    all_behind = (diagonal + rows - 1 - left <= 0) | (left == UNLIMITED)
    square = (diagonal + right == 0) & (rows == keys) & (right != UNLIMITED)
    kinds: dict[Kind, npt.NDArray[np.bool_]] = {
        "full": all_ahead & all_behind,
        "causal": square & all_behind & ~all_ahead,
        "band": ~all_behind | ~(all_ahead | square),
    }
    call_work = CALL_WORK.get(device, CALL_WORK["cuda"]) // work
    move_keys = MOVE_KEYS.get(device, MOVE_KEYS["cuda"])
    groups: list[tuple[Kind, list[int]]] = []
    for kind, members in kinds.items():
        candidates = np.flatnonzero(members & (rows > 0))
        costs = call_work, move_keys
        for group in map(sorted, _grouped(candidates, rows, keys, costs, kind, window)):
            whole = (rows[group] == n_q[group]).all() and (keys[group] == n_k[group]).all()
            neighbours = group[-1] - group[0] == len(group) - 1
            shares = _worth_sharing(rows[group], keys[group], costs, bool(whole and neighbours))
            groups += [(kind, group)] if shares else [(kind, [i]) for i in group]
    # In the order of the batch, sequences with their own call stay views of the batch.
    groups.sort(key=lambda group: group[1][0])
    return _laid_out(groups, n_q, n_k, rows, keys, diagonal, window)


def _worth_sharing(rows: IntArray, keys: IntArray, costs: tuple[int, int], together: bool) -> bool:
    """Return True if a shared call costs less than separate calls, copies included."""
    # Neighbours in the packed row, of one shape, need no copy.
    call_work, move_keys = costs
    slots = int(rows.max()) * len(rows), int(keys.max()) * len(rows)
    padding = slots[0] * int(keys.max()) - int((rows * keys).sum())
    moved = 0 if together and padding == 0 else sum(slots) // 2
    return (len(rows) - 1) * call_work >= padding + move_keys * moved


def _laid_out(
    groups: list[tuple[Kind, list[int]]],
    n_q: IntArray,
    n_k: IntArray,
    rows: IntArray,
    keys: IntArray,
    diagonal: IntArray,
    window: Window,
) -> Plan:
    buckets = tuple(
        Bucket(kind, int(rows[m].max()), int(keys[m].max()), rows[m], keys[m], diagonal[m])
        for kind, m in groups
    )
    ends_q, ends_k = np.cumsum(n_q), np.cumsum(n_k)
    queries = _moves([(ends_q[m] - rows[m], rows[m]) for _, m in groups], int(n_q.sum()))
    all_keys = _moves([(ends_k[m] - keys[m], keys[m]) for _, m in groups], int(n_k.sum()))
    return Plan(buckets, queries, all_keys, window)


def _grouped(
    candidates: IntArray,
    rows: IntArray,
    keys: IntArray,
    costs: tuple[int, int],
    kind: Kind,
    window: Window,
) -> list[list[int]]:
    """Group sequences of one kind, the largest first, into calls."""
    # A sequence joins the open group if the whole padding, moved and attended like real tokens,
    # then stays below the work of one more call. So padding costs at most as much as the calls, and
    # equal lengths share a call for free.
    call_work, move_keys = costs
    order = candidates[np.lexsort((keys[candidates], rows[candidates]))][::-1]
    groups: list[list[int]] = []
    most_rows = most_keys = real = 0
    for index, n_rows, n_keys in zip(
        order.tolist(), rows[order].tolist(), keys[order].tolist(), strict=True
    ):
        wider = max(most_keys, n_keys)
        members = len(groups[-1]) + 1 if groups else 0
        area = most_rows * wider * members
        own = n_rows * n_keys + move_keys * (n_rows + n_keys) // 2
        whole = area + move_keys * (most_rows + wider) * members // 2
        joins = area > 0 and whole - real - own <= call_work
        if kind == "band":
            one_block = most_rows <= block_rows(wider, window)
            joins = joins and one_block and area <= MASK_ELEMENTS
        if joins:
            groups[-1].append(index)
            most_keys, real = wider, real + own
        else:
            groups.append([index])
            most_rows, most_keys, real = n_rows, n_keys, own
    return groups


def block_rows(keys: int, window: Window) -> int:
    """Return how many rows of a band share a call; few under a narrow window, to hide few keys."""
    width = keys if UNLIMITED in window else min(keys, sum(window) + 1)
    return max(MIN_BLOCK_ROWS, min(width, MASK_ELEMENTS // (2 * width)))


def _moves(groups: list[tuple[IntArray, IntArray]], tokens: int) -> Moves:
    """Lay out the slots; each group holds the first row and the number of rows of its sequences."""
    padded = []
    for starts, counts in groups:
        column = np.arange(counts.max())
        inside = column < counts[:, None]
        padded.append(np.where(inside, starts[:, None] + column, -1).ravel())
    slots = np.concatenate([np.empty(0, np.int64), *padded])
    places = np.full(tokens, -1, np.int64)
    real = np.flatnonzero(slots >= 0)
    places[slots[real]] = real
    return Moves(
        slots,
        places,
        tuple(len(counts) for _, counts in groups),
        tuple(map(len, padded)),
        tuple(_first_of_run(part) for part in padded),
        identity=np.array_equal(slots, np.arange(tokens)),
    )


def _first_of_run(rows: IntArray) -> int:
    """Return the first of consecutive rows, -1 for scattered rows."""
    first = int(rows[0])
    return first if np.array_equal(rows, np.arange(first, first + len(rows))) else -1
