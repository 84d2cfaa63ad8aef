"""verl's trainer on a CPU by verl's own plug-ins (VERL_USE_EXTERNAL_MODULES, VERL_PLATFORM=cpu)."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

_MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def _module() -> types.ModuleType:
    module = types.ModuleType("torch_cpu")
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "ipc_collect"):
        setattr(module, name, lambda *_, **__: None)
    for name in _MEMORY:
        setattr(module, name, lambda *_, **__: 0)
    module.is_available = lambda: False  # type: ignore[attr-defined]
    module.mem_get_info = lambda *_: (0, 0)  # type: ignore[attr-defined]
    module.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
    module.current_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    module.get_rng_state = torch.get_rng_state  # type: ignore[attr-defined]
    module.set_rng_state = torch.set_rng_state  # type: ignore[attr-defined]
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """The CPU as verl's accelerator; Ray is told of one "GPU", which is a place to run."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...
    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...
    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
