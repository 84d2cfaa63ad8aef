"""Whether a tensor is a shard of a larger one: a DTensor, as FSDP2 and tensor parallelism make it.

Torch's module of DTensors takes half a second to load, so this never loads it: a publisher of whole
tensors, and a server of one device, start without it.

Invariant: what is made by that module is known only after somebody has loaded it, so where nobody
has, no tensor is a DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded"]

_MODULE: Final = "torch.distributed.tensor"


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor.

    Parameters
    ----------
    tensor : object
        Anything.

    Returns
    -------
    bool
    """
    # Another thread may be about to load it: until the class is there, nothing is one.
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
