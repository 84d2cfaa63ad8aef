"""``shmbus demo``: options and requirements; the command line finds the command by its entry point.

Invariant: importing this module loads no torch; `run` does.
"""

from __future__ import annotations

import argparse
import importlib.util

from shmbus.cli._options import Commands, whole

_MOST = (1 << 63) - 1


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
        "  shmbus demo --seed 3 --output /tmp/run3\n"
        "  shmbus demo --engine vllm --model FOLDER  # resumes after a kill",
    )
    for option, bounds, default, help in (
        ("--workers", (1, 1000), 4, "rollout processes"),
        ("--group-size", (2, 1024), 8, "completions a prompt"),
        ("--steps", (1, _MOST), None, "optimizer steps"),
        ("--seed", (0, _MOST), 0, "of weights and prompts"),
    ):
        parser.add_argument(
            option,
            type=whole(*bounds),
            default=default,
            help=help if default is None else f"{help} (default {default})",
        )
    parser.add_argument(
        "--chaos", action="store_true", help="kill and restart a random worker every few seconds"
    )
    parser.add_argument(
        "--output", default="shmbus-demo", help="folder for the report (default shmbus-demo)"
    )
    parser.add_argument(
        "--engine", choices=["vllm"], help="train a chat model, with a vLLM server for the samples"
    )
    parser.add_argument("--model", help="Hugging Face folder of the chat model, for --engine")
    parser.add_argument(
        "--turns", action="store_true", help="with --engine: it sleeps while the trainer trains"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    if bool(arguments.engine) != bool(arguments.model) or (arguments.engine and arguments.chaos):
        raise ValueError("expected --engine vllm and --model FOLDER, no --chaos")
    if arguments.turns and not arguments.engine:
        raise ValueError("--turns needs --engine vllm and --model FOLDER")
    if not arguments.output:
        raise ValueError("--output: expected a folder, got ''; '.' is the working directory")
    needed = ["torch", "matplotlib"]
    install = "pip install 'shmbus[demo]'"
    if arguments.engine:
        needed += ["transformers", "openai", "vllm"]
        install = "pip install 'shmbus[demo,engines]' vllm; on a CPU, `make demo-real` in a clone"
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"it needs {', '.join(missing)}: {install}")
    options = {name: value for name, value in vars(arguments).items() if value is not None}
    if arguments.engine:
        from trainer_adapter.demo import chat

        fields = chat.ChatConfig.__struct_fields__
        return chat.main(chat.ChatConfig(**{n: options[n] for n in fields if n in options}))
    from trainer_adapter.demo.run import DemoConfig, main

    fields = DemoConfig.__struct_fields__
    return main(DemoConfig(**{name: options[name] for name in fields if name in options}))
