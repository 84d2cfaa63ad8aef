"""Examples run in their quick form, keep their promise, leave nothing, and are short."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
from conftest import Spawner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: Nonempty lines, for a single reading. Longer: an example with a whole model, and an example with
#: both sides of two machines.
MAX_LINES = 150
LONG = {"demo_on_two_nodes.py", "grpo_transformers.py"}
#: Adapters of stacks that need a GPU for their installation; tests/trainer has their tests.
ADAPTERS = {"prime_rl_transport.py", "slime_rollouts.py"}
OWN_TEST = {"draft_head.py", "weights_in_flight.py"}
#: Examples for stacks in separate environments (tests/peers), not run here.
ELSEWHERE = {
    "demo_on_two_nodes.py", "eagle_head.py", "trl_async.py", "trl_sync.py", "vllm_grpo.py",
}  # fmt: skip
# Processes that share the machine with anything else.
DEADLINE_S = 200

REWARD_ROSE = r"reward (\d\.\d\d) -> (\d\.\d\d)"
RUNS = {
    "agents.py": (("openai", "aiohttp"), REWARD_ROSE),
    "async_openai.py": (("openai", "aiohttp"), REWARD_ROSE),
    "multi_turn_tools.py": ((), REWARD_ROSE),
    "images.py": ((), REWARD_ROSE),
    "evaluation.py": ((), r"evaluation (\d\.\d\d) -> (\d\.\d\d)"),
    "fsdp2_torchrun.py": ((), REWARD_ROSE),
    "tensorboard_metrics.py": (("tensorboard",), r"(\d\d) curves in .*"),
    "wandb_offline.py": (("wandb",), r"run of \d{4,} bytes in .*"),
    "prefix_and_columns.py": (("transformers",), r"1408 rows for 8576 tokens"),
    "partial_rollouts.py": ((), r"20 samples, \d+ releases, [1-9]\d* of more than one version"),
    "shared_payload.py": ((), r"48 samples in 2\.4 MB, patches of groups: \[256, 256, 256\]"),
    "sampling_masks.py": ((), r"mean ratio 1\.00 with the masks, 0\.\d\d without"),
    "ray_actors.py": (("ray",), r"640 sequences trained of 640 requested"),
}


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
@pytest.mark.parametrize("name", RUNS)
def test_an_example_does_what_it_says(name: str, spawn: Spawner) -> None:
    needed, last_line = RUNS[name]
    for module in needed:
        pytest.importorskip(module)
    process = spawn.file(EXAMPLES / name, "--quick")
    said = process.finish(DEADLINE_S)
    assert not [*Path("/dev/shm").glob(f"*shmbus*-{process.pid}*")]
    # Its daemon may log behind it, or within the line.
    found = [*re.finditer(last_line, said)]
    assert found, said
    if " -> " in last_line:
        assert float(found[-1][2]) > float(found[-1][1])


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_that_is_asked_for_help_prints_help_and_ends(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    except SystemExit as end:
        assert end.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage:") or (name in ADAPTERS and said.count("\n") > 2)


def test_every_example_is_run_here_or_named_with_its_reason() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == (
        RUNS.keys() | LONG | ADAPTERS | ELSEWHERE | OWN_TEST
    )


@pytest.mark.parametrize("name", [*RUNS, *sorted(OWN_TEST)])
def test_an_example_is_short(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < MAX_LINES


@pytest.mark.parametrize("name", RUNS)
def test_an_example_names_what_it_imports(name: str) -> None:
    """The extra `examples` lists every package of the examples beside torch."""
    extra = re.search(r"^examples = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert extra
    for module in RUNS[name][0]:
        assert f'"{module}' in extra[1], f"{module} is missing in the extra `examples`"
        assert importlib.util.find_spec(module) is None or module in (EXAMPLES / name).read_text()
