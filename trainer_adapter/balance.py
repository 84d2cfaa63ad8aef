"""Division of sequences, or whole groups, into parts of about equal tokens.

Pure functions: equal lengths give equal parts, on every rank and every machine.

Invariants:

- Every item is in exactly one part, and the items of a part are in ascending order.
- `balance` is longest-first greedy. The fullest part has at most ``4/3 - 1/(3 * parts)`` times the
  tokens of the best division (Graham 1969, "Bounds on Multiprocessing Timing Anomalies", SIAM J.
  Appl. Math. 17(2)), and no two parts differ by more than the longest item.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmbus.base.arguments import check_int

__all__ = ["balance", "by_budget"]

Parts = list[list[int]]
Lengths: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"


def balance(lengths: Lengths, parts: int) -> Parts:
    """Divide items into a number of parts with about equal sums.

    Parameters
    ----------
    lengths : sequence or array of int, [n]
        Tokens of each item, 0 or more; or a different whole-numbered cost.
    parts : int
        Number of parts, for instance data-parallel ranks.

    Returns
    -------
    list[list[int]], [parts]
        Positions of the items of each part. The largest sum of lengths is at most ``4/3 - 1/(3 *
        parts)`` times the smallest possible, and no two sums differ by more than the longest item.

    Raises
    ------
    TypeError, ValueError
        A negative length; no part; fewer items than parts, since a rank without items would leave
        its peers waiting; parts of another type than int.
    """
    parts = check_int("parts", parts, 1)
    costs: list[int] = np.asarray(lengths).tolist()
    if any(length < 0 for length in costs):
        raise ValueError(f"lengths: expected 0 or more, got {min(costs)}")
    if len(costs) < parts:
        raise ValueError(
            f"parts: expected at most {len(costs)}, one item for each, got {parts}; lower "
            "world_size, or put more groups into a batch"
        )
    return _longest_first(costs, parts, _order(costs))


def by_budget(lengths: Lengths, budget: int) -> Parts:
    """Divide items into few parts, none with a sum above a budget.

    Parameters
    ----------
    lengths : sequence or array of int, [n]
        Tokens of each item, 0 or more.
    budget : int
        Most tokens of a part.

    Returns
    -------
    list[list[int]]
        Positions of the items of each part; at most ``11/9`` of the fewest parts possible, plus one
        (first-fit decreasing: Dosa 2007), balanced if the number of parts allows.

    Raises
    ------
    TypeError, ValueError
        An item above the budget, named in the message. Or a budget of another type than int.
    """
    budget = check_int("budget", budget)
    costs: list[int] = np.asarray(lengths).tolist()
    for position, length in enumerate(costs):
        if length > budget:
            raise ValueError(
                f"lengths: expected at most {budget} tokens, as the budget says, got {length} at "
                f"{position}; raise the budget"
            )
    if not costs:
        return []
    order = _order(costs)
    fewest = max(1, -(-sum(costs) // budget) if budget else 1)
    for count, length in enumerate(map(costs.__getitem__, order), 1):
        if length:  # so many items of at least this length need so many parts
            fewest = max(fewest, -(-count // (budget // length)))
    found: dict[int, Parts] = {}

    def fits(parts: int) -> bool:
        shared = _longest_first(costs, parts, order, budget)
        if shared:
            found[parts] = [part for part in shared if part]
        return bool(shared)

    if fits(fewest):
        return found[fewest]
    fitted = _first_fit(costs, order, budget, 2 * fewest + 1)
    parts = fewest + 1 + bisect_left(range(fewest + 1, len(fitted) + 1), True, key=fits)
    return found[parts] if parts in found else [sorted(part) for part in fitted]


def _order(lengths: Sequence[int]) -> list[int]:
    """Longest first, and of equals the first first."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _longest_first(
    lengths: Sequence[int], parts: int, order: Sequence[int], most: float = math.inf
) -> Parts:
    """Give each item, the longest first, to the emptiest part; no parts if `most` is exceeded."""
    shared: Parts = [[] for _ in range(parts)]
    # By tokens, then by items: an item of length 0 goes to an empty part.
    least = [(0, 0, part) for part in range(parts)]
    for item in order:
        tokens, items, part = least[0]
        if tokens + lengths[item] > most:
            return []
        shared[part].append(item)
        heapq.heapreplace(least, (tokens + lengths[item], items + 1, part))
    return [sorted(part) for part in shared]


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int, most: int) -> Parts:
    """Put each item, the longest first, into the first part with room; `most` parts at most."""
    shared: Parts = [[] for _ in range(most)]
    # A tree of maxima over the room of each part: leaf `leaves + p` stands for part p.
    leaves = 1 << (most - 1).bit_length()
    room = [budget] * (2 * leaves)
    for item in order:
        length, at = lengths[item], 1
        while at < leaves:
            at *= 2
            at += room[at] < length
        shared[at - leaves].append(item)
        room[at] -= length
        while at > 1:
            at //= 2
            larger = max(room[2 * at], room[2 * at + 1])
            if room[at] == larger:
                break
            room[at] = larger
    return [part for part in shared if part]
