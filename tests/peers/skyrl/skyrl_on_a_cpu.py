"""SkyRL's policy worker on a CPU: device, meshes, gloo and flash_attn's names are stand-ins."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import ray
import torch
import torch.distributed.device_mesh as meshes
import transformers.modeling_utils  # noqa: F401  (it looks for flash_attn once, here)

_CPU = torch.device("cpu")


def _stand_in() -> None:
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    theirs = meshes.init_device_mesh

    def init_device_mesh(device_type: str, *arguments: Any, **options: Any) -> Any:
        return theirs("cpu", *arguments, **options)

    meshes.init_device_mesh = init_device_mesh


@contextmanager
def _without_flash_attn() -> Iterator[None]:
    """During SkyRL's import: transformers would see an installed package."""

    def padding(*_: Any, **__: Any) -> None:
        raise NotImplementedError("flash_attn is not there: set trainer.flash_attn=false")

    for name in ("flash_attn", "flash_attn.bert_padding"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    module.pad_input = module.unpad_input = padding  # type: ignore[attr-defined]
    yield
    del sys.modules["flash_attn"], sys.modules["flash_attn.bert_padding"]


# Before SkyRL is imported, since it takes functions of torch by their names.
_stand_in()
with _without_flash_attn():
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase


class Policy(FSDPPolicyWorkerBase):  # type: ignore[misc]
    """SkyRL's worker, with a process group before its request for a GPU's."""

    def init_worker_process_group(self) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )
        super().init_worker_process_group()


PolicyWorker = ray.remote(num_gpus=1)(Policy)
