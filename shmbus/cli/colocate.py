"""``shmbus colocate``: a trainer and an engine on one GPU, under MPS if available.

Invariants:

- A device's state is neither read through its driver nor changed: MPS is a daemon of this user's,
  in directories of this user's own. Another user's MPS is named, and left alone.
- Without MPS the answer differs only by the reason: both sides work in turns, and slower.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shmbus.cli._options import Commands, add_command, refuse_given, share

#: Of a device's memory: what contexts of two processes, MPS and the channel's buffers take.
SPARE: Final = 0.10

_CONTROL: Final = "nvidia-cuda-mps-control"

#: The kernel's limit of a name.
_COMM: Final = _CONTROL[:15]

#: Seconds for the daemon's start or end.
_PATIENCE_S: Final = 10.0


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "colocate",
        run,
        help="share a GPU between a trainer and an engine",
        description="Says with which environment and shares of memory a trainer and an engine "
        "run on one GPU, for a shell's eval; under MPS, which --start starts for this user, both "
        "run at the same time. Nothing is set on the device.",
        examples=[
            'eval "$(shmbus colocate --train 0.3 --infer 0.5 --start)"',
            "shmbus colocate --stop  # once both have ended",
        ],
        bus=False,
    )
    for option, who in (("--train", "trainer"), ("--infer", "engine")):
        text = f"share of the GPU's memory for the {who}, between 0 and 1"
        parser.add_argument(option, type=share, metavar="SHARE", help=text)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--start", action="store_true", help="start MPS, where it does not run yet")
    action.add_argument("--stop", action="store_true", help="end the MPS that --start has started")


def run(arguments: argparse.Namespace) -> int:
    """Print the environment, after starting MPS on request; or end MPS."""
    if arguments.stop:
        refuse_given(arguments, ("train", "infer"), "expected without --stop; leave it out")
        return _stop()
    total = (arguments.train or 1) + (arguments.infer or 1) + SPARE
    if total > 1 + 1e-9:
        raise ValueError(
            "expected --stop, or --train and --infer with a sum of at most "
            f"{1 - SPARE:.2f}, got {arguments.train} and {arguments.infer}"
        )
    problem = _start() if arguments.start else _missing()
    if problem:
        print(f"# no MPS: {problem}; both sides work all the same, in turns, and slower")
    else:
        for name, value in _environment().items():
            print(f"export {name}={shlex.quote(value)}")
    print(f"# the trainer: torch.cuda.set_per_process_memory_fraction({arguments.train:g})")
    print(f"# the engine:  --gpu-memory-utilization {arguments.infer:g}")
    return 0


def _environment() -> dict[str, str]:
    """Return the place of this user's MPS: from the environment, or our own."""
    home = f"/tmp/shmbus-mps-{os.getuid()}"
    return {
        "CUDA_MPS_PIPE_DIRECTORY": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", f"{home}/pipe"),
        "CUDA_MPS_LOG_DIRECTORY": os.environ.get("CUDA_MPS_LOG_DIRECTORY", f"{home}/log"),
    }


def _daemons() -> Iterator[tuple[int, int, str]]:
    """Yield each daemon's pid, user, and place; an empty place if unreadable."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended
            if (folder / "comm").read_text().strip() != _COMM:
                continue
            place = ""
            with contextlib.suppress(PermissionError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                place = dict(each.decode().partition("=")[::2] for each in variables).get(
                    "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
                )
            yield int(folder.name), folder.stat().st_uid, place


def _is_here() -> bool:
    """Tell if this user's MPS runs in the environment's place."""
    here = _environment()["CUDA_MPS_PIPE_DIRECTORY"]
    return any(user == os.getuid() and place == here for _, user, place in _daemons())


def _missing() -> str:
    """Name the missing parts of MPS; empty while MPS runs."""
    if _is_here():
        return ""
    if shutil.which(_CONTROL) is None:
        return f"{_CONTROL} is not installed; it comes with NVIDIA's driver"
    for pid, user, place in _daemons():
        if user != os.getuid():
            return f"uid {user} runs it (pid {pid}), and a device serves one user's: ask to end it"
        return f"it runs elsewhere (pid {pid}): set CUDA_MPS_PIPE_DIRECTORY={place}"
    return "it does not run: add --start"


def _start() -> str:
    """Start MPS; return the obstacle, or an empty text."""
    problem = _missing()
    if not problem.endswith("--start"):
        return problem
    variables = _environment()
    for place in variables.values():
        os.makedirs(place, mode=0o700, exist_ok=True)
    # MPS would number the devices of CUDA_VISIBLE_DEVICES anew, and a client with the same variable
    # would find none: https://docs.nvidia.com/deploy/topics/topic_5_2_1.html
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [_CONTROL, "-d"], env={**own, **variables}, capture_output=True, text=True
    )
    if done.returncode == 0 and _becomes(True):
        return ""
    return f"{_CONTROL} -d did not start it: {(done.stderr or done.stdout).strip()}"


def _stop() -> int:
    if not _is_here():
        print("no MPS of this user's runs here; nothing to end", file=sys.stderr)
        return 1
    subprocess.run(
        [_CONTROL], env={**os.environ, **_environment()}, input="quit\n", text=True, check=True
    )
    if _becomes(False):
        return 0
    print("MPS has clients yet, and ends after them", file=sys.stderr)
    return 1


def _becomes(here: bool) -> bool:
    """Wait until this user's MPS runs, or until it ended."""
    deadline = time.monotonic() + _PATIENCE_S
    while _is_here() != here and time.monotonic() < deadline:
        time.sleep(0.05)
    return _is_here() == here
