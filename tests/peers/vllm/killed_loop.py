"""Goodput of a real model's loop under kills: ``python tests/peers/vllm/killed_loop.py --model M``.

The run of ``shmbus demo --engine vllm`` loses worker, server, or trainer to SIGKILL at a steady
pace; only the trainer is started again from outside. Goodput: acknowledged samples over samples
that left the bus. Steps behind the last checkpoint are trained again, from the same samples.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from serving import process_with

from bench import program
from bench.processes import MeasurementError
from bench.row import Row
from shmbus.inspect.status import read_status
from trainer_adapter.demo import chat

PROGRAM = "tests/peers/vllm/killed_loop.py"
#: Words of the command lines of the processes that die, beside the trainer's.
VICTIMS = {"worker": "demo.chat_task", "server": "vllm.entrypoints.openai"}
ORDER = ("worker", "server", "worker", "trainer")


class Noted(chat.ChatRun):
    """A run that notes each step, each checkpoint with the ledger, and each start."""

    def _note(self, **row: Any) -> None:
        with (self.output / "notes").open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), **row}) + "\n")

    def _resume(self, handler: Any) -> None:
        super()._resume(handler)
        self._note(began=handler.step)

    def _step(self, handler: Any, batch: Any) -> dict[str, float]:
        found = super()._step(handler, batch)
        groups = sorted(set(batch.instance_ids))
        self._note(step=handler.step, groups=groups, tokens=batch.num_tokens)
        return found

    def _evaluate(self, handler: Any) -> None:
        super()._evaluate(handler)
        ledger = msgspec.to_builtins(read_status(self.bus).ledger)
        self._note(saved=handler.step, held_out=self.held_out[-1].reward, ledger=ledger)


def be_trainer(model: str, output: str) -> None:
    Noted(chat.ChatConfig(model=model, steps=100_000, output=output), chat.scale_here()).run()


def drive(options: argparse.Namespace, output: Path) -> Row:
    """Run the loop, kill, and count."""
    command = [sys.executable, __file__, "--be", str(options.model), str(output)]
    notes, kills = output / "notes", dict.fromkeys(ORDER, 0)
    end = time.monotonic() + options.seconds
    next_kill = 0.0
    with (output / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while time.monotonic() < end:
            time.sleep(0.5)
            if process.poll() is not None:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            if not notes.exists() or '"saved"' not in notes.read_text():
                next_kill = time.monotonic() + options.every
            if time.monotonic() < next_kill:
                continue
            next_kill += options.every
            kind = ORDER[sum(kills.values()) % len(ORDER)]
            with contextlib.suppress(ValueError):  # the server starts, without a process yet
                pid = process.pid if kind == "trainer" else process_with(VICTIMS[kind])
                os.kill(pid, signal.SIGKILL)
                kills[kind] += 1
        process.send_signal(signal.SIGINT)
        process.wait(120)
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    saved = [row for row in rows if "saved" in row]
    if not saved:
        raise MeasurementError(f"no checkpoint in {options.seconds} s; the log: {output / 'log'}")
    return counted(rows, saved, kills)


def counted(rows: list[dict[str, Any]], saved: list[dict[str, Any]], kills: dict[str, int]) -> Row:
    steps: dict[int, dict[str, Any]] = {}
    again = 0
    for row in rows:
        if "began" in row:
            gone = [step for step in steps if step >= row["began"]]
            again += len(gone)
            steps = {step: steps[step] for step in steps.keys() - gone}
        elif "step" in row:
            steps[row["step"]] = row
    groups = [each for row in steps.values() for each in row["groups"]]
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if "step" in a and "step" in b]
    step_s = [b["at"] - a["at"] for a, b in pairs]
    ledger = saved[-1]["ledger"]
    left = ledger["committed"] - ledger["leased"] - ledger["stashed"] - ledger["in_ring"]
    figures = {
        "steps": len(steps), "steps_again": again,
        "tokens": sum(row["tokens"] for row in steps.values()),
        "groups_twice": len(groups) - len(set(groups)), "dropped": sum(ledger["dropped"].values()),
        "held_out_first": round(saved[0]["held_out"], 3),
        "held_out_last": round(saved[-1]["held_out"], 3),
        "step_p50_s": round(statistics.median(step_s), 3) if step_s else math.nan,
    }  # fmt: skip
    said = ", ".join(f"{key.replace('_', ' ')} {value:,.7g}" for key, value in figures.items())
    died = ", ".join(f"{kind} {count}" for kind, count in kills.items())
    return Row(
        name="vllm-killed-loop", title=f"a real model's loop, kills: {died}", unit="",
        values=(ledger["acknowledged"] / left,), figures={**figures, "kills": kills}, note=said,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = program.parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")

    def measure(options: argparse.Namespace) -> list[Row]:
        with tempfile.TemporaryDirectory() as output:
            return [drive(options, Path(output))]

    return program.run(PROGRAM, parser, measure, argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be"]:
        be_trainer(*sys.argv[2:])
    else:
        sys.exit(main())
