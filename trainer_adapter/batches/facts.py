"""What is known of a batch on the host, however it came to its device.

Invariant: nothing here waits for a device, nor holds the ring or a block of a batch's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BatchFacts"]


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
