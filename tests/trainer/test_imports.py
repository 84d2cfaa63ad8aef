"""Imports are cheap: a name is loaded when it is first asked for, and no more than it needs."""

import json
import subprocess
import sys
from typing import Any

STACKS = (
    "aiohttp", "atroposlib", "prime_rl", "slime", "torch", "transformers", "trl", "verl",
)  # fmt: skip
#: Modules imported in turn, and modules still unloaded then.
IN_TURN: list[tuple[str, tuple[str, ...]]] = [
    ("import trainer_adapter", ("numpy", "shmbus", *STACKS)),
    *(
        (f"import trainer_adapter.adapters.{stack}", STACKS)
        for stack in ("atropos", "trl", "verl")
    ),
    ("from trainer_adapter.demo import sampler, task, worker", STACKS),
]  # fmt: skip
LATER = """
import json, sys
found = []
for statement, names in {statements!r}:
    exec(statement)
    found.append([name for name in names if name in sys.modules])
assert set(trainer_adapter.__all__) <= set(dir(trainer_adapter))
import shmbus.tensors, shmbus.engines, shmbus.weights
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
trainer_adapter.varlen_attention
found.append(["torch" in sys.modules, "torch.distributed.tensor" in sys.modules])
print(json.dumps(found))
"""
WITHOUT_TORCH = """
import sys; sys.modules["torch"] = None
try:
    from trainer_adapter import OnlineDataHandler
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_no_package_loads_torch_or_a_stack_before_a_name_needs_it() -> None:
    *loaded, torch_and_sharded = json.loads(run(LATER.format(statements=IN_TURN)))
    wrong: list[Any] = [
        (said, found) for (said, _), found in zip(IN_TURN, loaded, strict=True) if found
    ]
    assert wrong == []
    assert torch_and_sharded == [True, False], "no module of sharded tensors"


def test_without_torch_the_import_says_what_to_install() -> None:
    said = run(WITHOUT_TORCH)
    assert said.startswith("torch trainer_adapter.OnlineDataHandler needs torch")
    assert "pip install torch" in said
