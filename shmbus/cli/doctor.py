"""``shmbus doctor``: checks this machine for what a bus needs, with a hint for each problem."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from shmbus.cli._show import add_command, print_json, printable, several
from shmbus.cli.doctor_checks import NOT_INSTALLED, Finding, diagnose

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_NAME_WIDTH = 19
_HINT_WIDTH = 76


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "doctor",
        run,
        help="check this machine for what a bus needs",
        description="Checks shared memory, limits, kernel, processor, Python and packages, and "
        "puts one trajectory through a bus of its own. A finding that can be improved comes with a "
        "hint. Exit status 1 where a check fails.",
        examples=[
            "shmbus doctor",
            "shmbus doctor --quick   # without importing torch",
            "shmbus doctor --json | jq '.[] | select(.level != \"ok\")'",
        ],
        json=True,
    )
    parser.add_argument("--quick", action="store_true", help="do not try to import torch")


def run(arguments: argparse.Namespace) -> int:
    """Print each finding when it is there; 1 where one is a failure."""
    findings: list[Finding] = []
    for finding in diagnose(torch=not arguments.quick):
        findings.append(finding)
        if not arguments.json and not _is_absent(finding):
            _print(finding)
    failures = sum(finding.level == "fail" for finding in findings)
    if arguments.json:
        print_json(findings)
    else:
        if absent := [finding for finding in findings if _is_absent(finding)]:
            print("\nnot installed, and not needed by a bus:")
            for finding in absent:
                print(f"      {finding.check.ljust(_NAME_WIDTH)}{finding.hint}")
        warnings = sum(finding.level == "warn" for finding in findings)
        verdict = f"{failures} failed" if failures else "all that a bus needs is here"
        print(f"\n{verdict}; {several(warnings, 'warning')}")
    return 1 if failures else 0


def _is_absent(finding: Finding) -> bool:
    return finding.level == "ok" and finding.found == NOT_INSTALLED


def _print(finding: Finding) -> None:
    name = finding.check.ljust(_NAME_WIDTH)
    print(f"{_MARKS[finding.level]}  {name}{printable(finding.found)}", flush=True)
    for line in textwrap.wrap(printable(finding.hint), _HINT_WIDTH):
        print(f"{'':{_NAME_WIDTH + 6}}{line}", flush=True)
