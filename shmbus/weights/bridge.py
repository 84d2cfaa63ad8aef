"""The bridge file: how a trainer finds the one copy of a model, in Atropos's form.

``vllm_bridge_config.json`` says which tensors there are and where they lie. It is written as
Atropos's trainer reads it, and read as its patched vLLM writes it, with what its code has beyond
its README. Ours also says which bus's shared weights they are; the file's lock says whether its
writer lives.

Invariants:

- A file that shmbus wrote is taken only while its writer holds the lock, on this boot.
- What is read is typed and checked whole: names, shapes, dtypes, and handles of eight parts.

Source: example_trainer/model.py, example_trainer/vllm_patching/patched_gpu_runner.py and README.md
of Atropos 0.4.0.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from shmbus.errors import WeightsError
from shmbus.segment.own_file import open_own
from shmbus.weights.errors import ManifestError, StaleBridgeError
from shmbus.weights.manifest import DTYPE_BYTES, Manifest, ParamMeta, Slice

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FILE",
    "BridgeConfig",
    "BridgeFile",
    "BridgeParam",
    "CudaHandle",
    "find_bridge",
    "fused_slices",
    "read_bridge",
]

FILE: Final = "vllm_bridge_config.json"
#: What it is, for messages.
_TITLE: Final = "the bridge to shared weights"
#: Bytes of a file that is read: a thousand tensors with handles have one megabyte.
_MAX_BYTES: Final = 64 << 20
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
#: Parts of fused tensors, in the order of their rows, and what the whole is called.
_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class BridgeParam(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor of the server.

    Attributes
    ----------
    shape : tuple of int
        Of the whole.
    dtype : str
        Torch's name, with or without the module.
    vllm_name, device : str
        As the server has it.
    ipc_handle : str
        In base64; only in files of the README's form.
    """

    shape: tuple[int, ...]
    dtype: str
    vllm_name: str = ""
    device: str = ""
    ipc_handle: str = ""


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor of a CUDA device lies: torch's eight parts, and the view of them.

    Attributes
    ----------
    device_index, storage_size, storage_offset_orig : int
        The device, bytes of the allocation, and where the storage begins in it.
    ipc_handle_b64, ref_counter_handle_b64, event_handle_b64 : bytes
        Decoded.
    ref_counter_offset, event_sync_required : int, bool
        As torch needs them.
    tensor_storage_offset, shape, stride, dtype : int, tuple of int, tuple of int, str
        The tensor in its storage, in elements.
    """

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

    def storage_arguments(self) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        """Return the eight parts in the order that `UntypedStorage._new_shared_cuda` takes."""
        return (
            self.device_index,
            self.ipc_handle_b64,
            self.storage_size,
            self.storage_offset_orig,
            self.ref_counter_handle_b64,
            self.ref_counter_offset,
            self.event_handle_b64,
            self.event_sync_required,
        )


class _Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What only shmbus writes: whose shared weights, on which boot, and the parts of fused ones."""

    bus: str
    boot_id: str
    slices: dict[str, Slice] = {}


class _File(msgspec.Struct, kw_only=True, omit_defaults=False):
    """The file; what it has beyond this is left alone."""

    model: str = "unknown"
    dtype: str = "auto"
    tp_degree: int = 1
    dp_shard_degree: int = 1
    param_mappings: dict[str, BridgeParam] = {}
    param_names: list[str] = []
    ipc_handles: dict[str, dict[str, Any]] = {}
    shared_weights_enabled: bool = False
    num_params: int = 0
    single_copy_enabled: bool = False
    shmbus: _Owner | None = None


class BridgeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a bridge file says, checked.

    Attributes
    ----------
    path : str
        The file.
    model : str
        Its name.
    tp_degree, dp_shard_degree : int
        How the server splits it.
    params : dict[str, BridgeParam]
        Tensors by the server's names.
    handles : dict[str, CudaHandle]
        Of those on a CUDA device.
    bus : str or None
        Whose shared weights they are, where shmbus wrote the file (`shared.attach`).
    slices : dict[str, Slice]
        Parts of fused tensors, by a checkpoint's names.
    """

    path: str
    model: str
    tp_degree: int
    dp_shard_degree: int
    params: dict[str, BridgeParam]
    handles: dict[str, CudaHandle]
    bus: str | None
    slices: dict[str, Slice]


class BridgeFile:
    """A bridge file that this process has written, for a ``with`` block: it holds the file's lock.

    Parameters
    ----------
    directory : path
        Where others look for it (`find_bridge`).
    bus : str
        Whose shared weights it leads to.
    manifest : Manifest
        Of those (`SharedModel.manifest`).
    model : str
        Its name.

    Raises
    ------
    StaleBridgeError
        Another living process has written one there.
    """

    def __init__(
        self, directory: Path | str, *, bus: str, manifest: Manifest, model: str = "unknown"
    ) -> None:
        self.path: Final = Path(directory) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), _open(self.path) as old:
            if _is_held(old.fileno()):
                raise StaleBridgeError(
                    f"{self.path}: its writer lives; end it, or use another LOGDIR"
                )
        names = sorted(tensor.name for tensor in manifest.tensors)
        said = _File(
            model=model,
            param_mappings={
                tensor.name: BridgeParam(tensor.shape, f"torch.{tensor.dtype}", tensor.name, "cpu")
                for tensor in manifest.tensors
            },
            param_names=names,
            num_params=len(names),
            shared_weights_enabled=True,
            single_copy_enabled=True,
            shmbus=_Owner(bus, _boot_id(), dict(manifest.slices)),
        )
        fresh = self.path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        self._file = open_own(str(fresh), os.O_RDWR | os.O_CREAT | os.O_EXCL, _TITLE)
        # The lock is the file's, not its name's: whoever opens it after the rename finds it held.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, msgspec.json.format(msgspec.json.encode(said), indent=2))
        os.fsync(self._file)
        os.rename(fresh, self.path)

    def close(self) -> None:
        """Remove the file, and let go of its lock; may be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(file)):
                    self.path.unlink()
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _open(path: Path) -> BinaryIO:
    """Open one for reading, if it is this user's."""
    return os.fdopen(open_own(str(path), os.O_RDONLY, _TITLE), "rb")


def find_bridge(path: Path | str | None = None) -> Path:
    """Find a bridge file where Atropos looks for one.

    Parameters
    ----------
    path : path, optional
        Taken where it exists; else $LOGDIR, the working directory, and atropos_bridge in the
        directory of temporary files are tried.

    Returns
    -------
    Path

    Raises
    ------
    WeightsError
        There is none; the message has the places.
    """
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


def read_bridge(path: Path | str | None = None) -> BridgeConfig:
    """Read a bridge file and check it whole.

    Parameters
    ----------
    path : path, optional
        As for `find_bridge`.

    Returns
    -------
    BridgeConfig

    Raises
    ------
    StaleBridgeError
        Its writer has ended, or it is of another boot.
    ManifestError
        It contradicts itself; the message has all faults.
    WeightsError
        There is none, or it leads nowhere.
    """
    found = find_bridge(path)
    what = f"{found}: nothing was attached"
    with _open(found) as file:
        held = _is_held(file.fileno())
        raw = file.read(_MAX_BYTES + 1)
    try:
        said = msgspec.json.decode(raw, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ManifestError(what, [str(error)]) from error
    if said.shmbus is not None and (not held or said.shmbus.boot_id != _boot_id()):
        why = "its writer has ended" if not held else "it is of another boot of this machine"
        raise StaleBridgeError(f"{what}: {why}; start the server again, or remove the file")
    faults: list[str] = []
    handles = {name: _handle(name, parts, faults) for name, parts in said.ipc_handles.items()}
    faults += _faults(said)
    if faults:
        raise ManifestError(what, faults)
    whole = {name: handle for name, handle in handles.items() if handle is not None}
    if said.shmbus is None and not (said.single_copy_enabled and whole):
        raise WeightsError(
            f"{what}: it has no handles (single_copy_enabled is {said.single_copy_enabled}); start "
            "the server with VLLM_ENABLE_SHARED_WEIGHTS=1 on a CUDA device"
        )
    return BridgeConfig(
        path=str(found),
        model=said.model,
        tp_degree=said.tp_degree,
        dp_shard_degree=said.dp_shard_degree,
        params=said.param_mappings,
        handles=whole,
        bus=None if said.shmbus is None else said.shmbus.bus,
        slices={} if said.shmbus is None else said.shmbus.slices,
    )


def _faults(said: _File) -> list[str]:
    faults = []
    if said.tp_degree != 1 or said.dp_shard_degree != 1:
        faults.append(
            f"tp_degree {said.tp_degree} and dp_shard_degree {said.dp_shard_degree}: one copy is "
            "shared by one process on each side; publish versions with WeightPublisher instead"
        )
    if said.num_params and said.num_params != len(said.param_mappings):
        faults.append(f"num_params is {said.num_params}, {len(said.param_mappings)} are there")
    if said.param_names and set(said.param_names) != set(said.param_mappings):
        faults.append("param_names and param_mappings differ")
    for name, param in said.param_mappings.items():
        if param.dtype.removeprefix("torch.") not in DTYPE_BYTES:
            faults.append(f"{name!r}: dtype {param.dtype!r} is unknown")
        if any(size < 0 for size in param.shape):
            faults.append(f"{name!r}: shape {list(param.shape)}")
    return faults


def _handle(name: str, parts: Mapping[str, Any], faults: list[str]) -> CudaHandle | None:
    """Check the parts of a handle; bytes come as base64, or nested as {"_bytes_b64_": ...}."""
    try:
        plain = {
            key: value["_bytes_b64_"] if isinstance(value, dict) else value
            for key, value in parts.items()
        }
        handle = msgspec.convert(plain, CudaHandle, strict=True)
    except (msgspec.ValidationError, KeyError) as error:
        faults.append(f"handle of {name!r}: eight parts and a view are expected: {error}")
        return None
    width = DTYPE_BYTES.get(handle.dtype.removeprefix("torch."))
    if width is None or len(handle.shape) != len(handle.stride):
        faults.append(f"handle of {name!r}: dtype {handle.dtype!r}, {len(handle.stride)} strides")
        return None
    last = handle.tensor_storage_offset + sum(
        (size - 1) * step for size, step in zip(handle.shape, handle.stride, strict=True)
    )
    empty = 0 in handle.shape
    if not empty and (last + 1) * width > handle.storage_size:
        faults.append(
            f"handle of {name!r}: size mismatch: the tensor ends at byte {(last + 1) * width} of "
            f"{handle.storage_size}"
        )
    return handle


def fused_slices(
    fused: Iterable[ParamMeta], checkpoint: Mapping[str, tuple[int, ...]]
) -> dict[str, Slice]:
    """Say which part of a server's fused tensor each tensor of a checkpoint is.

    Parameters
    ----------
    fused : iterable of ParamMeta
        The server's, such as ``model.layers.0.self_attn.qkv_proj.weight``.
    checkpoint : mapping of shapes
        The checkpoint's names: q_proj, k_proj and v_proj, or gate_proj and up_proj.

    Returns
    -------
    dict of Slice
        By the checkpoint's names; of each layer by its own shapes.

    Raises
    ------
    ManifestError
        The parts of a fused tensor are not all there, or not as many rows as it has.
    """
    found: dict[str, Slice] = {}
    faults = []
    for whole in fused:
        folder, _, leaf = whole.name.rpartition(".")
        stem, _, kind = folder.rpartition(".")
        if kind not in _FUSED:
            continue
        parts = [f"{stem}.{part}.{leaf}".lstrip(".") for part in _FUSED[kind]]
        missing = [part for part in parts if part not in checkpoint]
        rows = [checkpoint[part][0] for part in parts if part not in missing]
        if missing or sum(rows) != whole.shape[0]:
            faults.append(
                f"{whole.name!r} has {whole.shape[0]} rows, its parts "
                f"{sum(rows)}" + (f"; missing: {', '.join(missing)}" if missing else "")
            )
            continue
        start = 0
        for part, length in zip(parts, rows, strict=True):
            found[part] = Slice(whole.name, 0, start, length)
            start += length
    if faults:
        raise ManifestError("fused tensors cannot be split, and nothing was attached", faults)
    return found


def _is_held(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
