"""Tensors over the bytes of a payload, without a copy."""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shmbus._near_names import UnknownNameError
from shmbus.pool import copy_bytes
from shmbus.weights.manifest import Manifest, TensorPlace

__all__ = [
    "byte_view",
    "copy_tensor",
    "has_memory",
    "is_elsewhere",
    "is_plain_copy",
    "payload_tensor",
    "tensor_at",
    "unowned",
    "view_of",
]

_first_use = threading.Lock()
_warned = False


def payload_tensor(memory: Any) -> torch.Tensor:
    """View a buffer as a tensor of bytes.

    Parameters
    ----------
    memory : object
        With a buffer. A read-only one is mapped read-only: a store into a view of it ends the
        process, and never changes what others read.

    Returns
    -------
    uint8 [bytes]
        It keeps `memory` alive.
    """
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
    """View the same bytes without keeping them: for whoever keeps their memory in another way.

    Parameters
    ----------
    payload : uint8 [bytes]
        In host memory.

    Returns
    -------
    uint8 [bytes]
        Not to be used once that memory may have been unmapped.
    """
    span: Any = (ctypes.c_uint8 * payload.numel()).from_address(payload.data_ptr())
    return torch.frombuffer(span, dtype=torch.uint8)


def tensor_at(payload: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """View one tensor of a payload.

    Parameters
    ----------
    payload : uint8 [bytes]
        From `payload_tensor`.
    place : TensorPlace
        Of a manifest that was checked against this payload.

    Returns
    -------
    Tensor
    """
    dtype: torch.dtype = getattr(torch, place.dtype)
    offset = place.offset // dtype.itemsize
    strides = [1] * len(place.shape)
    for dim in range(len(place.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(place.shape[dim + 1], 1)
    return torch.empty(0, dtype=dtype, device=payload.device).set_(
        payload.untyped_storage(), offset, place.shape, tuple(strides)
    )


def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy like ``target.copy_(source)``; large pieces past the caches, where nothing is converted.

    Parameters
    ----------
    target, source : Tensor
        Of the same shape, on any device, of any dtype and strides; they do not overlap.
    """
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
    """Whether all elements of a tensor lie in its storage.

    Torch does not ask: a copy from or to a storage that was resized ends the process, or writes
    where it should not.

    Parameters
    ----------
    tensor : Tensor
        Of the layout torch.strided.
    """
    count = tensor.numel()
    if count == 0:
        return True
    last = count - 1
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= end)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in other tensors, as those of a wrapper do.

    What a wrapper stands for may be replaced, and nothing of the wrapper changes.

    Parameters
    ----------
    tensor : Tensor
        Of any kind that has an address.
    """
    return torch.Tensor.data_ptr(tensor) == 0 and torch.Tensor.numel(tensor) > 0


def byte_view(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """View a contiguous CPU tensor as its bytes.

    Parameters
    ----------
    tensor : Tensor
        Of any dtype and shape.

    Returns
    -------
    uint8 [bytes]
    """
    # Contiguous is also a single element of any stride, which a view as bytes would refuse.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    array: npt.NDArray[np.uint8] = flat.numpy()
    return array


def view_of(
    tensors: dict[str, torch.Tensor], manifest: Manifest, name: str, what: str = "weights"
) -> torch.Tensor:
    """Look up a tensor, an alias or a slice.

    Parameters
    ----------
    tensors : dict of Tensor
        By the names of the manifest's tensors.
    manifest : Manifest
        Checked.
    name : str
        Any of its names.
    what : str
        What has them, for the message.

    Returns
    -------
    Tensor
        A view.

    Raises
    ------
    KeyError
        There is no such name.
    """
    part = manifest.slices.get(name)
    if part is None:
        found = tensors.get(manifest.aliases.get(name, name))
        if found is None:
            raise UnknownNameError(what, name, manifest.names())
        return found
    view = view_of(tensors, manifest, part.of).narrow(part.dim, part.start, part.length)
    return view.squeeze(part.dim) if part.drop_dim else view
