"""Atropos's bridge file: a trainer on the device memory that a vLLM server exports.

``vllm_bridge_config.json`` lists an engine's device tensors, each with the eight parts of a torch
handle. A server of Atropos or one with the plug-in of shmbus writes the file; a trainer opens the
handles, and a model's parameters become views of them. Nothing guards such an engine: pause its
server for a step by the server's own means.

Invariants: the file is typed and checked whole, and every handle is opened, before a parameter
of the model changes; nothing is unpickled.

Source: example_trainer/model.py, example_trainer/vllm_patching/patched_gpu_runner.py and README.md
of Atropos 0.4.0.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from shmbus.data.encoding import decodable
from shmbus.errors import WeightsError
from shmbus.segment.own_file import open_own
from shmbus.tensors.views import DTYPE_BYTES
from shmbus.weights.errors import ManifestError
from shmbus.weights.loading import destinations, uncovered
from shmbus.weights.manifest import Slice
from shmbus.weights.shared_model import matching, put_views

FILE: Final = "vllm_bridge_config.json"
#: Limit of the file's bytes: a thousand tensors with handles take one megabyte.
_MAX_BYTES: Final = 64 << 20
#: Parts of fused tensors in row order, by the fused name.
_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class _Param(msgspec.Struct):
    shape: tuple[int, ...]
    dtype: str


class _Handle(msgspec.Struct, kw_only=True):
    """Torch's eight parts, in their order, and the view of the storage that they lead to."""

    device_index: int
    ipc_handle_b64: bytes
    storage_size: int
    storage_offset_orig: int
    ref_counter_handle_b64: bytes
    ref_counter_offset: int
    event_handle_b64: bytes
    event_sync_required: bool
    tensor_storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@decodable
class _File(msgspec.Struct, kw_only=True):
    """Fields of the file used here."""

    tp_degree: int = 1
    dp_shard_degree: int = 1
    param_mappings: dict[str, _Param] = {}
    ipc_handles: dict[str, dict[str, Any]] = {}
    num_params: int = 0
    single_copy_enabled: bool = False


def attach_bridge(model: torch.nn.Module, path: Path | str | None = None) -> Path:
    """Make a model's parameters views of an engine's, by its bridge file; zero-copy.

    Parameters
    ----------
    model : torch.nn.Module
        In the checkpoint's names; its parameters may be on the meta device.
    path : path, optional
        The file; if missing, $LOGDIR, the working directory, and ``atropos_bridge`` in the
        directory of temporary files are tried.

    Returns
    -------
    Path
        The chosen file.

    Raises
    ------
    WeightsError
        The file is missing, lists no handles, or its engine ended.
    ManifestError
        The file contradicts itself or does not fit the model; every fault is named.
    TypeError
        The model is invalid.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    found = _find(path)
    handles = _read(found)
    tensors = {}
    for name, handle in handles.items():
        try:
            tensors[name] = _opened(handle)
        except RuntimeError as error:
            raise WeightsError(
                f"{found}: the memory of {name!r} cannot be opened: {error}. Has the engine that "
                "wrote it ended, or does it run on a device that this process does not see? "
                "Nothing was attached: start the engine again"
            ) from error
    views, faults = _views_for(model, tensors)
    if faults:
        raise ManifestError(f"{found} does not fit the model, and it was not changed", faults)
    put_views(model, views, writable=True)
    return found


def write_bridge(folder: Path, model: str, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write the bridge file of an engine's device tensors by an atomic rename; return its path."""
    handles = {}
    for name, tensor in tensors.items():
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
        parts = zip(_Handle.__struct_fields__, (*_exported(tensor), *view), strict=True)
        handles[name] = _Handle(**dict(parts))
    params = {
        name: {
            "vllm_name": name, "shape": tuple(each.shape), "dtype": str(each.dtype),
            "device": str(each.device),
        }
        for name, each in tensors.items()
    }  # fmt: skip
    file = {
        "model": model, "tp_degree": 1, "dp_shard_degree": 1, "param_names": list(tensors),
        "param_mappings": params, "ipc_handles": handles, "num_params": len(tensors),
        "shared_weights_enabled": True, "single_copy_enabled": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{FILE}.{os.getpid()}"
    new.touch(0o600)  # a handle gives write access to the engine's memory
    new.write_bytes(msgspec.json.encode(file))
    return new.replace(folder / FILE)


def _exported(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the eight parts of the storage's handle."""
    storage: Any = tensor.untyped_storage()
    try:
        return tuple(storage._share_cuda_())
    except RuntimeError as error:
        raise WeightsError(f"a bridge file needs parameters on a CUDA device: {error}") from error


def _find(path: Path | str | None) -> Path:
    tried = [Path(path)] if path is not None else []
    folders = [os.environ.get("LOGDIR", "."), ".", f"{tempfile.gettempdir()}/atropos_bridge"]
    tried += [Path(folder) / FILE for folder in folders]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    raise WeightsError(
        f"no bridge file in {', '.join(str(each) for each in dict.fromkeys(tried))}; start the "
        "server, or give its path"
    )


def _read(path: Path) -> dict[str, _Handle]:
    what = f"{path}: nothing was attached"
    with os.fdopen(open_own(str(path), os.O_RDONLY, "a bridge file"), "rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    try:
        said = msgspec.json.decode(raw, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ManifestError(what, [str(error)]) from error
    if not (said.single_copy_enabled and said.ipc_handles):
        raise WeightsError(
            f"{what}: it has {len(said.ipc_handles)} handles, and single_copy_enabled is "
            f"{said.single_copy_enabled}; start the server with VLLM_ENABLE_SHARED_WEIGHTS=1 on a "
            "CUDA device"
        )
    faults = []
    if said.tp_degree != 1 or said.dp_shard_degree != 1:
        faults.append(
            f"tp_degree {said.tp_degree} and dp_shard_degree {said.dp_shard_degree}: one copy is "
            "shared by one process on each side; publish versions with WeightPublisher instead"
        )
    if said.num_params and said.num_params != len(said.param_mappings):
        faults.append(f"num_params is {said.num_params}, {len(said.param_mappings)} are there")
    handles = {name: _handle(name, parts, faults) for name, parts in said.ipc_handles.items()}
    if faults:
        raise ManifestError(what, faults)
    return {name: handle for name, handle in handles.items() if handle is not None}


def _handle(name: str, parts: Mapping[str, Any], faults: list[str]) -> _Handle | None:
    """Check the parts of a handle; bytes come as base64, or nested as {"_bytes_b64_": ...}."""
    try:
        plain = {
            key: value["_bytes_b64_"] if isinstance(value, dict) else value
            for key, value in parts.items()
        }
        handle = msgspec.convert(plain, _Handle, strict=True)
    except (msgspec.ValidationError, KeyError) as error:
        faults.append(f"handle of {name!r}: eight parts and a view are expected: {error}")
        return None
    width = DTYPE_BYTES.get(handle.dtype.removeprefix("torch."))
    if width is None or len(handle.shape) != len(handle.stride):
        faults.append(f"handle of {name!r}: dtype {handle.dtype!r}, {len(handle.stride)} strides")
        return None
    steps = zip(handle.shape, handle.stride, strict=True)
    last = handle.tensor_storage_offset + sum((size - 1) * step for size, step in steps)
    if 0 not in handle.shape and (last + 1) * width > handle.storage_size:
        faults.append(
            f"handle of {name!r}: size mismatch: the tensor ends at byte {(last + 1) * width} of "
            f"{handle.storage_size}"
        )
    return handle


def _opened(handle: _Handle) -> torch.Tensor:
    """Open the storage, by the eight parts in the order that torch takes, and view the tensor."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(
        handle.device_index,
        handle.ipc_handle_b64,
        handle.storage_size,
        handle.storage_offset_orig,
        handle.ref_counter_handle_b64,
        handle.ref_counter_offset,
        handle.event_handle_b64,
        handle.event_sync_required,
    )
    dtype: torch.dtype = getattr(torch, handle.dtype.removeprefix("torch."))
    made = torch.empty(0, dtype=dtype, device=storage.device)
    return made.set_(storage, handle.tensor_storage_offset, handle.shape, handle.stride)


def _views_for(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Look up the model's tensors, fused tensors by their parts, and list the misfits."""
    state = model.state_dict(keep_vars=True)
    slices: dict[str, Slice] = {}
    for whole in tensors:
        folder, _, leaf = whole.rpartition(".")
        stem, _, kind = folder.rpartition(".")
        start = 0
        for part in _FUSED.get(kind, ()):
            name = f"{stem}.{part}.{leaf}".lstrip(".")
            length = len(state[name]) if name in state else 0
            slices[name] = Slice(whole, 0, start, length)
            start += length
    found = destinations(tensors, slices)
    for name, own in state.items():
        view = found.get(name)
        padded = view is not None and own.dim() and view.dim() == own.dim()
        if view is not None and padded and view.shape[0] > own.shape[0]:
            found[name] = view[: own.shape[0]]  # a padded vocabulary
    views, faults = matching(model, found)
    return views, uncovered(tensors, slices) + faults
