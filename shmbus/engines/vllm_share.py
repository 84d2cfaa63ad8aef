"""vLLM's parameters as the single copy of trainer and engine, on a bus or by a bridge file.

Invariants: parameters move before vLLM compiles or captures graphs, which keep addresses; with a
parameter that vLLM repacks for its kernels the start fails.

Source: vllm/v1/worker/gpu_worker.py, vllm/model_executor/layers/linear.py and
vllm/model_executor/layers/utils.py of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from shmbus.base.arguments import check_path
from shmbus.engines.rows import say_version
from shmbus.errors import WeightsError
from shmbus.weights import SharedModel, Slice, share_model
from shmbus.weights.bridge import write_bridge

#: Keys of vLLM's ``--additional-config``: a bus, or the folder of Atropos's bridge file.
SHARE: Final = "shmbus_share"
BRIDGE: Final = "shmbus_bridge"
#: Methods of vLLM's layers that compute with the parameter itself.
_DIRECT: Final = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
#: Limit of parameters named in a message.
_SHOWN: Final = 4


def share_engine(config: Any, model: torch.nn.Module) -> SharedModel | None:
    """Share a worker's parameters as its options say; return what a bus shares."""
    options = config.additional_config
    found = options if isinstance(options, Mapping) else {}
    asked = {key: found[key] for key in (SHARE, BRIDGE) if found.get(key) is not None}
    if not asked:
        return None
    refused = _refusal(config) or _repacked(model)
    if len(asked) > 1:
        refused = "memory named on a bus has no handles for a bridge file"
    if refused:
        raise WeightsError(
            f"--additional-config {asked}: {refused}. Start the server without "
            f"{' or '.join(map(repr, asked))}, and publish versions with WeightPublisher"
        )
    if BRIDGE in asked:
        check_path(BRIDGE, asked[BRIDGE])
        write_bridge(Path(asked[BRIDGE]), config.model_config.model, dict(model.named_parameters()))
        return None
    bus = asked[SHARE]
    # No checkpoint has vLLM's buffers, such as scales.
    shared = share_model(
        bus, model, slices=dict(_parts(model)), version=0, writes=False, buffers=False
    )
    # A restarted server has its checkpoint again, and samples must not carry a later version.
    say_version(bus, 0)
    return shared


def _refusal(config: Any) -> str:
    """Name the option that spreads or changes an engine's parameters; "" without such an option."""
    parallel = config.parallel_config
    ranks = parallel.world_size * parallel.data_parallel_size
    if ranks != 1:
        return f"{ranks} ranks have a part of the model each, and one copy is of one process"
    if config.model_config.enable_sleep_mode:
        return "a sleeping server (--enable-sleep-mode) would free memory that the trainer has open"
    if config.lora_config is not None:
        return "LoRA (--enable-lora) wraps the parameters"
    if config.model_config.use_mla:
        return "multi-head latent attention computes with matrices derived from the weights"
    return ""


def _repacked(model: torch.nn.Module) -> str:
    """Name parameters repacked for vLLM's kernels; "" without such parameters."""
    found = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # vLLM's kernels for CPUs hold packed weights in a closure.
        packed = getattr(getattr(module, "cpu_linear", None), "__closure__", None)
        if (method is not None and type(method).__name__ not in _DIRECT) or packed:
            found.append(name)
        else:
            own = module._parameters.items()
            found += [
                f"{name}.{leaf}" for leaf, each in own if each is not None and not each.numel()
            ]
    if not found:
        return ""
    more = f" ({len(found)} in all)" if len(found) > _SHOWN else ""
    return f"vLLM repacks {', '.join(found[:_SHOWN])}{more} for its kernels"


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, Slice]]:
    """Yield the checkpoint's names of fused parameters' parts."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        stem, _, kind = name.rpartition(".")
        parts, sizes = fused.get(kind, []), getattr(module, "output_sizes", [])
        if len(parts) != len(sizes):  # already fused in the checkpoint
            continue
        for leaf, whole in module._parameters.items():
            start = 0
            for part, size in zip(parts, sizes, strict=True) if whole is not None else ():
                yield f"{stem}.{part}.{leaf}", Slice(f"{name}.{leaf}", 0, start, size)
                start += size
