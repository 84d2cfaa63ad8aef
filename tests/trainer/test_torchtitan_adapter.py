"""The torchtitan adapter without torchtitan, and the data handler of its fork by its interface."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import doc_pages
import pytest

import shmbus
from shmbus.peers.atropos import samples_of
from trainer_adapter.adapters.torchtitan import ShmbusBatches

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from torchtitan_fork import use_bus


def fork() -> Any:
    """What ``torchtitan/grpo/data_handling.py`` does with ``requests``, at 26870b6."""
    module = ModuleType("torchtitan.grpo.data_handling")
    module.requests = None  # type: ignore[attr-defined]

    class OnlineDataHandler:
        server_url = "http://localhost:8001"

        def register_atropos(self, global_batch_size: int) -> None:
            vars(module)["requests"].post(
                f"{self.server_url}/register",
                json={"batch_size": global_batch_size, "max_token_len": 64, "num_steps": 2},
            )

        def data_handling(self) -> Any:
            while True:
                data = vars(module)["requests"].get(f"{self.server_url}/batch").json()
                if data["batch"] is not None:
                    return data

    module.OnlineDataHandler = OnlineDataHandler  # type: ignore[attr-defined]
    return module


def test_the_forks_handler_takes_its_batches_from_the_bus(bus_name: str) -> None:
    module = fork()
    sent = {
        "tokens": [[1, 2, 3], [1, 4, 5]], "masks": [[-100, 2, 3], [-100, 4, 5]],
        "scores": [0.5, 1.0], "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.1, -0.2]],
    }  # fmt: skip
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus, shmbus.Producer(bus_name) as producer:
        parts = {"torchtitan": ModuleType("torchtitan"), "torchtitan.grpo": ModuleType("grpo")}
        with pytest.MonkeyPatch.context() as patch:
            for name, part in {**parts, "torchtitan.grpo.data_handling": module}.items():
                patch.setitem(sys.modules, name, part)
            parts["torchtitan"].grpo = parts["torchtitan.grpo"]  # type: ignore[attr-defined]
            parts["torchtitan.grpo"].data_handling = module  # type: ignore[attr-defined]
            doc_pages.run("torchtitan.md", "use_bus(", bus_name)
        handler = module.OnlineDataHandler()
        with pytest.raises(RuntimeError, match="expected register_atropos first"):
            handler.data_handling()
        handler.register_atropos(2)
        for _ in range(2):
            producer.put_group(f"g{producer.stats().committed}", samples_of(sent))
            [group] = handler.data_handling()["batch"]
            assert {name: group[name] for name in sent} == sent
        assert bus.stats().acknowledged == 2, "the batch before"
        module.requests.trainer.close()


def test_what_lacks_names_is_refused_by_them(bus_name: str) -> None:
    with pytest.raises(ImportError, match="has no OnlineDataHandler, requests"):
        use_bus(ModuleType("other"), bus_name)
    if importlib.util.find_spec("torchtitan") is None:
        with pytest.raises(ImportError, match=r"TrainingSampleGroup of torchtitan\.experiments"):
            ShmbusBatches(bus_name, None)
