"""Commands added by other packages: found by their entry points, and harmless when broken."""

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from operators import cli

from shmbus import cli as shmbus_cli

Install = Callable[[str, str], None]

GREETING = """
def add_parser(commands):
    parser = commands.add_parser("greet", help="say who is there")
    parser.add_argument("name")
    parser.set_defaults(run=lambda parsed: print(f"hello {parsed.name}") or 0)
"""
HALF_WAY = """
def add_parser(commands):
    commands.add_parser("broken3", help="looks well").add_argument("a", b="c")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    def add(name: str, source: str) -> None:
        (tmp_path / f"plugin_{name}.py").write_text(source)
        metadata = tmp_path / f"plugin_{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(f"[shmbus.commands]\n{name} = plugin_{name}\n")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return add


def test_a_package_adds_a_command_by_an_entry_point(install: Install) -> None:
    install("greet", GREETING)
    assert "say who is there" in cli("--help").out
    done = cli("greet", "world")
    assert (done.status, done.out) == (0, "hello world\n")
    assert cli("greet").status == 2


BROKEN = {
    "import what_nobody_has": "No module named 'what_nobody_has'",
    "raise ValueError('100% wrong')": "ValueError: 100% wrong",
    "add_parser = None": "'NoneType' object is not callable",
    HALF_WAY: "TypeError",
}


def test_a_command_that_cannot_be_loaded_is_named_and_harms_no_other(install: Install) -> None:
    for number, source in enumerate(BROKEN):
        install(f"broken{number}", source)
    install("greet", GREETING)
    shown = cli("--help")
    assert shown.status == 0
    for number, reason in enumerate(BROKEN.values()):
        assert f"cannot be loaded: plugin_broken{number}: " in " ".join(shown.out.split())
        done = cli(f"broken{number}", *(["--help"] if number % 2 else ["--any", "thing"]))
        assert done.status == 1
        assert reason in done.err and "install it again" in done.err
    assert "say who is there" in shown.out and "looks well" not in shown.out
    assert cli("greet", "world").out == "hello world\n"


def test_a_built_in_command_loads_no_other_and_cannot_be_replaced(install: Install) -> None:
    install("list", "raise SystemExit('was loaded')")
    assert "was loaded" not in cli("list").err
    install("other", "import os; os._exit(9)")
    assert cli("list").status == 0
    assert "Lists every bus" in cli("list", "--help").out


def test_the_table_names_the_module_of_each_built_in_command_in_the_order_of_the_help() -> None:
    table = shmbus_cli._COMMANDS
    for module in set(table.values()):
        commands = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(f"shmbus.cli.{module}").add_parser(commands)
        assert list(commands.choices) == [name for name, of in table.items() if of == module]
    room = Path(shmbus_cli.__file__).parent
    adds = {path.stem for path in room.glob("[a-z]*.py") if "\ndef add_parser(" in path.read_text()}
    assert adds == set(table.values())
    listed = re.findall(r"^    (\w+)", cli("--help").out, re.M)
    assert listed[: len(table)] == list(table)


def test_a_command_starts_without_the_modules_of_the_others() -> None:
    code = "import sys; from shmbus.cli import main; main(['list', '--json']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "shmbus.cli.list" in loaded
    assert not loaded & {"shmbus.daemon", "shmbus.cli.doctor", "shmbus.cli.serve", "aiohttp"}
