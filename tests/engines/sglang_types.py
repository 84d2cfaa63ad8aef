"""SGLang's requests, decoded by the installed wheel or by the fields of version 0.5.23.

Source: sglang/srt/managers/io_struct.py, sglang/srt/utils/common.py of SGLang 0.5.23.
"""

import base64
import importlib.util
import io
import pickle
from typing import Any

HAS_WHEEL = importlib.util.find_spec("sglang") is not None

_MODES = ("abort", "retract", "in_place")
_BASE = {"rid": (str, type(None)), "http_worker_ipc": (str, type(None))}
_SELECTOR = {"selector": (str,)}
_TAGS = {"tags": (list, type(None))}
#: path: (the wheel's type, fields and their types, which of them must be there)
REQUESTS: dict[str, tuple[str, dict[str, tuple[type, ...]], set[str]]] = {
    "/pause_generation": ("PauseGenerationReqInput", {"mode": (str,)}, set()),
    "/continue_generation": (
        "ContinueGenerationReqInput",
        {"torch_empty_cache": (bool,)},
        set(),
    ),
    "/begin_weight_update": ("BeginWeightUpdateReqInput", _SELECTOR, set()),
    "/end_weight_update": ("EndWeightUpdateReqInput", {}, set()),
    "/update_weights_from_tensor": (
        "UpdateWeightsFromTensorReqInput",
        {
            "serialized_named_tensors": (list,),
            "load_format": (str, type(None)),
            "flush_cache": (bool,),
            "abort_all_requests": (bool,),
            "weight_version": (str, type(None)),
            "torch_empty_cache": (bool,),
            **_SELECTOR,
        },
        {"serialized_named_tensors"},
    ),
    "/release_memory_occupation": ("ReleaseMemoryOccupationReqInput", _TAGS, set()),
    "/resume_memory_occupation": ("ResumeMemoryOccupationReqInput", _TAGS, set()),
    "/update_weights_from_disk": (
        "UpdateWeightFromDiskReqInput",
        {
            "model_path": (str,),
            "weight_version": (str, type(None)),
            "flush_cache": (bool,),
            "keep_pause": (bool,),
        },
        {"model_path"},
    ),
}


def decode(path: str, body: Any) -> dict[str, Any]:
    """Return a request's fields with the engine's defaults; ValueError means 422."""
    name, fields, required = REQUESTS[path]
    unknown = set(body) - set(fields) - set(_BASE)
    missing = required - set(body)
    if unknown or missing:
        raise ValueError(f"{path}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    for field, value in body.items():
        if not isinstance(value, {**fields, **_BASE}[field]):
            raise ValueError(f"{path}: {field} is {value!r}")
    if body.get("mode", "abort") not in _MODES:
        raise ValueError(f"mode {body['mode']!r}")
    if body.get("selector", "all") not in ("target", "draft", "all"):
        raise ValueError(f"selector {body['selector']!r}")
    if HAS_WHEEL:
        from pydantic import TypeAdapter
        from sglang.srt.managers import io_struct

        made = TypeAdapter(getattr(io_struct, name)).validate_python(body)
        return {field: getattr(made, field) for field in fields}
    defaults = {"mode": "abort", "selector": "all", "flush_cache": True, "weight_version": None}
    found = {**{key: value for key, value in defaults.items() if key in fields}, **body}
    if "serialized_named_tensors" in found:
        found["serialized_named_tensors"] = [
            base64.b64decode(each, validate=True) for each in found["serialized_named_tensors"]
        ]
    return found


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("torch", "Tensor"):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def named_tensors(payload: bytes) -> Any:
    if HAS_WHEEL:
        from sglang.srt.utils.common import MultiprocessingSerializer

        return MultiprocessingSerializer.deserialize(payload)
    return _Plain(io.BytesIO(payload)).load()
