"""The table of built-in commands, and what a command loads."""

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

from operators import cli

from shmbus import cli as shmbus_cli


def test_the_table_names_the_module_of_each_built_in_command_in_the_order_of_the_help() -> None:
    table = shmbus_cli._COMMANDS
    for module in set(table.values()):
        commands = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(f"shmbus.cli.{module}").add_parser(commands)
        assert list(commands.choices) == [name for name, of in table.items() if of == module]
    room = Path(shmbus_cli.__file__).parent
    adds = {path.stem for path in room.glob("[a-z]*.py") if "\ndef add_parser(" in path.read_text()}
    assert adds == set(table.values())
    assert re.findall(r"^    (\w+)", cli("--help").out, re.M)[: len(table)] == list(table)


def test_a_command_starts_without_the_modules_of_the_others() -> None:
    code = "import sys; from shmbus.cli import main; main(['list', '--json']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "shmbus.cli.list" in loaded
    assert not loaded & {"shmbus.daemon", "shmbus.cli.doctor", "shmbus.cli.serve", "aiohttp"}
