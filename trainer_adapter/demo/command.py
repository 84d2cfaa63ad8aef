"""``shmbus demo``: options and requirements; the command line finds the command by its entry point.

Invariant: importing this module loads no torch; `run` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small policy over the bus and watch its reward rise",
        description="Rollout worker processes sample completions of a sorting task from a small "
        "transformer, and put them through the bus; the trainer takes complete groups, runs GRPO, "
        "and sends new weights back. About a minute on two cores.",
        epilog="examples:\n"
        "  shmbus demo\n"
        "  shmbus demo --chaos             # kill a random worker every few seconds\n"
        "  shmbus demo --seed 3 --output /tmp/run3",
    )
    for option, default, help in (
        ("--workers", 4, "rollout processes"),
        ("--group-size", 8, "completions a prompt"),
        ("--steps", 500, "optimizer steps"),
    ):
        parser.add_argument(
            option, type=_count, default=default, help=f"{help} (default {default})"
        )
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")
    parser.add_argument(
        "--chaos", action="store_true", help="kill and restart a random worker every few seconds"
    )
    parser.add_argument(
        "--output", default="shmbus-demo", help="folder for the report (default shmbus-demo)"
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 1 with a hint if its extra is not installed."""
    needed = ("torch", "matplotlib")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"shmbus demo needs {', '.join(missing)}; install the extra: "
            "pip install 'shmbus[demo]'",
            file=sys.stderr,
        )
        return 1
    from trainer_adapter.demo.run import DemoConfig, main

    return main(
        DemoConfig(**{name: vars(arguments)[name] for name in DemoConfig.__struct_fields__})
    )
