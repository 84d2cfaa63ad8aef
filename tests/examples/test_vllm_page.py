"""Worker and trainer of docs/vllm.md train together; server and fleet are stand-ins."""

import ast
import asyncio
import contextlib
import re
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shmbus
import shmbus.errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()


class Completions:
    """Answers as vLLM does: the first call is away, the second ended early for new weights."""

    def __init__(self) -> None:
        self.salts: list[str] = []

    async def create(self, *, prompt: list[int], extra_body: dict[str, Any], **_: Any) -> Any:
        import openai

        self.salts.append(extra_body["cache_salt"])
        if len(self.salts) == 1:
            raise openai.APIConnectionError(request=SimpleNamespace())  # type: ignore[arg-type]
        ids = [prompt[0], 5, len(self.salts) % 7]
        reason = "abort" if len(self.salts) == 2 else "stop"
        logprobs = SimpleNamespace(token_logprobs=[-1.0] * 3)
        return SimpleNamespace(
            choices=[SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=logprobs)]
        )


def work(name: str, client: Any, code: str) -> None:
    import openai

    space: dict[str, Any] = {"openai": openai, "shmbus": shmbus, "client": client}
    space["reward"] = lambda _, ids: ids[2]
    exec(f"async def run(producer):\n{textwrap.indent(code, '    ')}", space)  # the page's own

    async def main() -> None:
        async with await shmbus.Producer.awaited(name) as producer:
            await space["run"](producer)

    with contextlib.suppress(shmbus.errors.BusRemovedError):  # the end of the test
        asyncio.run(main())


@pytest.mark.slow
def test_the_page_trains_every_prompt(bus_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("openai")
    import torch

    import shmbus.engines
    import shmbus.weights
    import trainer_adapter
    from trainer_adapter import attention, logprobs, losses

    worker, trainer = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            vocab_size=16, hidden_size=16, intermediate_size=16, head_dim=8,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        ),
        attn_implementation=attention.register_with_transformers(),
    )  # fmt: skip
    sent: list[int] = []
    fleet = SimpleNamespace(update_sync=lambda _, version: sent.append(version))
    monkeypatch.setattr(shmbus.engines, "EngineFleet", lambda *_, **__: fleet)
    space: dict[str, Any] = {}
    for module in (shmbus.engines, shmbus.weights, trainer_adapter, attention, logprobs, losses):
        space |= {name: getattr(module, name) for name in dir(module)}
    space["model"], space["optimizer"] = model, torch.optim.SGD(model.parameters(), 0.1)
    space["prompts"] = [{"prompt": np.array([number, 3], np.int32)} for number in range(4)]
    schema = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
    client = SimpleNamespace(completions=Completions())
    with shmbus.Bus.create(bus_name, "16MiB", schema=schema) as bus:
        process = threading.Thread(target=work, args=(bus_name, client, worker), daemon=True)
        process.start()
        code = trainer.replace('"run1"', repr(bus_name)).replace("batch=16", "batch=2")
        exec(compile(code, "docs/vllm.md", "exec"), space)
        counts = bus.stats()
    process.join(60)
    assert sent == [0, 1, 2]
    assert counts.acknowledged == 4 * 8 == counts.committed
    assert all(client.completions.salts)


def test_the_lines_of_the_page_are_those_of_the_example() -> None:
    printed = [
        "".join(n.value if isinstance(n, ast.Constant) else "..." for n in node.values)  # type: ignore[misc]
        for node in ast.walk(ast.parse((ROOT / "examples" / "vllm_grpo.py").read_text()))
        if isinstance(node, ast.JoinedStr)
    ]
    shown = re.search(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    assert shown
    for line in shown[1].splitlines():
        assert re.sub(r"(?<=step )\d+", "...", line) in printed
