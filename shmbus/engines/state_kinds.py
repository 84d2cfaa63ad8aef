"""Engines with state from weights that no update renews: refused by name before their pause.

`docs/weights.md` lists every kind of state, and how an update renews the kind.

Source: vllm/distributed/weight_transfer/sharded_rdt_engine.py, vllm/v1/engine/core.py and
vllm/distributed/kv_transfer/kv_connector/v1 of vLLM 0.32; sglang/srt/managers/scheduler.py and
sglang/srt/managers/mm_schedule.py of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
