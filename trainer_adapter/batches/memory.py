"""Memory for batches, reused from batch to batch.

Invariant: a block is reused only after its last tensor, array or view.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Blocks are rounded up to this many bytes, to be shared by batches of similar size: a huge page of
#: x86-64, and of aarch64 with pages of 4 KiB.
BLOCK_BYTES: Final = 2 << 20
#: Blocks kept for another batch; a block in use, a block being filled, and a block on its way to
#: the device.
BLOCKS_KEPT: Final = 4


class BatchMemory:
    """A pool of memory blocks for batches, since fresh pages cost more than filling them."""

    # A block is free when this pool holds the only reference: tensors and arrays of a batch refer
    # to their block, so a kept tensor is never overwritten.

    def __init__(self) -> None:
        #: The pool: a user of a block holds a reference to the block.
        self.blocks: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block from the pool, or a new one."""
        blocks = self.blocks
        # References to a free block: the list's, and the argument of getrefcount.
        for position in range(len(blocks)):
            if sys.getrefcount(blocks[position]) == 2 and blocks[position].nbytes >= size:
                return blocks[position]
        block = self.fresh(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
        if len(blocks) >= BLOCKS_KEPT:
            del blocks[0]
        blocks.append(block)
        return block

    def fresh(self, size: int) -> NDArray[np.uint8]:
        """Return a new block, in huge pages if the system provides them."""
        # Packing into huge pages is some 5% faster: a batch needs a page or two instead of
        # hundreds.
        pages = mmap.mmap(-1, size + BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        # Not a slice: a slice's views refer to its base, and the pool counts references to the
        # block.
        start = -np.frombuffer(pages, np.uint8).ctypes.data % BLOCK_BYTES
        return np.frombuffer(pages, np.uint8, count=size, offset=start)
