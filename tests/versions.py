"""The trainer side with other versions of torch, transformers and flash-attn, as a program.

Usage: ``make versions``, or ``python tests/versions.py [--only PACKAGE[==VERSION]]...``. Each row
of `KINDS` gets an environment of its own with that version and the project's wheel, and runs its
tests there, on the CPU. Printed are the tables of docs/compat.md, row by row, and what failed.

Invariants:

- There is one environment at a time. It is gone afterwards, and a row that is cut short leaves no
  process behind.
- A cell says what tests did. Where none ran it says so, and where one failed, how many did.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
#: For gigabytes of CUDA over a slow line; and for all tests of one row.
INSTALL_S = 1800
TESTS_S = 900
#: What the tests themselves take.
TOOLS = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "safetensors")
#: Pins that are for the checks' one environment: an older torch takes an older setuptools only.
UNPINNED = ("setuptools",)


class Outcome(NamedTuple):
    file: str
    name: str
    #: "passed", "failed" or "skipped".
    result: str
    #: What it recorded about the package.
    facts: dict[str, str]
    #: Why it was skipped.
    why: str = ""


@dataclass
class GroupEntry:
    """One package at one version: its environment's packages, and what became of its tests."""

    package: str
    version: str
    installed: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""

    def results(self, pattern: str) -> list[str]:
        """Results of the tests whose ``file::name`` matches."""
        return [o.result for o in self.outcomes if re.search(pattern, f"{o.file}::{o.name}")]

    def verdict(self, pattern: str) -> str:
        """Whether the tests that match passed, in a word or two."""
        results = self.results(pattern)
        if "failed" in results:
            return f"**no**: {results.count('failed')} of {len(results)} failed"
        return "yes" if "passed" in results else "not run"

    @property
    def failed(self) -> bool:
        """Whether it has anything to mend."""
        return bool(self.problem) or self.verdict("") != "yes"

    @property
    def counts(self) -> str:
        """How many tests came to what."""
        results = self.results("")
        kinds = [kind for kind in ("passed", "failed", "skipped") if kind in results]
        return ", ".join(f"{results.count(kind)} {kind}" for kind in kinds)


# --- cells


def reader(row: GroupEntry) -> str:
    """What `HuggingFaceStorageReader` does."""
    verdict = row.verdict("test_a_safetensors|test_a_token_is|test_a_torch_without|test_a_reader")
    if verdict != "yes":
        return verdict
    if any(o.why == "this torch has no such reader" for o in row.outcomes):
        return "`ImportError` that says so: torch has none"
    takes_none = row.results("test_a_token_is") == ["passed"]
    return "yes; takes no token" if takes_none else "yes"


def native(row: GroupEntry) -> str:
    """What torch's varlen kernel is taken for; that it runs needs a GPU."""
    verdict = row.verdict("test_what_torch_offers")
    facts = [o.facts["native"] for o in row.outcomes if "native" in o.facts]
    return facts[0] if verdict == "yes" and facts else verdict


def registration(row: GroupEntry) -> str:
    """Whether models can be given the attention."""
    if set(row.results("stock_model|padded_rows|what_it_has_not")) == {"skipped"}:
        refused = row.verdict("test_a_transformers_that_lacks")
        return "`ImportError` that says so" if refused == "yes" else refused
    return row.verdict("test_what_it_has_not|test_a_transformers_that_lacks")


def values(row: GroupEntry) -> str:
    """How many values the package's own `unpad_input` returns."""
    return " or ".join(sorted({o.facts["values"] for o in row.outcomes if "values" in o.facts}))


def says(pattern: str) -> Callable[[GroupEntry], str]:
    """A cell that says whether the tests that match passed."""
    return lambda row: row.verdict(pattern)


# --- the matrix


@dataclass(frozen=True)
class Kind:
    """How one package's rows are made."""

    versions: tuple[str, ...]
    tests: tuple[str, ...]
    #: Heads of columns, with what fills them.
    columns: dict[str, Callable[[GroupEntry], str]]
    #: What its environment has besides; the versions are in constraints.txt.
    beside: tuple[str, ...] = ()
    #: How pip installs it, if not together with everything else.
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
        columns={
            "`unpad_input`, `pad_input`": says("compat::.*(padding|packed|filler|tokens|fit)"),
            "`HuggingFaceStorageReader`": reader,
            "`varlen_attention` by SDPA": says("test_attention(_plan)?::"),
            "compiled": says("test_attention_models::.*(share_two_graphs|cast_first|operator)"),
            "losses, advantages": says("test_(losses|advantages)::"),
            "`torch.nn.attention.varlen`": native,
        },
        # Which torch 2.7's reader of checkpoints imports.
        beside=("huggingface_hub",),
    ),
    "transformers": Kind(
        versions=("4.52.4", "4.53.3", "4.57.6", "5.0.0", "5.23.0"),
        tests=("attention/test_attention_models.py", "examples/test_stock_model.py"),
        columns={
            "`register_with_transformers`": registration,
            "packed batches": says("trains_a_stock_model"),
            "padded rows, generation": says("padded_rows_and_generation"),
            "`examples/grpo_transformers.py`": says("learns_over_the_bus"),
        },
    ),
    "flash-attn": Kind(
        versions=("2.6.3", "2.7.4.post1", "2.8.3"),
        tests=("versions_flash.py",),
        columns={
            "values of its `unpad_input`": values,
            "ours returns the same": says("test_(un)?padding_returns"),
            "same gradients": says("test_gradients"),
            "its function takes our call": says("takes_the_call"),
        },
        beside=("einops", "packaging", "setuptools", "wheel"),
        options=("--no-build-isolation", "--no-deps"),
        # Its Python files alone. Unless told to build, it would look for a build on the web.
        environ={"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "FLASH_ATTENTION_FORCE_BUILD": "TRUE"},
    ),
}


# --- running


class RowError(Exception):
    """A row came to no result; the message says why."""


def run(argv: Sequence[str | Path], seconds: float, log: Path, **environ: str) -> int:
    """Run a program, and return its exit status; temporary files go beside its log.

    Where it takes too long, or this program is ended, it is ended with all that it started.
    """
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
    # Not kept: what one row has, few others have, and it is gigabytes.
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-cache-dir")
    if run([*pip, *what], INSTALL_S, log, **environ):
        lines = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
        raise RowError(f"not installed: {lines[0] if lines else 'pip failed'}")


def fill(row: GroupEntry, wheel: Path, log: Path) -> Path:
    """Make a row's environment beside the log, and return its programs' folder."""
    kind = KINDS[row.package]
    work = log.parent
    venv.create(work / "environment", with_pip=True)
    programs = work / "environment" / "bin"
    constraints = work / "constraints.txt"
    constraints.write_text(
        "".join(
            line
            for line in (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
            if line.split("==")[0] not in (row.package, *UNPINNED)
        )
    )
    wanted = f"{row.package}=={row.version}"
    others = [f"{wheel}[train]", *TOOLS, *kind.beside]
    together = others if kind.options else [*others, wanted]
    install(programs / "python", log, "-c", constraints, *together)
    if kind.options:
        install(programs / "python", log, *kind.options, wanted, **kind.environ)
    return programs


def packages(programs: Path) -> dict[str, str]:
    listed = subprocess.run(
        [programs / "python", "-m", "pip", "list", "--format", "json"],
        stdout=subprocess.PIPE, timeout=INSTALL_S, check=True,
    )  # fmt: skip
    return {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}


def outcomes(report: Path) -> list[Outcome]:
    """Read what became of each test from pytest's report."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = any(child.tag in ("failure", "error") for child in case)
        skipped = case.find("skipped")
        result = "failed" if bad else "passed" if skipped is None else "skipped"
        file = case.get("classname", "").rpartition(".")[2]
        facts = {entry.get("name", ""): entry.get("value", "") for entry in case.iter("property")}
        why = "" if skipped is None else skipped.get("message", "")
        found.append(Outcome(file, case.get("name", ""), result, facts, why))
    return found


def look(row: GroupEntry, wheel: Path) -> None:
    """Make a row's environment, run its tests there, and write down what they did."""
    with tempfile.TemporaryDirectory(prefix="shmbus-versions-") as directory:
        log = Path(directory, "log")
        report = Path(directory, "report.xml")
        try:
            programs = fill(row, wheel, log)
            row.installed = packages(programs)
            tests = [ROOT / "tests" / name for name in KINDS[row.package].tests]
            options = ("-p", "no:cacheprovider", "-q", "-o", "junit_family=xunit1")
            pytest = [programs / "pytest", *options, f"--junit-xml={report}"]
            run([*pytest, *tests], TESTS_S, log)
            if not report.exists():
                raise RowError("pytest wrote no report")
            row.outcomes = outcomes(report)
        except RowError as error:
            row.problem = str(error)
        if row.failed:
            print(log.read_text(errors="replace"), file=sys.stderr, flush=True)


def chosen(only: Sequence[str]) -> list[GroupEntry]:
    """The rows that were asked for, in the order of the tables; a version may be a new one."""
    rows = []
    for package, kind in KINDS.items():
        asked = [name.partition("==")[2] for name in only if name.partition("==")[0] == package]
        versions = kind.versions if not only or "" in asked else asked
        rows += [GroupEntry(package, version) for version in versions]
    return rows


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells(row: GroupEntry) -> list[str]:
    """A row of a table: with what it really ran, and what came of it."""
    version = row.installed.get(row.package, row.version)
    beside = "torch" if row.package != "torch" else "numpy"
    if row.problem:
        filler = [""] * len(KINDS[row.package].columns)
        return [version, row.installed.get(beside, ""), *filler, f"**{row.problem}**"]
    filled = [fill_in(row) for fill_in in KINDS[row.package].columns.values()]
    return [version, row.installed[beside], *filled, row.counts]


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
    # As for Ctrl-C: what there is gets removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = False
    with tempfile.TemporaryDirectory(prefix="shmbus-wheel-") as directory:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        built = Path(directory, "build.log")
        if run([*build, "-w", directory, str(ROOT)], INSTALL_S, built):
            sys.exit(built.read_text())
        (wheel,) = Path(directory).glob("*.whl")
        previous = ""
        for row in chosen(options.only):
            if row.package != previous:
                beside = "torch" if row.package != "torch" else "NumPy"
                heads = [row.package, beside, *KINDS[row.package].columns, "tests"]
                print("", line(heads), line(["---"] * len(heads)), sep="\n", flush=True)
                previous = row.package
            look(row, wheel)
            print(line(cells(row)), flush=True)
            failed = failed or row.failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
