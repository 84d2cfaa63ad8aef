"""A command starts programs of its own package, from any directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import segments_named

from shmbus.base.programs import program

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder that has packages of our names, which end whatever imports them."""
    for name in ("shmbus", "shmbus_ext", "trainer_adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the trap {name}')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_program_runs_from_a_folder_with_a_package_of_its_name(traps: Path) -> None:
    assert "the trap shmbus" in run([sys.executable, "-m", "shmbus", "--version"]).stderr
    ended = run(program("shmbus", "--version"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("shmbus ")


def test_servers_are_resumed_from_any_folder(traps: Path, bus_name: str) -> None:
    command = "import sys; sys.path.remove(''); from shmbus.cli import main; sys.exit(main())"
    ended = run([sys.executable, "-c", command, "weights", bus_name, "--resume"])
    assert "trap" not in ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert segments_named(bus_name) == []
