"""The trainer side with other versions of torch, transformers and flash-attn, as a program.

Usage: ``make versions``, or ``python tests/versions.py [--only PACKAGE[==VERSION]]...``. Each
version of `KINDS` gets an environment with the project's wheel, runs its tests on the CPU, and
becomes a row of docs/compat.md. A failed row prints its log.

Invariant: one environment exists at a time, and is removed afterwards with its processes.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: For gigabytes of CUDA over a slow line; and for all tests of one row.
INSTALL_S = 1800
TESTS_S = 900
TOOLS = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "safetensors")
#: Pins of the checks' environment: an older torch needs an older setuptools.
UNPINNED = ("setuptools",)


@dataclass(frozen=True)
class Kind:
    """How the rows of a package are made."""

    versions: tuple[str, ...]
    tests: tuple[str, ...]
    #: Whose version the second column shows.
    beside: str = "torch"
    needs: tuple[str, ...] = ()
    #: Options of pip for the package, if pip installs it after the others.
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


KINDS = {
    "torch": Kind(
        versions=(
            "2.6.0",
            "2.7.1",
            "2.8.0",
            "2.9.1",
            "2.10.0",
            "2.11.0",
            "2.12.1",
            "2.13.0",
            "2.14.1",
            "2.15.0",
        ),
        tests=(
            "trainer/test_compat.py",
            "attention/test_attention.py",
            "attention/test_attention_plan.py",
            "attention/test_attention_models.py",
            "trainer/test_losses.py",
            "trainer/test_advantages.py",
        ),
        beside="numpy",
        # The checkpoint reader of torch 2.7 imports huggingface_hub.
        needs=("huggingface_hub",),
    ),
    "transformers": Kind(
        versions=("4.52.4", "4.53.3", "4.57.6", "5.0.0", "5.23.0"),
        tests=("attention/test_attention_models.py", "examples/test_stock_model.py"),
    ),
    "flash-attn": Kind(
        versions=("2.6.3", "2.7.4.post1", "2.8.3"),
        tests=("versions_flash.py",),
        needs=("einops", "packaging", "setuptools", "wheel"),
        options=("--no-build-isolation", "--no-deps"),
        # Its Python files alone. Unless told to build, pip would download a build.
        environ={"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "FLASH_ATTENTION_FORCE_BUILD": "TRUE"},
    ),
}


class RowError(Exception):
    """A row came to no result; the message gives the reason."""


def run(argv: Sequence[str | Path], seconds: float, log: Path, **environ: str) -> int:
    """Run a program, and return its exit status; temporary files go beside its log."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    inherited.update(TMPDIR=str(log.parent), HYPOTHESIS_STORAGE_DIRECTORY=str(log.parent))
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**inherited, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RowError(f"{Path(argv[0]).name} not done within {seconds:.0f} s") from None
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def install(python: Path, log: Path, *what: str | Path, **environ: str) -> None:
    # Without a cache: few rows share their gigabytes.
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-cache-dir")
    if run([*pip, *what], INSTALL_S, log, **environ):
        lines = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
        raise RowError(f"not installed: {lines[0] if lines else 'pip failed'}")


def fill(package: str, version: str, wheel: Path, log: Path) -> Path:
    """Make a row's environment beside the log, and return its programs' folder."""
    kind = KINDS[package]
    programs = log.parent / "environment" / "bin"
    venv.create(programs.parent, with_pip=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = log.parent / "constraints.txt"
    constraints.write_text(
        "".join(pin for pin in pins if pin.split("==")[0] not in (package, *UNPINNED))
    )
    wanted = f"{package}=={version}"
    others = [f"{wheel}[train]", *TOOLS, *kind.needs]
    together = others if kind.options else [*others, wanted]
    install(programs / "python", log, "-c", constraints, *together)
    if kind.options:
        install(programs / "python", log, *kind.options, wanted, **kind.environ)
    return programs


def installed(programs: Path) -> dict[str, str]:
    argv = [programs / "python", "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(argv, stdout=subprocess.PIPE, timeout=INSTALL_S, check=True)
    return {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}


def run_tests(programs: Path, tests: Sequence[Path], log: Path) -> str:
    """Run tests in an environment, and return pytest's counts; RowError unless tests passed."""
    pytest = (programs / "python", "-m", "pytest", "-p", "no:cacheprovider", "-q")
    status = run([*pytest, *tests], TESTS_S, log)
    counts = re.findall(
        r"\d+ (?:passed|failed|skipped|errors?)\b", log.read_text().rstrip().rpartition("\n")[2]
    )
    told = ", ".join(counts) or "no test ran"
    if status or not any("passed" in count for count in counts):
        raise RowError(f"{told}; pytest ended with {status}")
    return told


def look(package: str, version: str, wheel: Path) -> tuple[list[str], bool]:
    """Make a row's environment and run its tests; returns the cells, and whether the row failed."""
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="shmbus-versions-") as directory:
        log = Path(directory, "log")
        try:
            programs = fill(package, version, wheel, log)
            versions = installed(programs)
            told, failed = (
                run_tests(programs, [ROOT / "tests" / name for name in KINDS[package].tests], log),
                False,
            )
        except RowError as error:
            told, failed = f"**{error}**", True
            print(log.read_text(errors="replace"), file=sys.stderr, flush=True)
    return [versions.get(package, version), versions.get(KINDS[package].beside, ""), told], failed


def chosen(only: Sequence[str]) -> list[tuple[str, str]]:
    """Packages and versions asked for, in the order of the tables; a version may be new."""
    rows = []
    for package, kind in KINDS.items():
        asked = [name.partition("==")[2] for name in only if name.partition("==")[0] == package]
        versions = kind.versions if not only or "" in asked else asked
        rows += [(package, version) for version in versions]
    return rows


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make versions ARGS=...", description="Run the trainer side with other versions."
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PACKAGE[==VERSION]",
        help="these rows; a version that no table has is run too",
    )  # fmt: skip
    options = parser.parse_args(argv)
    unknown = {name.partition("==")[0] for name in options.only} - KINDS.keys()
    if unknown:
        parser.error(f"--only: expected one of {', '.join(KINDS)}; got {', '.join(unknown)}")
    # As for Ctrl-C: environments and wheel are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    any_failed = False
    with tempfile.TemporaryDirectory(prefix="shmbus-wheel-") as directory:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        built = Path(directory, "build.log")
        if run([*build, "-w", directory, str(ROOT)], INSTALL_S, built):
            sys.exit(built.read_text())
        (wheel,) = Path(directory).glob("*.whl")
        previous = ""
        for package, version in chosen(options.only):
            if package != previous:
                heads = [package, KINDS[package].beside, "tests"]
                print("", line(heads), line(["---"] * len(heads)), sep="\n", flush=True)
                previous = package
            cells, failed = look(package, version, wheel)
            print(line(cells), flush=True)
            any_failed = any_failed or failed
    return any_failed


if __name__ == "__main__":
    sys.exit(main())
