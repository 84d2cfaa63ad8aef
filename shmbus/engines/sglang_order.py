"""What a trainer tells each rank of an SGLang server: one order, in the name of an empty tensor.

SGLang hands a custom loader the model and a list of named tensors, which it unpickles from the
request; nothing else reaches it. So its few opcodes are written here by hand; nothing is unpickled.

Source: sglang/srt/managers/tp_worker.py (`deserialize_own_rank`) and
sglang/srt/model_executor/model_runner_components/weight_updater.py of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import struct
from typing import Literal

import msgspec

#: What `--custom-weight-loader` takes, and an update names as its load format.
LOADER = "shmbus.engines.sglang_loader.load"


#: ``[(`` a text ``, torch.Tensor())]`` in protocol 2. `torch.Tensor` is among what SGLang's own
#: unpickler allows, and without arguments it has no elements.
_BEFORE = b"\x80\x02]X"  # protocol 2, an empty list, a text of so many bytes
_AFTER = b"ctorch\nTensor\n)R\x86a."  # torch.Tensor, no arguments, call, pair, append, end


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shmbus/1"):
    """What a rank is to do."""

    verb: Literal["attach", "load"]
    bus: str
    server: str
    rank: int
    version: int | None = None


def order_for_rank(order: Order) -> str:
    """Return an order as SGLang takes it: a list of named tensors as a pickle, in base64."""
    name = msgspec.json.encode(order)
    return base64.b64encode(_BEFORE + struct.pack("<I", len(name)) + name + _AFTER).decode()


def read_order(name: str) -> Order:
    """Read an order from a tensor's name."""
    try:
        return msgspec.json.decode(name, type=Order)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{name[:200]!r} is no order of this version of shmbus ({error}); install the same "
            "version for the trainer and the server"
        ) from error
