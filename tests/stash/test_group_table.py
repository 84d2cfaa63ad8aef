"""The table of open groups beside a dict: keys, widths, ages, refusals and references."""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Hashable
from pathlib import Path

import pytest
from stash_samples import Sample

from shmbus_ext._core import (
    REFUSED_DUPLICATE,
    GroupEntry,
    GroupTable,
)

#: Around each border: inline and allocated keys, the pools of rows, and rows with cells elsewhere.
WIDTHS = (1, 2, 7, 8, 9, 16, 17, 64, 256, 257, 700)
KEYS: tuple[Hashable, ...] = (
    "", "a", "x" * 24, "x" * 25, "x" * 255, "é" * 12, "é" * 13, "ключ", "鍵" * 12, "🔑" * 7,
    "\x01\x01", "ā",
    ("a", 0), ("a", -1), ("a", 2**62), ("x" * 25, 3),
)  # fmt: skip


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def put(
    rows: GroupTable[Sample], *samples: Sample
) -> list[GroupEntry[Sample] | tuple[int, Sample]]:
    return rows.put(samples, 0.0)


def test_the_table_does_what_a_dict_of_lists_does(seed: int) -> None:
    generator = random.Random(seed)
    rows: GroupTable[Sample] = GroupTable(count_bytes=True, judged=True)
    model: dict[Hashable, list[Sample | None]] = {}
    for _ in range(6000):
        if model and generator.random() < 0.02:
            [copy] = rows.oldest(1)
            assert copy.key == next(iter(model))
            oldest = rows.take(copy.key)
            assert oldest is not None
            cells = model.pop(oldest.key)
            assert oldest.samples == [sample for sample in cells if sample is not None]
            assert (oldest.size, oldest.missing) == (len(cells), cells.count(None))
        key = generator.choice(KEYS)
        width = generator.choice(WIDTHS) if key not in model else len(model[key])
        index, nbytes = generator.randrange(width), generator.randrange(100)
        sample = Sample(key, width, index, nbytes=nbytes)
        rows.recent.clear()
        left = put(rows, sample)
        cells = model.setdefault(key, [None] * width)
        if cells[sample.index] is not None:
            assert left == [(REFUSED_DUPLICATE, sample)]
            continue
        cells[sample.index] = sample
        if None in cells:
            assert not left
        else:
            [row] = left
            assert isinstance(row, GroupEntry)
            assert (row.key, row.samples, row.missing) == (key, model.pop(key), 0)
        there = [sample for cells in model.values() for sample in cells if sample is not None]
        assert (len(rows), rows.cells) == (len(model), len(there))
        assert rows.nbytes == sum(sample.nbytes for sample in there)
    assert [row.key for row in rows.oldest(99)] == list(model)
    assert rows.samples() == [s for cells in model.values() for s in cells if s is not None]


def test_rows_are_found_wherever_in_memory_they_lie() -> None:
    # More than a few pieces of memory hold, of two sizes, put in one order and filled in another.
    numbers = list(range(60_000))
    rows: GroupTable[Sample] = GroupTable()
    put(rows, *(Sample(f"p{n}", 2 + 8 * (n % 2), 0) for n in numbers))
    random.Random(7).shuffle(numbers)
    for number in numbers[:100]:
        assert rows.take(f"p{number}").samples[0].key == f"p{number}"  # type: ignore[union-attr]
    rest = numbers[100:]
    assert not put(rows, *(Sample(f"p{n}", 2 + 8 * (n % 2), 1) for n in rest))
    assert rows.ready_groups == sum(n % 2 == 0 for n in rest)
    assert len(rows) + rows.ready_groups == len(rest)
    for row in rows.lease(len(rest)):
        assert [(sample.key, sample.index) for sample in row.samples] == [
            (row.key, 0),
            (row.key, 1),
        ]


@pytest.mark.parametrize("width", [2, 300])
def test_the_table_holds_one_reference_to_a_sample_and_lets_it_go(width: int) -> None:
    sample = Sample("a" * 40, width, 0)
    before = sys.getrefcount(sample)
    rows: GroupTable[Sample] = GroupTable()
    put(rows, sample)
    assert sys.getrefcount(sample) == before + 1
    row = rows.take(sample.key)
    assert row is not None
    assert row.samples == [sample]
    assert sys.getrefcount(sample) == before + 1
    del row
    put(rows, sample)
    del rows
    assert sys.getrefcount(sample) == before


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer holds freed memory back"
)
def test_memory_of_rows_that_are_gone_is_used_again() -> None:
    rows: GroupTable[Sample] = GroupTable()

    def fill() -> None:
        put(rows, *(Sample(f"a prompt whose name is long {n}", 8, 0) for n in range(5000)))

    fill()
    peak = resident_bytes()
    for _ in range(60):
        for row in rows.oldest(5000):
            rows.take(row.key)
        fill()
    # Sixty times the entries of 5000 groups take 60 MB.
    assert resident_bytes() < peak + 20_000_000
    assert rows.oldest_born_s == 0.0


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (Sample(7, 2, 0), TypeError),
        (Sample(("a", "b"), 2, 0), TypeError),
        (Sample("a", 0, 0), ValueError),
        (Sample("a", 2, 2), ValueError),
        (Sample("a", 2**40, 0), ValueError),
        (Sample("a", 2, -1), OverflowError),
    ],
)
def test_a_sample_that_makes_no_sense_raises_and_the_table_goes_on(
    sample: Sample, error: type[Exception]
) -> None:
    rows: GroupTable[Sample] = GroupTable()
    with pytest.raises(error):
        put(rows, Sample("b", 2, 0), sample)
    assert rows.cells == 0
    assert put(rows, Sample("c", 2, 0), Sample("c", 2, 1)) == []
    assert (rows.cells, rows.ready_groups) == (0, 1)


def test_a_row_ends_once_and_where_it_was_leased() -> None:
    rows: GroupTable[Sample] = GroupTable()
    others: GroupTable[Sample] = GroupTable()
    put(rows, Sample("a", 1, 0))
    [row] = rows.lease(1)
    for wrong in (others.remove, others.give_back, rows.push):
        with pytest.raises(SystemError):
            wrong(row)
    rows.remove(row)
    for wrong in (rows.remove, rows.give_back):
        with pytest.raises(SystemError):
            wrong(row)
    rows.push(row)
    assert rows.lease(1) == [row]


class CountedKey(str):
    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_complete_groups_of_a_key_are_found_without_a_look_at_the_rest(seed: int) -> None:
    generator = random.Random(seed)
    rows: GroupTable[Sample] = GroupTable()
    expected: dict[Hashable, list[GroupEntry[Sample]]] = {f"g{number}": [] for number in range(300)}
    for step in range(3000):
        key = generator.choice([*expected])
        put(rows, Sample(key, 1, 0))
        if step % 3:
            [entry] = rows.lease(1)
            generator.choice([rows.remove, rows.give_back, lambda entry: None])(entry)
    for entry in rows.lease(rows.ready_groups // 2) + [
        entry for key in expected for entry in rows.full(key)
    ]:
        if entry not in expected[entry.key]:
            expected[entry.key].append(entry)
    CountedKey.compared = 0
    for key, entries in expected.items():
        found = rows.full(CountedKey(key))
        assert len(found) == len(entries) and all(entry in entries for entry in found)
    assert CountedKey.compared <= 2 * len(expected)
    assert sum(map(len, expected.values())) == rows.ready_groups + rows.leased_groups


def test_what_is_ready_or_leased_is_let_go_with_the_table() -> None:
    samples = [Sample(key, 1, 0) for key in "ab"]
    before = [sys.getrefcount(sample) for sample in samples]
    rows: GroupTable[Sample] = GroupTable()
    put(rows, *samples)
    [row] = rows.lease(1)
    del rows
    assert row.samples == samples[:1]
    del row
    assert [sys.getrefcount(sample) for sample in samples] == before
