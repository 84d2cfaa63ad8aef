"""Instruction counts of the hot path: what is a regression, and that counts are the same twice."""

import json
import re
import shutil

import pytest

from bench import instructions


def test_a_count_above_the_tolerance_is_a_regression() -> None:
    lines, regressions = instructions.compare(
        {"op_put": 1000.0, "op_read": 1000.0, "op_gather": 1000.0},
        {"op_put": 1031.0, "op_read": 1029.0, "op_gather": 500.0, "op_new": 1.0},
    )
    assert [name.split(":")[0] for name in regressions] == ["op_put"]
    assert len(lines) == 4 and "new" in lines[3]


def test_every_operation_that_is_counted_is_one_of_the_program() -> None:
    functions = set(re.findall(r"\b(op_\w+)\(", instructions.SOURCE.read_text()))
    assert functions == instructions.OPERATIONS.keys()
    baselines = json.loads(instructions.BASELINES.read_text())
    assert baselines and all(one.keys() == functions for one in baselines.values())


@pytest.mark.slow
def test_instructions_are_counted_and_the_same_twice() -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    with instructions.built() as program:
        counts = [
            instructions.count_one(program, name, instructions.OPERATIONS[name], 20)
            for name in ("op_put", "op_stash", "op_put")
        ]
    assert min(counts) > 0
    assert counts[0] == counts[2] != counts[1]
