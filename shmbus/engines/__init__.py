"""New weights for inference servers: pause, update, check of the rows, resume."""

from __future__ import annotations

from shmbus.engines.engine_server import EngineServer
from shmbus.engines.fleet import EngineFleet
from shmbus.engines.lora_fleet import LoraFleet
from shmbus.engines.managed import ManagedServer
from shmbus.engines.results import EngineError, ServerReport, UpdateReport, UpdateRolledBackError
from shmbus.engines.sglang import SglangServer
from shmbus.engines.vllm import VllmDraft, VllmServer

__all__ = [
    "EngineError",
    "EngineFleet",
    "EngineServer",
    "LoraFleet",
    "ManagedServer",
    "ServerReport",
    "SglangServer",
    "UpdateReport",
    "UpdateRolledBackError",
    "VllmDraft",
    "VllmServer",
]
