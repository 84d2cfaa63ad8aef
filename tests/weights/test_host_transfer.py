"""Which tensors cross to a device together; the crossing itself is in `test_cuda_weights.py`."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.host_transfer import HostBatch, plan
from shmbus.weights.manifest import Manifest, ParamMeta

MOST = 40 * 256


def spans_of(sizes: list[int]) -> list[tuple[int, int]]:
    params = [ParamMeta(f"p{n}", "uint8", (size,)) for n, size in enumerate(sizes)]
    return [(place.offset, place.offset + place.size) for place in Manifest.plan(params).tensors]


def test_neighbours_cross_together_up_to_a_chunk() -> None:
    runs = plan(spans_of([1000] * 30), MOST)
    assert [len(run.members) for run in runs] == [10, 10, 10]
    assert all(run.end - run.start <= MOST for run in runs)


def test_what_is_larger_than_a_chunk_is_cut() -> None:
    runs = plan(spans_of([100, 50_000, 100]), MOST)
    assert [[part.which for part in run.members] for run in runs] == [
        [0, 1], [1], [1], [1], [1, 2],
    ]  # fmt: skip
    assert [run.end - run.start for run in runs[:-1]] == [MOST] * 4


def test_what_is_not_to_be_cut_crosses_whole() -> None:
    runs = plan(spans_of([6000, 6000, 6000]), MOST, whole=frozenset({1}))
    assert [run.members for run in runs] == [
        [(0, 0, 6000)],
        [(1, 6144, 12144), (2, 12288, 6144 + MOST)],
        [(2, 6144 + MOST, 18288)],
    ]


def test_a_tensor_of_somebody_else_between_two_splits_their_run() -> None:
    whole = spans_of([300, 1, 300])
    runs = plan([whole[0], whole[2]], MOST)
    assert [[part.which for part in run.members] for run in runs] == [[0], [1]]


def test_a_part_of_a_tensor_is_aligned_in_its_run_as_in_memory() -> None:
    (run,) = plan([(1002, 1100), (1280, 1400)], MOST)
    assert (run.start, run.end) == (768, 1400)
    assert run.members == [(0, 1002, 1100), (1, 1280, 1400)]


def test_of_any_tensors_in_any_order_each_byte_is_in_one_run(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        spans = spans_of([generator.randrange(1, 3000) for _ in range(generator.randrange(1, 60))])
        spans = [span for span in spans if generator.random() < 0.8]
        generator.shuffle(spans)
        kept = frozenset(n for n in range(len(spans)) if generator.random() < 0.3)
        runs = plan(spans, MOST, whole=kept)
        parts: dict[int, list[tuple[int, int]]] = {}
        for run in runs:
            assert run.start % 256 == 0
            assert run.end - run.start <= MOST
            covered = [(start, end) for _, start, end in run.members]
            assert covered == sorted(covered)
            assert 0 <= covered[0][0] - run.start < 256
            assert covered[-1][1] == run.end
            gaps = [after[0] - before[1] for before, after in itertools.pairwise(covered)]
            assert all(0 <= gap < 256 for gap in gaps)
            for index, start, end in run.members:
                parts.setdefault(index, []).append((start, end))
        assert sorted(parts) == list(range(len(spans)))
        for index, found in parts.items():
            assert (found[0][0], found[-1][1]) == spans[index]
            assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
            assert len(found) == 1 or index not in kept


def test_nothing_crosses_where_there_is_no_device() -> None:
    plan_of_one = CopyPlan([(torch.zeros(3), torch.ones(3))])
    assert plan_of_one.crossing == []


def test_no_tensors_make_no_run() -> None:
    assert plan([]) == []


@pytest.mark.parametrize("lazy", [torch._neg_view, torch.conj])
def test_a_lazy_tensor_of_any_size_is_resolved_once_its_bytes_are_there(lazy: Any) -> None:
    source = lazy(torch.ones(1 << 20, dtype=torch.complex64))
    target = torch.zeros(1 << 20, dtype=torch.complex64)
    way: Any = None
    assert HostBatch(way, [(target, source)])._odd == [(target, source)]
