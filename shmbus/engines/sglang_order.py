"""Order from a trainer to each rank of an SGLang server, in the name of an empty tensor.

SGLang hands a custom loader only the model and a list of named tensors, unpickled from the
request. shmbus therefore writes the few opcodes by hand, and unpickles nothing itself.

Source: sglang/srt/managers/tp_worker.py (`deserialize_own_rank`) and
sglang/srt/model_executor/model_runner_components/weight_updater.py of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import struct
from typing import Literal

import msgspec

from shmbus.data.encoding import decodable

#: Value of `--custom-weight-loader`, and the load format of an update.
LOADER = "shmbus.engines.sglang_loader.load"


#: ``[(`` a text ``, torch.Tensor())]`` in protocol 2. SGLang's own unpickler allows
#: `torch.Tensor`, empty without arguments.
_BEFORE = b"\x80\x02]X"  # protocol 2, an empty list, a text of the given bytes
_AFTER = b"ctorch\nTensor\n)R\x86a."  # torch.Tensor, no arguments, call, pair, append, end


@decodable
class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shmbus/1"):
    """A rank's order."""

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
