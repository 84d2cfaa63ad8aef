"""Which tensors cross to a device together; the crossing itself is in `test_cuda_weights.py`."""

from __future__ import annotations

import itertools
import random

import torch

from trainer_adapter.weights.copies import from_host_to_device
from trainer_adapter.weights.manifest import Manifest, ParamMeta
from trainer_adapter.weights.staging import plan

MOST = 10_000


def spans_of(sizes: list[int]) -> list[tuple[int, int]]:
    params = [ParamMeta(f"p{n}", "uint8", (size,)) for n, size in enumerate(sizes)]
    return [(place.offset, place.offset + place.size) for place in Manifest.plan(params).tensors]


def test_neighbours_cross_together_up_to_a_chunk() -> None:
    runs = plan(spans_of([1000] * 30), MOST)
    assert [len(run.members) for run in runs] == [9, 9, 9, 3]
    assert all(run.end - run.start <= MOST for run in runs)


def test_what_is_larger_than_a_chunk_crosses_alone() -> None:
    runs = plan(spans_of([100, 50_000, 100]), MOST)
    assert [run.members for run in runs] == [[0], [1], [2]]


def test_a_tensor_of_somebody_else_between_two_splits_their_run() -> None:
    whole = spans_of([300, 1, 300])
    assert [run.members for run in plan([whole[0], whole[2]], MOST)] == [[0], [1]]


def test_a_part_of_a_tensor_is_aligned_in_its_run_as_in_memory() -> None:
    (run,) = plan([(1002, 1100), (1280, 1400)], MOST)
    assert (run.start, run.end, run.members) == (768, 1400, [0, 1])


def test_any_tensors_in_any_order_are_each_in_one_run_that_covers_them(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        spans = spans_of([generator.randrange(1, 3000) for _ in range(generator.randrange(1, 60))])
        spans = [span for span in spans if generator.random() < 0.8]
        generator.shuffle(spans)
        runs = plan(spans, MOST)
        assert sorted(index for run in runs for index in run.members) == list(range(len(spans)))
        for run in runs:
            covered = sorted(spans[index] for index in run.members)
            assert (run.start, run.end) == (covered[0][0], covered[-1][1])
            gaps = [after[0] - before[1] for before, after in itertools.pairwise(covered)]
            assert all(0 <= gap < 256 for gap in gaps)
            assert run.end - run.start <= MOST or len(run.members) == 1


def test_nothing_crosses_where_there_is_no_device() -> None:
    pair = (torch.zeros(3), torch.ones(3))
    assert from_host_to_device([pair]) == ({}, [pair])


def test_no_tensors_make_no_run() -> None:
    assert plan([]) == []
