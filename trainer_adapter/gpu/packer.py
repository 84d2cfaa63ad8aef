"""From the ring to a packed batch on a GPU, by this machine's fastest supported transport.

- ``gather``: the ring is registered with CUDA once, and a kernel reads the records over PCIe,
  straight into the packed batch on the device. The CPU makes a table of about 90 bytes a sequence,
  plus 64 for each 2,048 tokens beyond the first. A second kernel copies extra fields, a launch a
  field.
- ``pinned``: the CPU packs into pinned memory, and copies from there without waiting. Also for
  batches of shared prefixes and of sampling masks, checked on the host.
- ``copy``: the CPU packs, and copies pageable memory. Beside ``gather``, also for batches with
  samples of several rows: the kernel packs a record as a single sequence.

Invariants:

- A batch returned by `pack` or `Pending.finish` lies on the device and may be acknowledged: the
  batch needs no more reads of the ring. The waiting thread sleeps.
- Packing runs on a separate stream, and does not wait for training on the remaining streams.
- One thread at a time makes batches; a second thread gets an error.
- The ring is unregistered before its mapping goes away, in either order of the packer's and the
  Consumer's end; groups of a second Consumer are read from its own ring.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from typing import Any, Final, Literal

import torch
from torch import Tensor

import shmbus
from shmbus.base.arguments import check_choice
from shmbus.batch.kernel_table import mapping_of
from shmbus.tensors.copy_table import import_kernels
from trainer_adapter.batches.batch import Batch, Layout, padded, replaced
from trainer_adapter.batches.extra_fields import ExtraFields, GivenExtraFields
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.pack import BatchPlan, HostPacker
from trainer_adapter.gpu.gather import Pending, begin_gather
from trainer_adapter.gpu.memory import PinnedMemory, RegisteredRing, Staging

logger = logging.getLogger(__name__)

Transport = Literal["gather", "pinned", "copy"]
TRANSPORTS: Final = ("gather", "pinned", "copy")


class GpuPacker:
    """Packs leased groups into batches on one CUDA device, with the options of `HostPacker`."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        transport: Transport | Literal["auto"] = "auto",
        layout: Layout = "packed",
        extra_fields: GivenExtraFields | ExtraFields | None = None,
        **packing: Any,
    ) -> None:
        hint = "'auto' takes the fastest that works"
        check_choice("transport", transport, ("auto", *TRANSPORTS), hint)
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device: expected a CUDA device, got {self.device}; use pack")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._forced = transport != "auto"
        wanted = ExtraFields.of(extra_fields)
        # Shared prefixes are found on the host; padding happens on the device.
        first: Layout = "prefix" if layout == "prefix" else "packed"
        self._host = HostPacker(layout=first, extra_fields=wanted, **packing)
        self._layout: Layout = layout
        self._memory: BatchMemory = BatchMemory()
        self._pinned: PinnedMemory | None = None
        self._ring: RegisteredRing | None = None
        if transport == "auto":
            on_host = layout == "prefix" or bool(wanted.supports)
            transport = "pinned" if on_host else "gather"
        if transport == "gather":
            import_kernels("trainer_adapter.gpu.kernel")
        self._staging = Staging(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._one_thread = OneThread("GpuPacker", "give each thread a packer of its own")
        self.reason = ""
        self.transport: Transport = transport

    def pack(self, groups: list[shmbus.Group]) -> Batch:
        """Pack leased groups into one batch on the device, and wait for it."""
        return self.begin(groups).finish()

    def begin(self, groups: list[shmbus.Group]) -> Pending:
        """Start packing leased groups into one batch on the device, without waiting."""
        with self._one_thread:
            return self._begin(groups)

    def _begin(self, groups: list[shmbus.Group]) -> Pending:
        if not groups:
            raise ValueError("pack: expected at least one group, got none")
        plan = self._host.plan(groups)
        if self.transport == "gather":
            if plan.rows is not None:
                return self._copied(plan, "copy", self._memory)
            pending = self._gather(plan)
            if pending is not None:
                return pending
        if self.transport == "pinned" and self._pinned is None:
            try:
                self._pinned = PinnedMemory()
                self._pinned.take(1)
            except RuntimeError as error:
                self._pinned = None
                self._fall_back("copy", f"no pinned memory: {error}")
        memory = self._pinned if self.transport == "pinned" else self._memory
        return self._copied(plan, self.transport, memory)

    def _copied(self, plan: BatchPlan, transport: Transport, memory: BatchMemory | None) -> Pending:
        packed = self._host.copy(plan, memory)
        with _on(self._stream):
            batch = replaced(packed.to(self.device, non_blocking=True), transport=transport)
            if self._layout == "padded":
                batch = padded(batch)
            # Keep the host's batch until its copies end.
            return Pending(batch, self._stream, keep=packed)

    def deliver(self, batch: Batch) -> Batch:
        """Record the use of a batch by the calling thread's current stream; call once per batch."""
        # Its memory belongs to the packer's stream: without this call, the stream could reuse it
        # while kernels of the current stream still read it.
        stream = torch.cuda.current_stream(self.device)
        tree = () if batch.prefix_tree is None else vars(batch.prefix_tree).values()
        extra = (*batch.extra.values(), *batch.extra_offsets.values())
        for value in (*vars(batch).values(), *extra, *tree):
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
        return batch

    def close(self) -> None:
        """Unregister the ring, which keeps its Consumer's memory until then."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _gather(self, plan: BatchPlan) -> Pending | None:
        """Run the kernel; None if it cannot run here, from now on."""
        if self._ring is None and importlib.util.find_spec("triton") is None:
            self._fall_back("pinned", "Triton is not installed")
            return None
        with _on(self._stream):
            address, nbytes, owner = mapping_of(plan.samples.trajectories[0])
            if self._ring is None or self._ring.owner is not owner:
                ring, self._ring = self._ring, None
                if ring is not None:
                    ring.close()
                try:
                    self._ring = RegisteredRing(address, nbytes, owner, self._stream)
                except (OSError, RuntimeError) as error:
                    self._fall_back("pinned", f"the ring cannot be registered: {error}")
                    return None
            return begin_gather(
                plan,
                self.device,
                stream=self._stream,
                device_shift=self._ring.device_shift,
                staging=self._staging,
                layout=self._layout,
            )

    def _fall_back(self, transport: Transport, reason: str) -> None:
        if self._forced:
            raise RuntimeError(
                f"transport {self.transport!r} cannot run here: {reason}; pass transport='auto'"
            )
        self.transport, self.reason = transport, reason
        logger.warning("batches go to %s by %r: %s", self.device, transport, reason)


def _on(stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
    """Make a stream the current stream, by its own faster context manager if available."""
    itself: Any = stream
    return itself if hasattr(itself, "__enter__") else torch.cuda.stream(itself)


class OneThread:
    """Guards an object for one thread at a time; entered by ``with``."""

    def __init__(self, name: str, remedy: str) -> None:
        self._name = name
        self._remedy = remedy
        self._lock = threading.Lock()
        self._inside = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{self._name}: expected one thread at a time, got {_this_thread()} while "
                f"{self._inside} is in it; {self._remedy}, or let them take turns"
            )
        self._inside = _this_thread()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _this_thread() -> str:
    return f"thread {threading.current_thread().name!r}"
