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
    """A tensor's spec and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


#: Never imported here, at half a second: before anyone imported it, no DTensor exists.
_MODULE: Final = "torch.distributed.tensor"

_first_use = threading.Lock()
_warned = False


def payload_tensor(memory: Any) -> torch.Tensor:
    """View a buffer as a tensor of bytes."""
    global _warned
    if _warned or not memoryview(memory).readonly:
        return torch.frombuffer(memory, dtype=torch.uint8)
    with _first_use, warnings.catch_warnings():
        # Torch warns once per process about missing support for read-only tensors.
        warnings.filterwarnings("ignore", message=".*not writable")
        made = torch.frombuffer(memory, dtype=torch.uint8)
        _warned = True
        return made


def unowned(payload: torch.Tensor) -> torch.Tensor:
    """View the same bytes without keeping them: the caller keeps their memory alive."""
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
    """Return whether a copy moves plain bytes in host memory."""
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
    """Return whether every element of a tensor lies in its storage."""
    count = tensor.numel()
    if count == 0:
        return True
    last = count - 1
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= end)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps further tensors with the elements."""
    return torch.Tensor.data_ptr(tensor) == 0 and torch.Tensor.numel(tensor) > 0


def byte_view(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """View a contiguous tensor of the CPU as bytes."""
    # A single element counts as contiguous at any stride, but a view as bytes would refuse it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    array: npt.NDArray[np.uint8] = flat.numpy()
    return array


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a value belongs to class DTensor."""
    # Another thread may be importing the module: before the class exists, no DTensor exists.
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
