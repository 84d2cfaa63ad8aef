"""Tensors over the bytes of a payload, without a copy."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from shmbus.pool import copy_bytes

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor

#: Bytes at multiples of which tensors begin: the widest vector and DMA access.
ALIGNMENT: Final = 256

#: Bytes of an element, by torch's names of dtypes.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


class TensorPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


#: It takes half a second to load, so it is never loaded here: where nobody has, nothing is one.
_MODULE: Final = "torch.distributed.tensor"

_first_use = threading.Lock()
_warned = False


def payload_tensor(memory: Any) -> torch.Tensor:
    """View a buffer as a tensor of bytes."""
    global _warned
    if _warned or not memoryview(memory).readonly:
        return torch.frombuffer(memory, dtype=torch.uint8)
    with _first_use, warnings.catch_warnings():
        # Torch says once a process that it knows no read-only tensors.
        warnings.filterwarnings("ignore", message=".*not writable")
        made = torch.frombuffer(memory, dtype=torch.uint8)
        _warned = True
        return made


def unowned(payload: torch.Tensor) -> torch.Tensor:
    """View the same bytes without keeping them: for whoever keeps their memory in another way."""
    span: Any = (ctypes.c_uint8 * payload.numel()).from_address(payload.data_ptr())
    return torch.frombuffer(span, dtype=torch.uint8)


def tensor_at(payload: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """View one tensor of a payload."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    offset = place.offset // dtype.itemsize
    strides = [1] * len(place.shape)
    for dim in range(len(place.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(place.shape[dim + 1], 1)
    return torch.empty(0, dtype=dtype, device=payload.device).set_(
        payload.untyped_storage(), offset, place.shape, tuple(strides)
    )


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write by address in ``Tensor._version``, by which modules renew derived copies."""
    increment_version(list(tensors))


def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy like ``target.copy_(source)``; plain bytes in large pieces past the caches."""
    if is_plain_copy(target, source):
        copy_bytes(byte_view(target), byte_view(source))
    else:
        target.copy_(source)


def is_plain_copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy is one of bytes, in host memory."""
    return (
        target.dtype == source.dtype
        and target.device.type == source.device.type == "cpu"
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and target.numel() > 0
        and not (source.is_conj() or source.is_neg())
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in its storage."""
    count = tensor.numel()
    if count == 0:
        return True
    last = count - 1
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= end)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in other tensors, as those of a wrapper do."""
    return torch.Tensor.data_ptr(tensor) == 0 and torch.Tensor.numel(tensor) > 0


def byte_view(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """View a contiguous CPU tensor as its bytes."""
    # Contiguous is also a single element of any stride, which a view as bytes would refuse.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    array: npt.NDArray[np.uint8] = flat.numpy()
    return array


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor."""
    # Another thread may be about to load it: until the class is there, nothing is one.
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
