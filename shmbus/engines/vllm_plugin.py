"""Entry point ``vllm.general_plugins``: registers "shmbus" with vLLM, and imports nothing else.

vLLM calls `register` in each process, with or without this backend.
"""

from __future__ import annotations

#: The name in ``--weight-transfer-config '{"backend": ...}'``.
BACKEND = "shmbus"
#: Method of vLLM's worker for comparing weights, by ``/collective_rpc``.
VERIFY = "shmbus_verify"
#: Method of vLLM's worker for loading a draft model's version, by the same route.
LOAD_DRAFT = "shmbus_load_draft"


def register() -> None:
    """Register once a process; vLLM may load plug-ins repeatedly."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "shmbus.engines.vllm_backend", "ShmbusWeightTransferEngine"
        )
