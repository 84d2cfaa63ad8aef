"""One copy of a model for trainer and server: parameters in shared memory, and their guard.

::

    with share_model("run1", model) as shared:              # the trainer: its parameters move there
        with shared.stepping(version=8):              # waits for the last reader to leave
            optimizer.step()

    with attach_model("run1", model) as shared:             # a server: its parameters are views
        with shared.reading(timeout=5.0) as version:  # one forward pass, or a whole request
            model(tokens)

An engine may own the memory, and exports it once: it shares with ``writes=False``, and the trainer
attaches with ``writable=True``. On a CUDA device the memory is always exported.

Invariants:

- A reader inside `reading` meets one version only, and neither readers nor the trainer's step
  starve.
- A stepper locks both bytes of the file; a reader locks the second, after passing the first. A
  waiting stepper therefore keeps new readers out. Each block opens the file again for its own
  locks: threads of a process exclude each other; a lock ends with its block, or its process.
- A trainer's death or exception in a step leaves the word `stepping` behind: readers get an error,
  and no server generates with a mix.
- A model is attached whole or not at all, after a search for every parameter and buffer.
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, Literal

import torch

from shmbus import BusClosedError
from shmbus.base.arguments import (
    check_choice,
    check_flag,
    check_int64,
    check_seconds,
    check_timeout,
)
from shmbus.base.closing import ClosedByWith
from shmbus.errors import BusBusyError, DamagedError, PeerGoneError, WaitTimeoutError, WeightsError
from shmbus.segment.names import memory_socket, remove_dead_socket
from shmbus.tensors.device.arena import (
    Arena,
    ArenaView,
    BufferLostError,
    BufferName,
    MemoryKind,
    allocator,
)
from shmbus.tensors.device.memory import refusals
from shmbus.tensors.views import copy_tensor, count_writes, is_sharded, payload_tensor, tensor_at
from shmbus.weights.errors import ManifestError
from shmbus.weights.manifest import Manifest, Slice, view_of
from shmbus.weights.single_copy import (
    HEADER,
    HEADER_BYTES,
    KIND,
    STEPPING_AT,
    VERSION_AT,
    SharedFile,
    open_file,
)
from shmbus.weights.weight_source import ModuleSource

#: Locked bytes of the file, with meaningless contents.
_GATE: Final = 0
_DATA: Final = 1
_WRITER: Final = 2
_STEPPER: Final = 3
#: Seconds between two tries.
_RETRY_S: Final = 0.0002


def _until(attempt: Callable[[], bool], deadline: float | None) -> bool:
    """Try until success; return False at the deadline."""
    while not attempt():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_S)
    return True


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


class SharedModel(ClosedByWith):
    """A model's tensors in shared memory, for a ``with`` block."""

    def __init__(self, file: SharedFile, *, writable: bool, arena: Arena | None = None) -> None:
        self.bus: Final = file.bus
        self._file = file
        self._writable = writable
        self._remove = False
        #: Model of these tensors, in the stepping process.
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._map = file.map(writable=writable)
        #: Exporter of the memory, in its owning process.
        self._arena = arena
        _, _, _, said, size, at, owner = HEADER.unpack_from(self._map)
        self.manifest: Final = Manifest.decode(
            bytes(self._map[HEADER_BYTES : HEADER_BYTES + said]), size
        )
        if arena is not None:
            payload = arena.buffer(0, size)[1]
        elif owner:
            payload = _mapped(self.bus, owner, size, writable=writable)
        else:
            # From its own first byte on, the origin of the manifest's offsets.
            payload = payload_tensor(memoryview(self._map)[at : at + size])
        self._device: Final = payload.device
        #: True if a foreign process owns the memory and the file.
        self._is_guest = owner != 0 and arena is None
        self._tensors = {place.name: tensor_at(payload, place) for place in self.manifest.tensors}
        #: Version of this process's last forward pass.
        self._met = self.version

    @property
    def version(self) -> int:
        """Return the version of the last whole step; -1 before the first."""
        return int(struct.unpack_from("<q", self._map, VERSION_AT)[0])

    @property
    def torn(self) -> bool:
        """Whether a step began without an end; True also during a step."""
        return bool(struct.unpack_from("<Q", self._map, STEPPING_AT)[0])

    def __getitem__(self, name: str) -> torch.Tensor:
        """View a tensor, an alias or a slice; a store into a server's view ends the process."""
        what = f"shared weights of bus {self.bus!r}"
        return view_of(self._tensors, self.manifest, name, what)

    # -- the guard ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, *, timeout: float | None = None) -> Iterator[int]:
        """Hold off the trainer's step, for a ``with`` block; threads may share it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a running step; None waits for ever.

        Yields
        ------
        int
            The version.

        Raises
        ------
        WaitTimeoutError
            The step took longer.
        DamagedError, BusClosedError
            The trainer ended in a step, or its step failed; or this copy was closed.
        """
        check_timeout(timeout, "timeout")
        self._require_open()
        with self._file.again() as locks:

            def enter() -> bool:
                entered = locks.lock_byte(_GATE, fcntl.F_RDLCK) and locks.lock_byte(
                    _DATA, fcntl.F_RDLCK
                )
                locks.lock_byte(_GATE, fcntl.F_UNLCK)
                return entered

            if not _until(enter, _deadline(timeout)):
                raise self._late("the trainer's step has not ended", timeout)
            if self.torn:
                raise DamagedError(
                    f"shared weights of bus {self.bus!r}: a step was begun and not ended, so the "
                    f"model is a mix of version {self.version} and the next; the trainer has to "
                    "load whole weights in `with shared.stepping(version, heal=True)`"
                )
            version = self.version
            if version != self._met:  # torch counts only this process's writes
                count_writes(self._tensors.values())
                self._met = version
            try:
                yield version
            finally:
                self._settle()

    def _settle(self) -> None:
        """Wait for the device work queued by this process."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _require_open(self) -> None:
        if self._file.fd < 0:
            what = "were attached before a fork" if self._file.forked else "are closed"
            raise BusClosedError(f"shared weights of bus {self.bus!r} {what}; attach again")

    def _require_in_place(self) -> None:
        """Raise WeightsError for a tensor with changes hidden from peers."""
        model = None if self._model is None else self._model()
        if model is None:
            return
        state = model.state_dict(keep_vars=True)
        moved = [
            name
            for name in self.manifest.names()
            if name in state and state[name].data_ptr() != self[name].data_ptr()
        ]
        if moved:
            raise WeightsError(
                f"shared weights of bus {self.bus!r}: {', '.join(map(repr, moved[:4]))} of the "
                f"model ({len(moved)} in all) is no longer the shared one, so servers would keep "
                "the old; change parameters in place, or share the model anew. Nothing was changed"
            )

    def _late(self, why: str, timeout: float | None) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"shared weights of bus {self.bus!r}: {why} in {timeout or 0.0:g} s; version "
            f"{self.version} is in force"
        )

    @contextlib.contextmanager
    def stepping(
        self,
        version: int,
        *,
        timeout: float | None = None,
        guard: Literal["lock", "none"] = "lock",
        heal: bool = False,
    ) -> Iterator[None]:
        """Wait for readers to leave, and keep readers out, for a ``with`` block.

        Parameters
        ----------
        version : int
            Version after the block.
        timeout : float, optional
            Seconds to wait for readers; None waits for ever.
        guard : "lock" | "none"
            "none" steps beside readers, who then meet a mix of two versions: use it only while the
            readers are paused by other means, for example by `EngineFleet.step`.
        heal : bool
            Whether the block reloads every weight and may begin with torn ones.

        Yields
        ------
        None

        Raises
        ------
        WeightsError
            This process only reads, or steps already; or a tensor of the model is not shared.
        WaitTimeoutError, BusClosedError
            A reader did not leave, and nothing was changed; or this copy was closed.
        DamagedError
            An earlier step never ended.
        TypeError, ValueError
            The version is no int64, or an option is invalid.
        """
        version = check_int64("version", version)
        check_timeout(timeout, "timeout")
        check_flag("heal", heal)
        check_choice("guard", guard, ("lock", "none"))
        self._require_open()
        with self._file.again() as locks:
            if not self._writable or not locks.lock_byte(_STEPPER, fcntl.F_WRLCK):
                what = "steps already" if self._writable else "only reads"
                raise WeightsError(f"shared weights of bus {self.bus!r}: this process {what}")
            deadline = _deadline(timeout)
            for byte in (_GATE, _DATA) if guard == "lock" else ():
                if not _until(partial(locks.lock_byte, byte, fcntl.F_WRLCK), deadline):
                    raise self._late("a reader has not left", timeout)
            if self.torn and not heal:
                raise DamagedError(
                    f"shared weights of bus {self.bus!r}: a step before was not ended, and the "
                    "model is a mix; load whole weights with heal=True"
                )
            self._require_in_place()
            struct.pack_into("<Q", self._map, STEPPING_AT, 1)
            yield
            self._settle()
            # Not after an exception: some parameters may already be new.
            struct.pack_into("<q", self._map, VERSION_AT, version)
            struct.pack_into("<Q", self._map, STEPPING_AT, 0)

    # -- its end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave; surviving tensors stay readable. The sharing process also removes the file."""
        # A forked child removes nothing: the parent continues with the file.
        if self._remove:
            self._file.remove()
        self._file.close()
        if self._arena is not None:
            self._arena.close()


def share_model(
    bus: str,
    model: torch.nn.Module,
    *,
    slices: Mapping[str, Slice] | None = None,
    version: int = -1,
    writes: bool = True,
    buffers: bool = True,
) -> SharedModel:
    """Move a model's parameters and persistent buffers into shared memory.

    The parameter objects stay the same, and an optimizer continues with them.

    Parameters
    ----------
    bus : str
        Bus of the weights; it need not exist.
    model : torch.nn.Module
        On the CPU, or wholly on one CUDA device, whose memory is then exported.
    slices : mapping of Slice, optional
        Names for parts, for example q_proj of a fused qkv_proj.
    version : int
        Current version.
    writes : bool
        Whether this process steps; False for an engine that owns the memory, with a trainer
        attached by ``writable=True``.
    buffers : bool
        Whether persistent buffers move too.

    Returns
    -------
    SharedModel
        Writable; its end removes the file's name, and leaves the model unchanged.

    Raises
    ------
    BusBusyError
        A living process shares or reads the bus's weights already.
    WeightsError
        Parameters are on several devices, or one is a shard; or the device exports no memory.
    ManifestError
        Names or slices contradict each other.
    """
    version = check_int64("version", version)
    source = ModuleSource(model, slices=slices, buffers=buffers)
    tensors, _ = source._named()
    leading = next(iter(tensors.values()), None)
    device = torch.device("cpu") if leading is None else leading.device
    strange = [name for name, each in tensors.items() if each.device != device or is_sharded(each)]
    if strange or device.type not in ("cpu", "cuda"):
        name = strange[0] if strange else next(iter(tensors))
        first = tensors[name]
        raise WeightsError(
            "one copy is shared of whole tensors in one memory, the host's or a CUDA device's, and "
            f"{name!r} is a {type(first).__name__} on {first.device} ({len(strange)} in all); "
            "publish versions with WeightPublisher instead. Nothing was changed"
        )
    manifest = Manifest.plan(source.params(), aliases=source.aliases(), slices=source.slices())
    file = SharedFile(bus)
    arena = _arena_of(bus, device, writes=writes)
    try:
        with file.made(manifest, version, 0 if arena is None else arena.owner):
            shared = SharedModel(file, writable=True, arena=arena)
            shared._remove = not writes or file.lock_byte(_WRITER, fcntl.F_WRLCK)
            shared._writable = writes
            for name, tensor in tensors.items():
                copy_tensor(shared[name], tensor.detach())
            shared._settle()
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.data = shared[name]
            for alias in source.aliases():
                _tie(model, alias, shared)
        shared._model = weakref.ref(model)
        if arena is not None:
            torch.cuda.empty_cache()  # frees the old memory for other processes
        return shared
    except BaseException:
        # Moved tensors keep their values, and their memory for life.
        file.remove()
        file.close()
        if arena is not None:
            arena.close()
        raise


def _exported_kind(device: torch.device, *, writes: bool) -> MemoryKind | None:
    """Return the export kind of an owner's memory; None for memory in the file."""
    if device.type == "cpu":
        return None if writes else "memfd"
    why = refusals(device.index or 0).get("vmm", "")
    if why:
        raise WeightsError(f"one copy on {device}: {why}; publish versions instead")
    return "vmm"


def _arena_of(bus: str, device: torch.device, *, writes: bool) -> Arena | None:
    kind = _exported_kind(device, writes=writes)
    if kind is None:
        return None
    remove_dead_socket(KIND, bus)
    return Arena(memory_socket(KIND, bus), allocator(kind, device.index or 0))


def _mapped(bus: str, owner: int, size: int, *, writable: bool) -> torch.Tensor:
    """Map exported memory of a different process."""
    view = ArenaView(memory_socket(KIND, bus), or_owner=True, writable=writable)
    try:
        memory = view.memory(BufferName(0, owner))
    except (PeerGoneError, BufferLostError) as error:
        raise PeerGoneError(
            f"shared weights of bus {bus!r}: the process that has their memory has ended; nothing "
            f"was attached: start it again ({error})"
        ) from error
    if memory.nbytes < size:
        raise WeightsError(
            f"shared weights of bus {bus!r}: expected {size} bytes, {memory.nbytes} are exported"
        )
    return memory.tensor()


def _tie(model: torch.nn.Module, name: str, shared: SharedModel) -> None:
    """Point a tied tensor's second object at the one copy."""
    value = model.state_dict(keep_vars=True)[name]
    view = shared[name]
    if value.data_ptr() != view.data_ptr():
        value.data = view


def attach_model(
    bus: str, model: torch.nn.Module, *, timeout: float = 30.0, writable: bool = False
) -> SharedModel:
    """Make a model's parameters views of the trainer's; zero-copy.

    Parameters
    ----------
    bus : str
        The bus.
    model : torch.nn.Module
        Its parameters may be on the meta device.
    timeout : float
        Seconds to wait for the trainer.
    writable : bool
        Whether this process is the next trainer, and continues with the servers' copy.

    Returns
    -------
    SharedModel
        Unless writable, a store into the model's parameters ends the process.

    Raises
    ------
    WaitTimeoutError
        Nobody shares them.
    BusBusyError
        With `writable`: the trainer lives.
    ManifestError
        Lists every misfit; nothing was changed.
    TypeError, ValueError
        The model or the timeout is invalid.
    """
    check_seconds("timeout", timeout)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    file = open_file(bus, timeout)
    try:
        shared = SharedModel(file, writable=writable)
        if writable and not file.lock_byte(_WRITER, fcntl.F_WRLCK):
            raise BusBusyError(f"bus {bus!r}: the trainer that shares its weights lives")
        found, faults = _views_for(shared, model)
        if faults:
            raise ManifestError(
                "the shared weights do not fit the model, and it was not changed", faults
            )
        put_views(model, found, writable=writable)
        if writable:
            shared._model = weakref.ref(model)
        shared._remove = writable and not shared._is_guest
        return shared
    except BaseException:
        file.close()
        raise


def put_views(model: torch.nn.Module, found: Mapping[str, torch.Tensor], *, writable: bool) -> None:
    """Make every tensor of a model a view, or none; tied tensors stay one object."""
    made: dict[tuple[int, int], torch.nn.Parameter] = {}
    with contextlib.ExitStack() as undo:
        for module_name, module in model.named_modules(remove_duplicate=False):
            prefix = f"{module_name}." if module_name else ""
            for leaf, old in list(module._parameters.items()):
                if old is None or prefix + leaf not in found:
                    continue
                view = found[prefix + leaf]
                # The trainer's untied tensors carry separate values.
                one = id(old), view.data_ptr()
                if one not in made:
                    wants = writable and old.requires_grad
                    fresh = torch.nn.Parameter(view, requires_grad=wants)
                    made[one] = made[id(fresh), one[1]] = fresh  # a module may come twice
                undo.callback(module._parameters.__setitem__, leaf, old)
                module._parameters[leaf] = made[one]
            for leaf, buffer in list(module._buffers.items()):
                if prefix + leaf in found:
                    undo.callback(module._buffers.__setitem__, leaf, buffer)
                    module._buffers[leaf] = found[prefix + leaf]
        undo.pop_all()


def _views_for(
    shared: SharedModel, model: torch.nn.Module
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Look up views by the model's names, and list every misfit."""
    found, faults = matching(model, {name: shared[name] for name in shared.manifest.names()})
    # For example rotary frequencies: never published, and without values on the meta device.
    faults += [
        f"buffer {name!r} is on the meta device and is not published; make it before attaching"
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in found
    ]
    taken = {shared.manifest.root(name) for name in found}
    faults += [f"unexpected: {t.name!r}" for t in shared.manifest.tensors if t.name not in taken]
    return found, faults


def matching(
    model: torch.nn.Module, views: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the views of a model's tensors, and the tensors without a fitting view."""
    found: dict[str, torch.Tensor] = {}
    faults: list[str] = []
    for name, own in model.state_dict(keep_vars=True).items():
        if not isinstance(own, torch.Tensor):
            continue
        view = views.get(name)
        if view is None:
            faults.append(f"missing: {name!r}")
            continue
        if (view.shape, view.dtype) != (own.shape, own.dtype):
            faults.append(
                f"{name!r}: expected {own.dtype} {list(own.shape)}, got {view.dtype} "
                f"{list(view.shape)}"
            )
        found[name] = view
    return found, faults
