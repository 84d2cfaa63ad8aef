"""prime-rl's factories, replaced: there is no hook.

Invariant: what a version lacks is said by its names, and nothing of prime-rl is changed then.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, Final

from shmbus._arguments import check_int, check_text
from trainer_adapter.adapters.prime_rl.transport import ShmbusBatchReceiver, ShmbusBatchSender

__all__ = ["TESTED", "install"]

#: What it was written against: nothing of prime-rl can be installed without CUDA.
TESTED: Final = "prime-rl 559b447 (MicroBatchSender) and 0f59b24 (BatchSender), by their interfaces"
#: Where its interface may be, newest first: package, and the ends of the names there.
_NAMES: Final = (
    ("prime_rl.transports.batch", "batch"),
    ("prime_rl.transports.rollouts", "micro_batch"),
)


def install(name: str, *, readers_per_rank: int = 1) -> str:
    """Have prime-rl's factories return these senders and receivers, in this process.

    Parameters
    ----------
    name : str
        Of the run, the same in all processes.
    readers_per_rank : int
        Trainer processes that share a data rank: context times pipeline parallelism.

    Returns
    -------
    str
        The package whose factories were replaced.

    Raises
    ------
    TypeError, ValueError
        The name is no str, or there are fewer than 1 readers.
    ImportError
        prime-rl is not installed, or has other names; says which are missing.
    """
    check_text("name", name)
    check_int("readers_per_rank", readers_per_rank, 1, 2**31 - 1)
    tried = []
    for package, middle in _NAMES:
        wanted = (f"setup_{middle}_sender", f"setup_{middle}_receiver", "MicroBatch")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not package.startswith(error.name):
                raise
            tried.append(f"{package} is not there")
            continue
        missing = [each for each in wanted if not hasattr(module, each)]
        if missing:
            tried.append(f"{package} has no {', '.join(missing)}")
            continue
        sender, receiver = _factories(name, readers_per_rank, module.MicroBatch)
        for attribute, ours in ((wanted[0], sender), (wanted[1], receiver)):
            _replace(getattr(module, attribute), attribute, ours)
        return package
    raise ImportError(
        f"the prime-rl adapter needs its batch transport: {'; '.join(tried)}; written for {TESTED}"
    )


def _factories(name: str, readers: int, micro_batch: type[Any]) -> tuple[Any, Any]:
    """Make the factories, with the arguments of prime-rl's."""

    def sender(output_dir: Path, data_world_size: int, current_step: int, transport: Any) -> Any:
        return ShmbusBatchSender(
            name, data_world_size, current_step, readers_per_rank=readers, micro_batch=micro_batch
        )

    def receiver(output_dir: Path, data_rank: int, current_step: int, transport: Any) -> Any:
        reader = int(os.environ.get("RANK", "0")) % readers
        return ShmbusBatchReceiver(
            name, data_rank, current_step, micro_batch=micro_batch, reader=reader
        )

    return sender, receiver


def _replace(theirs: Any, attribute: str, ours: Any) -> None:
    """Put a factory in place of prime-rl's wherever a module has it by that name."""
    for loaded, module in list(sys.modules.items()):
        if loaded.startswith("prime_rl.") and getattr(module, attribute, None) is theirs:
            setattr(module, attribute, ours)
