"""New weights into inference servers: who is paused, updated, believed and resumed, and when."""

from __future__ import annotations

from trainer_adapter.engines.adapters import AdapterFleet, AdapterServer
from trainer_adapter.engines.client_updates import ClientUpdates, WeightSyncClient
from trainer_adapter.engines.errors import EngineError, UpdateRolledBackError
from trainer_adapter.engines.fleet import EngineFleet
from trainer_adapter.engines.report import ServerReport, UpdateReport
from trainer_adapter.engines.server import EngineServer, HttpServer, PauseMode
from trainer_adapter.engines.sglang import SglangServer
from trainer_adapter.engines.vllm import VllmServer

__all__ = [
    "AdapterFleet",
    "AdapterServer",
    "ClientUpdates",
    "EngineError",
    "EngineFleet",
    "EngineServer",
    "HttpServer",
    "PauseMode",
    "ServerReport",
    "SglangServer",
    "UpdateReport",
    "UpdateRolledBackError",
    "VllmServer",
    "WeightSyncClient",
]
