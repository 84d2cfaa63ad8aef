"""Mistyped commands, and completion in a real shell."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from operators import usage

from shmbus import Bus

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("word", "meant"),
    [("stats", "status"), ("Status", "status"), ("snapshoot", "snapshot"), ("ls", "list"),
     ("unlink", "rm"), ("delete", "rm"), ("clean", "gc"), ("serv", "serve"), ("doktor", "doctor")],
)  # fmt: skip
def test_a_mistyped_command_is_named_with_the_one_that_was_meant(word: str, meant: str) -> None:
    result = usage(word, "run1")
    assert (result.status, result.out) == (2, "")
    assert f"there is no command {word!r}; did you mean {meant!r}?" in result.err
    assert "inspect" in result.err  # and the others


def test_a_command_that_is_like_none_has_the_list_and_no_guess() -> None:
    result = usage("xyzzy")
    assert result.status == 2 and "did you mean" not in result.err
    assert "expected one of serve, status," in result.err


COMPLETE = """
eval "$({register} shmbus)"
COMP_LINE="$1"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
read -ra COMP_WORDS <<< "$COMP_LINE"
[[ "$COMP_LINE" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_python_argcomplete shmbus
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(line: str, directory: Path) -> list[str]:
    """What bash offers for a line, with `shmbus` as a program on its path."""
    if importlib.util.find_spec("argcomplete") is None:
        pytest.skip("argcomplete (extra ops) is not installed")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    program = directory / "shmbus"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom shmbus.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    register = f"{sys.executable} -m argcomplete.scripts.register_python_argcomplete"
    result = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE.format(register=register), "bash", line],
        capture_output=True, text=True, timeout=60, cwd=directory,
        env={**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [word.strip() for word in result.stdout.splitlines() if word.strip()]


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    assert completed("shmbus sta", tmp_path) == ["status"]
    assert {"serve", "status", "gc", "snapshot"} <= set(completed("shmbus ", tmp_path))


def test_a_shell_completes_options(tmp_path: Path) -> None:
    assert set(completed("shmbus serve --max", tmp_path)) >= {"--max-producers"}


def test_a_shell_completes_the_names_of_buses_that_exist(bus_name: str, tmp_path: Path) -> None:
    with Bus.create(bus_name, "64KiB"):
        for command in ("status", "serve", "inspect", "pause", "gc"):
            assert completed(f"shmbus {command} {bus_name[:-3]}", tmp_path) == [bus_name]
    assert bus_name not in completed("shmbus status ", tmp_path)
