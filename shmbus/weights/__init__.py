"""Weights from a trainer to every inference process of one machine, whole versions only.

::

    with WeightPublisher("run1", ModuleSource(model)) as publisher:
        publisher.publish(version=7)

    with WeightSubscriber("run1") as subscriber, subscriber.latest(timeout=5.0) as weights:
        weights.load_into(model)

Invariants:

- A reader has one version, whole, whoever died when; or an error that says what it has instead.
- Nothing that is read is unpickled; everything that is read is checked before a byte is used.
"""

from __future__ import annotations

from shmbus.errors import WeightsError
from shmbus.weights.adapters import (
    AdapterFiles,
    AdapterVersion,
    adapter_source,
    adapter_state,
)
from shmbus.weights.carriers.base import Promises
from shmbus.weights.errors import (
    ManifestError,
    PatchBaseError,
    StaleBridgeError,
    VersionOrderError,
)
from shmbus.weights.fp8 import Fp8BlockSource
from shmbus.weights.manifest import Manifest, ParamMeta, Slice, TensorPlace
from shmbus.weights.probe import Choice, probe_carriers
from shmbus.weights.publisher import Publication, Published, WeightPublisher
from shmbus.weights.shared import SharedModel, attach, share
from shmbus.weights.source import LocalPiece, ModuleSource, WeightSource
from shmbus.weights.subscriber import Weights, WeightSubscriber

__all__ = [
    "AdapterFiles",
    "AdapterVersion",
    "Choice",
    "Fp8BlockSource",
    "LocalPiece",
    "Manifest",
    "ManifestError",
    "ModuleSource",
    "ParamMeta",
    "PatchBaseError",
    "Promises",
    "Publication",
    "Published",
    "SharedModel",
    "Slice",
    "StaleBridgeError",
    "TensorPlace",
    "VersionOrderError",
    "WeightPublisher",
    "WeightSource",
    "WeightSubscriber",
    "Weights",
    "WeightsError",
    "adapter_source",
    "adapter_state",
    "attach",
    "probe_carriers",
    "share",
]
