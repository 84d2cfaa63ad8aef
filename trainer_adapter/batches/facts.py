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
    lengths : int64 [S]
        Tokens of each sequence.
    group_sizes : int64 [G]
        Samples of each group.
    packed_s : float
        Seconds that packing took, and the way to the device; 0 where nobody measured it.
    """

    scores: NDArray[np.float64]
    policy_versions: NDArray[np.int64]
    lengths: NDArray[np.int64]
    group_sizes: NDArray[np.int64]
    packed_s: float = 0.0

    @classmethod
    def of(
        cls,
        scores: NDArray[np.float64],
        policy_versions: NDArray[np.int64],
        cu_seqlens: NDArray[np.int32],
        group_sizes: NDArray[np.int64],
    ) -> BatchFacts:
        """Make them of a batch whose sequences lie between borders, int32 [S + 1]."""
        lengths = np.subtract(cu_seqlens[1:], cu_seqlens[:-1], dtype=np.int64)
        return cls(scores, policy_versions, lengths, group_sizes)
