"""Weights from a trainer to every inference process of a machine, whole versions only.

::

    with WeightPublisher("run1", ModuleSource(model)) as publisher:
        publisher.publish(version=7)

    with WeightSubscriber("run1") as subscriber, subscriber.latest(timeout=5.0) as weights:
        weights.load_into(model)

Invariants:

- A reader gets one whole version after any death, or an error with the name of the version in
  force.
- Readers unpickle nothing, and check every byte before its use.
"""

from __future__ import annotations

from shmbus.errors import WeightsError
from shmbus.weights.adapters import LoraFiles, LoraVersion, lora_state
from shmbus.weights.bridge import attach_bridge
from shmbus.weights.errors import ManifestError, VersionOrderError
from shmbus.weights.manifest import ParamMeta, Slice
from shmbus.weights.probe import probe_carriers
from shmbus.weights.publisher import Publication, Published, WeightPublisher
from shmbus.weights.sharded_source import ExportedSource, Shard, ShardedSource
from shmbus.weights.shared_model import SharedModel, attach_model, share_model
from shmbus.weights.subscriber import Weights, WeightSubscriber
from shmbus.weights.weight_source import LocalPiece, ModuleSource, WeightSource

__all__ = [
    "ExportedSource",
    "LocalPiece",
    "LoraFiles",
    "LoraVersion",
    "ManifestError",
    "ModuleSource",
    "ParamMeta",
    "Publication",
    "Published",
    "Shard",
    "ShardedSource",
    "SharedModel",
    "Slice",
    "VersionOrderError",
    "WeightPublisher",
    "WeightSource",
    "WeightSubscriber",
    "Weights",
    "WeightsError",
    "attach_bridge",
    "attach_model",
    "lora_state",
    "probe_carriers",
    "share_model",
]
