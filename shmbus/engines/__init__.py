"""New weights into inference servers: who is paused, updated, believed and resumed, and when."""

from __future__ import annotations

from shmbus.engines.client_updates import ClientUpdates, WeightSyncClient
from shmbus.engines.errors import EngineError, UpdateRolledBackError
from shmbus.engines.fleet import EngineFleet
from shmbus.engines.lora import AdapterFleet, AdapterServer
from shmbus.engines.report import ServerReport, UpdateReport
from shmbus.engines.server import EngineServer, HttpServer, PauseMode
from shmbus.engines.sglang import SglangServer
from shmbus.engines.vllm import VllmServer

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
