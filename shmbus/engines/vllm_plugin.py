"""The entry point ``vllm.general_plugins``: tells vLLM where "shmbus" is, and imports nothing else.

vLLM calls it in each of its processes, whether or not this backend is chosen.
"""

from __future__ import annotations

#: The name in ``--weight-transfer-config '{"backend": ...}'``.
BACKEND = "shmbus"


def register() -> None:
    """Register both sides, once a process; vLLM's plug-ins may be loaded more often."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "shmbus.engines.vllm_backend", "ShmbusWeightTransferEngine"
        )
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "shmbus.engines.vllm_trainer", "ShmbusTrainerWeightTransferEngine"
        )
