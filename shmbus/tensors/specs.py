"""What both sides say of a step's tensors, and whether it agrees. Pure: no segment, no clock.

Invariant: the same two statements give the same differences on both sides, so each side decides for
itself, and no death can leave a decision half made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from shmbus._arguments import check_int, is_text
from shmbus.channel import ChannelError
from shmbus.weights.manifest import DTYPE_BYTES
from shmbus.weights.memory import has_memory

__all__ = [
    "SpecMismatchError",
    "Statement",
    "TensorSpec",
    "differences",
    "is_there",
    "parse_specs",
    "specs_of",
    "step_differences",
    "unsendable",
]

#: Of a dimension: more than any memory has, and every reader's integers hold it.
_MOST_SIZE: Final = (1 << 63) - 1


class SpecMismatchError(ChannelError):
    """What is sent is not what is expected; both sides get it, with both specs."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a step.

    Attributes
    ----------
    dtype : str
        Torch's name, such as "bfloat16".
    shape : tuple of int | None
        None for a dimension that may vary.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        shape = ", ".join("*" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{shape}]"


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side has stated in the segment.

    Attributes
    ----------
    specs : dict of TensorSpec
        By the tensors' names.
    exact : bool
        Whether the shapes were declared; if not, they are those of the first step.
    refused : str
        Why a later step was not what was agreed; "" for nothing.
    claim : int
        Which process of its side has stated it, by their count; what a dead one said is not held
        against its successor.
    """

    specs: dict[str, TensorSpec]
    exact: bool = True
    refused: str = ""
    claim: int = 0


def parse_specs(specs: Mapping[Any, Any]) -> dict[str, TensorSpec]:
    """Check what a user says of the tensors.

    Parameters
    ----------
    specs : mapping of name to (dtype, shape)
        Dtypes by name or as torch's; None in a shape for a dimension that may vary.

    Returns
    -------
    dict of TensorSpec

    Raises
    ------
    TypeError, ValueError
        An entry is none.
    """
    if not isinstance(specs, Mapping):
        raise TypeError(f"specs: expected (dtype, shape) by name, got {type(specs).__name__}")
    parsed = {}
    for name, spec in specs.items():
        if not isinstance(name, str):
            raise TypeError(f"specs: expected names as str, got {name!r}")
        if not is_text(name):
            raise ValueError(f"specs: expected names that UTF-8 can encode, got {name!a}")
        dtype: Any
        shape: Any
        if isinstance(spec, TensorSpec):
            dtype, shape = spec.dtype, spec.shape
        else:
            try:
                dtype, shape = spec
            except (TypeError, ValueError):
                raise TypeError(f"specs[{name!r}]: expected (dtype, shape), got {spec!r}") from None
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"specs[{name!r}]: expected a dtype of torch, got {dtype!r}")
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"specs[{name!r}]: expected a shape, got {shape!r}")
        parsed[name] = TensorSpec(dtype, tuple(_parsed_size(name, size) for size in shape))
    return parsed


def _parsed_size(name: str, size: object) -> int | None:
    if size is None:
        return None
    try:
        return check_int("size", size, 0, _MOST_SIZE)
    except (TypeError, ValueError):
        raise ValueError(
            f"specs[{name!r}]: expected sizes from 0 on, or None for one that varies, got {size!r}"
        ) from None


def unsendable(tensor: torch.Tensor, device: torch.device) -> str:
    """Say why a tensor cannot be sent from a device; empty where it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "expected a shape, got a parameter before its module's first forward pass"
    if tensor.device != device:
        return f"expected a tensor on the agreed device {str(device)!r}, got {str(tensor.device)!r}"
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else "one"
        return (
            f"expected a plain tensor, got {kind} of the layout {tensor.layout}; call to_dense(), "
            "or send its parts"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return f"expected one of the dtypes {', '.join(DTYPE_BYTES)}, got {dtype}"
    if not tensor.is_contiguous():
        return f"expected a contiguous tensor, got strides {tensor.stride()}"
    if tensor.numel() == 0:
        return f"expected elements, got shape {list(tensor.shape)}; use skip()"
    if not is_there(tensor):
        return (
            "expected a tensor with memory for all of its elements; its storage was freed or cut, "
            "as FSDP does between forward passes, or it stands for others, as in a transform of "
            "torch.func or FakeTensorMode"
        )
    return ""


def is_there(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor has memory for all of its elements, on its device."""
    try:
        return has_memory(tensor) and tensor.untyped_storage().device == tensor.device
    except NotImplementedError:  # torch's word for a tensor without a storage
        return False


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Describe tensors as they are."""
    return {
        name: TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def differences(sent: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> list[str]:
    """Say where two specs contradict each other; a free dimension contradicts nothing."""
    found = [
        f"tensor {name!r} is expected ({expected[name]}) and not sent"
        for name in sorted(expected.keys() - sent.keys())
    ]
    found += [
        f"tensor {name!r} is sent ({sent[name]}) and not expected"
        for name in sorted(sent.keys() - expected.keys())
    ]
    for name in sorted(sent.keys() & expected.keys()):
        ours, theirs = sent[name], expected[name]
        fits = len(ours.shape) == len(theirs.shape) and all(
            a is None or b is None or a == b for a, b in zip(ours.shape, theirs.shape, strict=True)
        )
        if ours.dtype != theirs.dtype or not fits:
            found.append(f"tensor {name!r}: expected {theirs}, sent {ours}")
    return found


def step_differences(
    step: Mapping[str, TensorSpec], sender: Statement | None, receiver: Statement | None
) -> list[str]:
    """Say how a step differs from what was agreed.

    A sender that declared nothing is held to the names, dtypes and ranks of its first step.
    """
    found: list[str] = []
    if receiver is not None:
        found += differences(step, receiver.specs)
    if sender is not None and not found:
        specs = sender.specs
        if not sender.exact:
            specs = {
                name: TensorSpec(spec.dtype, (None,) * len(spec.shape))
                for name, spec in specs.items()
            }
        found += differences(step, specs)
    return found


def show(specs: Mapping[str, TensorSpec]) -> str:
    """Show specs in an error."""
    return "{" + ", ".join(f"{name}: {spec}" for name, spec in sorted(specs.items())) + "}"


def size_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor without free dimensions."""
    return DTYPE_BYTES[spec.dtype] * math.prod(size or 0 for size in spec.shape)


def acked_step_of(state: object) -> int:
    """Return what a `state_dict` says; TypeError or ValueError for anything else."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected what state_dict() returned, got {type(state).__name__}")
    if "acked_step" not in state:
        raise ValueError(f"state: expected 'acked_step' of state_dict(), got {sorted(state)}")
    return check_int("acked_step", state["acked_step"], -1, (1 << 63) - 2)
