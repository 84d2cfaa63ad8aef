r"""What runs inside a rank of SGLang: weights from shared memory, as a custom loader.

    python -m sglang.launch_server ... \
        --custom-weight-loader shmbus.engines.sglang_loader.load

Nothing of SGLang is imported: it calls `load` with its model, whose `load_weights` slices and fuses
as it does with a checkpoint.

Invariants:

- Nothing is raised: SGLang does not catch what a custom loader raises, and its scheduler would end
  with every request in flight. What went wrong is in this rank's row, which the fleet believes.
- The row says that no whole version runs from before the first tensor until after the last.

Source: sglang/srt/model_executor/model_runner_components/weight_updater.py of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shmbus.engines.sglang_order import Order, read_order
from shmbus.weights import Weights, WeightSubscriber

__all__ = ["load"]

logger = logging.getLogger("sglang.shmbus")

#: Seconds to wait for the weights when a trainer says that they are there.
ATTACH_TIMEOUT_S = 30.0

#: One for each rank of this process; SGLang has one.
_subscribers: dict[tuple[str, str, int], WeightSubscriber] = {}


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do what the trainer says in the name of the first tensor."""
    try:
        if len(named_tensors) != 1:
            raise ValueError(f"expected one tensor, whose name is an order, got {named_tensors!r}")
        name, marker = named_tensors[0]
        order = read_order(name)
        subscriber = _subscriber(order, marker.device)
        if order.verb == "attach" or order.version is None:
            # A manifest that cannot be used is in the row by then, where the trainer reads it.
            subscriber.latest(timeout=ATTACH_TIMEOUT_S).close()
        else:
            with subscriber.at(order.version) as weights:
                _load(model, weights, marker.device)
    except Exception:
        # Raised here, it would end SGLang's scheduler; the rows say what this rank runs.
        logger.exception("shmbus: new weights were not loaded")


def _subscriber(order: Order, device: torch.device) -> WeightSubscriber:
    key = (order.bus, order.server, order.rank)
    known = _subscribers.get(key)
    if known is not None and not known.removed:
        return known
    if known is not None:  # a trainer that was started again has made new weights
        known.close()
    label = f"{order.server} rank {order.rank}"
    _subscribers[key] = WeightSubscriber(order.bus, device=device, label=label)
    return _subscribers[key]


def _load(model: Any, weights: Weights, device: torch.device) -> None:
    weights.report_loading()
    try:
        model.load_weights(_tensors(weights, device))
        if device.type != "cpu":
            # The copies are done before the slot may be written again.
            torch.get_device_module(device).synchronize()
    except Exception as error:
        weights.report_refused(f"load: {type(error).__name__}: {error}")
        raise
    weights.report_applied()


def _tensors(weights: Weights, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for name in weights:
        yield name, weights[name].to(device)
