"""The long form: at least so many injected exceptions, over every path, in rounds of new shapes.

Usage: ``python tests/interrupt/sweep.py NAME INJECTIONS [SEED [PATH...]]``; `make interrupts` runs
it. Prints a JSON line a path, with the raised exceptions and the faults, and a line of totals. Exit
status 1 for any fault.

A round goes over each event of each operation of its path, in circumstances by its seed. A fault
comes with the command that repeats its round.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

#: Seconds for a round: a hanging call is a fault.
ROUND_S = 600

_HANDLER = ["next", "next-twice", "ack", "give-back", "state", "load", "close"]
_CONSUMER = ["take", "ack", "ack-list", "drop", "give-back", "with", "stats"]
_DOUBTED = ["doubted-stats", "doubted-ack", "doubted-give-back"]

#: A script and its operations, by path.
PATHS: dict[str, tuple[str, list[str]]] = {
    "embedded": (
        "embedded.py",
        [*_CONSUMER, "take-stale", "take-failing", "take-judged", "attach", "close"],
    ),
    "daemon": (
        "served.py",
        [*_CONSUMER, "version", *_DOUBTED, "attach", "close"],
    ),
    "two ranks": (
        "served.py",
        [f"rank-{verb}" for verb in ("step", "ack", "drop", "give-back", "with", "attach")],
    ),
    "handler": ("handler.py", [*_HANDLER, "offer", "next-stale", "attach"]),
    "handler, daemon": (
        "handler.py",
        [f"served-{verb}" for verb in [*_HANDLER, "offer", "attach"]],
    ),
    "handler, two ranks": (
        "handler.py",
        [f"rank-{verb}" for verb in [*_HANDLER, "offer", "attach"]],
    ),
    "handler, prefetch": ("handler.py", [f"{verb}-prefetch" for verb in _HANDLER]),
    "handler, prefetch, daemon": (
        "handler.py",
        [f"served-{verb}-prefetch" for verb in _HANDLER],
    ),
    "handler, prefetch, two ranks": (
        "handler.py",
        [f"rank-{verb}-prefetch" for verb in _HANDLER],
    ),
}


def run_round(name: str, path: str, seed: int) -> dict[str, Any]:
    """Run a round of a path; an end by other means is a fault."""
    script, operations = PATHS[path]
    command = [sys.executable, str(HERE / script), name, *operations, "--seed", str(seed)]
    repeat = f"python tests/interrupt/{script} {name} {' '.join(operations)} --seed {seed}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ROUND_S)
    except subprocess.TimeoutExpired:
        return {"injections": 0, "faults": [f"{repeat}: not over after {ROUND_S} s"]}
    if done.returncode:
        return {"injections": 0, "faults": [f"{repeat}: {done.stderr[-600:]}"]}
    report: dict[str, Any] = json.loads(done.stdout)
    report["faults"] = [f"{repeat}: {fault}" for fault in report["faults"]]
    return report


def sweep(name: str, path: str, injections: int, seed: int) -> dict[str, Any]:
    total: dict[str, Any] = {"path": path, "seed": seed, "injections": 0, "rounds": 0, "faults": []}
    while total["injections"] < injections and not total["faults"]:
        report = run_round(name, path, seed + total["rounds"])
        total["injections"] += report["injections"]
        total["faults"] += report["faults"]
        total["rounds"] += 1
    return total


def main(name: str, injections: int, seed: int, paths: list[str]) -> int:
    each = -(-injections // len(paths))
    totals = []
    for path in paths:
        totals.append(sweep(name, path, each, seed))
        print(json.dumps(totals[-1]), flush=True)
    faults = sum(len(total["faults"]) for total in totals)
    whole = sum(total["injections"] for total in totals)
    print(json.dumps({"path": "all", "seed": seed, "injections": whole, "faults": faults}))
    return bool(faults)


if __name__ == "__main__":
    bus, wanted, *rest = sys.argv[1:]
    chosen = int(rest[0]) if rest else random.SystemRandom().randrange(2**31)
    sys.exit(main(bus, int(wanted), chosen, rest[1:] or list(PATHS)))
