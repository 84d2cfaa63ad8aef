"""Kinds of state that engines derive from weights: how an update renews each kind, in one list.

Invariant: an update renews each kind, or a salt or name of one publication tells the kind apart, or
the engine is refused by name before its pause. `docs/weights.md` shows the same table.

Source: vllm/distributed/weight_transfer/sharded_rdt_engine.py, vllm/v1/engine/core.py and
vllm/distributed/kv_transfer/kv_connector/v1 of vLLM 0.32; sglang/srt/managers/scheduler.py and
sglang/srt/managers/mm_schedule.py of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class StateKind(NamedTuple):
    """A kind of state that an engine computes from weights."""

    kind: str
    #: Protection of new requests from old state, and its moment.
    renewed: str
    vllm: str
    sglang: str


STATE_KINDS: Final = (
    StateKind(
        "keys and values",
        "each request's salt; the pause, with `clear_cache` and where a number comes again",
        "`cache_salt`; `/pause?clear_cache=true`",
        "`extra_key`; `retract`, `/flush_cache`",
    ),
    StateKind(
        "KV tiers and connectors",
        "the same salt and pause",
        "`cache_salt` in block hashes; refused: connectors that key by tokens alone",
        "`extra_key` in the keys of each tier",
    ),
    StateKind(
        "encoder outputs",
        "every update and reload, before the rows say that the version runs",
        "`/reset_encoder_cache`; refused: `ec_transfer_config`",
        "the loader clears `mm_schedule.embedding_cache`; reloads of such models are refused",
    ),
    StateKind(
        "LoRA adapters",
        "each publication's own name and path",
        "`/v1/load_lora_adapter`",
        "`/load_lora_adapter`",
    ),
    StateKind(
        "draft heads",
        "nobody: the report warns; answers stay right, fewer drafts are taken",
        "`supports_draft_weight_updates`",
        "`speculative_algorithm`",
    ),
    StateKind(
        "expert placement",
        "nobody: refused",
        "refused: `parallel_config.enable_eplb`",
        "refused: `enable_eplb`",
    ),
    StateKind(
        "tensors that the loader computes",
        "the engine's loader, for all of the module, at every version",
        "`finalize_layerwise_reload`",
        "`load_weights`, `/end_weight_update`",
    ),
    StateKind(
        "derived copies by `Tensor._version`",
        "the module itself: each write by address is counted",
        "`increment_version`",
        "`increment_version`",
    ),
    StateKind(
        "CUDA graphs",
        "no need: weights are written in place",
        "same addresses",
        "same addresses",
    ),
    StateKind(
        "compiled constants",
        "nobody: refused",
        "refused: `inductor_compile_config` with `freezing`, on a CPU with `max_autotune`",
        "refused: on a CPU `enable_torch_compile`",
    ),
)

#: Connectors of vLLM that key by tokens alone: no salt tells versions apart.
UNSALTED_CONNECTORS: Final = frozenset({
    "ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1",
})  # fmt: skip


def vllm_refusal(config: Any, *, on_cpu: bool) -> str:
    """Name the state of a vLLM engine that no update renews; empty if updates renew each kind."""
    # No getattr with defaults: an attribute that vLLM renames must fail here.
    if config.parallel_config.enable_eplb:
        return (
            "parallel_config.enable_eplb is on: EPLB moves experts between places, so new weights "
            "would land in other experts' places; start the server without --enable-eplb"
        )
    if config.ec_transfer_config is not None:
        return (
            "ec_transfer_config is set: encoder outputs that a connector keeps outlive the weights "
            "that made them; start the server without --ec-transfer-config"
        )
    unsalted = sorted(_connectors(config.kv_transfer_config) & UNSALTED_CONNECTORS)
    if unsalted:
        return (
            f"kv_transfer_config has {', '.join(unsalted)}: a connector that keys by tokens alone "
            "serves keys and values of old weights; take one that keys by vLLM's block hashes"
        )
    inductor = config.compilation_config.inductor_compile_config
    if inductor.get("freezing") or (on_cpu and inductor.get("max_autotune")):
        return (
            "inductor_compile_config freezes weights: compiled code has the old ones as constants; "
            "start the server without freezing and, on a CPU, without max_autotune"
        )
    return ""


def _connectors(config: Any) -> set[str]:
    """Name the connectors of a config, inner connectors of a MultiConnector included."""
    if config is None:
        return set()
    inner = (config.kv_connector_extra_config or {}).get("connectors", [])
    return {config.kv_connector, *(each.get("kv_connector") for each in inner)}


def sglang_refusal(info: Mapping[str, Any]) -> str:
    """Name the option of an SGLang server whose state no update renews; empty for none."""
    if info.get("enable_eplb"):
        return "enable_eplb"
    # Graphs of SGLang on a CPU freeze weights.
    on_cpu = info.get("device") == "cpu"
    return "enable_torch_compile" if on_cpu and info.get("enable_torch_compile") else ""
