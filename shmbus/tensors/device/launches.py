"""Kernels that Triton has compiled, launched by the driver's own call.

Triton's way to a launch takes 17 us of the host, and up to 60 behind a pause; the driver's takes 4.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from typing import Any, Final, NamedTuple

import torch

from shmbus.device_calls import device_launch
from shmbus.tensors.device.driver import address, check, missing

__all__ = ["Direct", "import_kernels"]

#: Threads of a warp.
THREADS: Final = 32
#: cuda.h's CUDA_ERROR_INVALID_CONTEXT.
NO_CONTEXT: Final = 201
#: What a launch may need that `Direct` does not give.
MORE: Final = (
    "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl",
)  # fmt: skip


class Direct(NamedTuple):
    """A compiled kernel, as the driver launches it."""

    launch: int
    function: int
    threads: int
    shared: int

    @classmethod
    def of(cls, compiled: Any, pointers: int, numbers: int = 0) -> Direct | None:
        """Return it; None where a launch needs more than is known here.

        Parameters
        ----------
        compiled : triton.compiler.CompiledKernel
            On a device.
        pointers, numbers : int
            How many it takes, in this order; numbers of 32 bits.

        Returns
        -------
        Direct | None
        """
        given = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        if [kind[:1] == "*" for kind in given] != [True] * pointers + [False] * numbers:
            return None
        if given[pointers:] != ["i32"] * numbers or missing() is not None:
            return None
        facts = compiled.metadata
        if facts.num_ctas != 1 or any(getattr(facts, name, 0) for name in MORE):
            return None
        if not isinstance(compiled.function, int):
            return None
        launch = address("cuLaunchKernel")
        return cls(launch, compiled.function, facts.num_warps * THREADS, facts.shared)

    def start(
        self, stream: int, blocks: int, addresses: tuple[int, ...], numbers: tuple[int, ...] = ()
    ) -> None:
        """Start it on a stream, by the driver's number; its device has to be the current one.

        Raises
        ------
        CudaDriverError
            The driver refused.
        """
        arguments = (
            self.launch, self.function, stream, blocks, self.threads, self.shared,
            addresses, numbers,
        )  # fmt: skip
        status = device_launch(*arguments)
        if status == NO_CONTEXT:  # of a thread's first call
            torch.cuda.current_stream().query()
            status = device_launch(*arguments)
        if status:
            check("cuLaunchKernel", status)


def import_kernels(module: str) -> None:
    """Import a module of kernels, and Triton with it, before it is needed; nothing without Triton.

    In a thread, where no signal's handler runs: an import of Triton that Ctrl-C ends half-way
    leaves it broken for the life of the process.

    Parameters
    ----------
    module : str
        Its name. Where it cannot be imported, who uses it gets the error.
    """
    if importlib.util.find_spec("triton") is None:
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=run, name="shmbus-kernels")
    thread.start()
    thread.join()
