"""What is known of a batch on the host, however it came to its device.

Invariant: nothing here waits for a device, nor holds the ring or a block of a batch's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BatchFacts"]


class BatchFacts(NamedTuple):
    """Figures of the N samples, S sequences and G groups of a batch; N is S unless some have rows.

    Attributes
    ----------
    scores : float64 [N]
    policy_versions : int64 [N]
    lengths : list[int] [S]
        Tokens of each sequence.
    tokens : int
        Of all sequences.
    group_sizes : int64 [G]
        Samples of each group.
    """

    scores: NDArray[np.float64]
    policy_versions: NDArray[np.int64]
    lengths: list[int]
    tokens: int
    group_sizes: NDArray[np.int64]
