"""A stock model of transformers learns over the bus, as the file of the example says."""

from pathlib import Path

import pytest
from conftest import Spawner

ROOT = Path(__file__).resolve().parents[2]
# Two processes that share the machine with whatever else runs there.
DEADLINE_S = 300


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_a_stock_model_learns_over_the_bus(spawn: Spawner) -> None:
    pytest.importorskip("transformers", minversion="4.53")
    example = ROOT / "examples" / "grpo_transformers.py"
    lines = spawn.file(example, "--steps", 50, "--device", "cpu").finish(DEADLINE_S).splitlines()
    assert any(line.endswith("trajectories trained, balanced: True") for line in lines)
    (told,) = (line for line in lines if line.startswith("reward "))
    first, last = (float(word) for word in told.split()[1:4:2])
    assert first < 0.3
    assert last > 0.5
