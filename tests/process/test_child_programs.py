"""Programs of this project started with the packages of their parent."""

import subprocess
import sys
from pathlib import Path

import shmbus
from shmbus.base.programs import program


def test_a_program_that_finds_the_package_nowhere_else_gets_its_parent_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "told.py").write_text("import sys; print(sys.path[-1])")
    command = [*program("told")]
    answer = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert command[0] == sys.executable
    assert Path(answer.stdout.strip()) == Path(shmbus.__file__).resolve().parents[1]
