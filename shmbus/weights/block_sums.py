"""Digests of a payload that lies on a device: computed there, a block a number.

A digest is the sum of the block's 64-bit words, each times an odd number of its own, modulo 2^64:
one changed word changes it, and so do two that changed places. It is against scribbles, as the
pool's checksums are, not against whoever wants to deceive.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

__all__ = ["BLOCK_BYTES", "block_sum", "block_sums", "blocks_of"]

#: Bytes that one digest covers, as in a pool.
BLOCK_BYTES: Final = 16 << 20

_WORD_BYTES: Final = 8


def blocks_of(size: int) -> int:
    """Return how many digests a payload of so many bytes has."""
    return -(-size // BLOCK_BYTES)


@functools.lru_cache(maxsize=4)
def _factors(device: torch.device) -> torch.Tensor:
    words = torch.arange(BLOCK_BYTES // _WORD_BYTES, dtype=torch.int64, device=device)
    # Knuth's multiplier spreads neighbours over all 64 bits; odd, so that no change is lost.
    return (words * 6364136223846793005 + 1442695040888963407) | 1


def block_sum(payload: torch.Tensor, block: int) -> int:
    """Return the digest of one block.

    Parameters
    ----------
    payload : uint8 [bytes]
        On any device; a multiple of 8 bytes.
    block : int
        Which.

    Returns
    -------
    int
        An int64.
    """
    words = payload[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].view(torch.int64)
    return int((words * _factors(payload.device)[: words.numel()]).sum())


def block_sums(payload: torch.Tensor) -> list[int]:
    """Return the digest of each block."""
    return [block_sum(payload, block) for block in range(blocks_of(payload.numel()))]
