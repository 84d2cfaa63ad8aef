"""Copies of tensors: joint crossings, cuts for a launch, and skipped tensors."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from weight_models import move, replace, square, swap, turn

from shmbus.tensors.copy_plan import CopyPlan, HostBatch, plan
from shmbus.tensors.copy_table import PIECE_BYTES, cut, is_alike
from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.weights.manifest import Manifest, ParamMeta

MOST = 40 * 256


def spans_of(sizes: list[int]) -> list[tuple[int, int]]:
    params = [ParamMeta(f"p{n}", "uint8", (size,)) for n, size in enumerate(sizes)]
    return [(place.offset, place.offset + place.size) for place in Manifest.plan(params).tensors]


@pytest.mark.parametrize(
    ("spans", "members"),
    [
        (spans_of([1000] * 30), [[*range(first, first + 10)] for first in (0, 10, 20)]),
        (spans_of([100, 50_000, 100]), [[0, 1], [1], [1], [1], [1, 2]]),
        (spans_of([300, 1, 300])[::2], [[0], [1]]),  # beside a tensor of somebody else
    ],
)
def test_neighbours_cross_together_in_chunks(
    spans: list[tuple[int, int]], members: list[list[int]]
) -> None:
    runs = plan(spans, MOST)
    assert [[part.which for part in run.members] for run in runs] == members
    assert all(run.end - run.start <= MOST for run in runs)


def test_what_is_not_to_be_cut_crosses_whole() -> None:
    runs = plan(spans_of([6000, 6000, 6000]), MOST, whole=frozenset({1}))
    assert [run.members for run in runs] == [
        [(0, 0, 6000)],
        [(1, 6144, 12144), (2, 12288, 6144 + MOST)],
        [(2, 6144 + MOST, 18288)],
    ]


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


def test_nothing_is_planned_for_no_tensors_and_for_the_host() -> None:
    assert plan([]) == [] and [len(table) for table in cut([])] == [0, 0, 0]
    assert CopyPlan([(torch.zeros(3), torch.ones(3))]).crossing == []
    assert not is_alike(torch.zeros(4), torch.ones(4))


@pytest.mark.parametrize("lazy", [torch._neg_view, torch.conj])
def test_a_lazy_tensor_of_any_size_is_resolved_once_its_bytes_are_there(lazy: Any) -> None:
    source = lazy(torch.ones(1 << 20, dtype=torch.complex64))
    target = torch.zeros(1 << 20, dtype=torch.complex64)
    way: Any = None
    assert HostBatch(way, [(target, source)])._odd == [(target, source)]


def test_each_byte_is_in_one_piece_and_goes_where_it_belongs(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(20):
        sizes = [
            generator.choice([1, 7, 8, 9, 100, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES * 3 + 17])
            for _ in range(generator.randrange(1, 8))
        ]
        room = sum(size + 512 for size in sizes)
        source = np.random.default_rng(seed).integers(0, 255, room, np.uint8)
        target, wanted = np.zeros(room, np.uint8), np.zeros(room, np.uint8)
        spans, at = [], 0
        for size in sizes:
            begin = room - at - size
            begin -= begin % 16
            spans.append((at, begin, size))
            wanted[at : at + size] = source[begin : begin + size]
            at += -(-size // 256) * 256
        found = cut(spans)
        for table, width in zip(found, (1, 8, 1), strict=True):
            for to, of, count, _ in table:
                size = count * width
                target[to : to + size] = source[of : of + size]
        assert np.array_equal(target, wanted)
        assert (found.whole[:, 2] == PIECE_BYTES).all()
        assert (found.rest[:, 2] * 8 < PIECE_BYTES).all()
        assert (found.odd[:, 2] < 8).all()
        covered = found.whole[:, 2].sum() + found.rest[:, 2].sum() * 8 + found.odd[:, 2].sum()
        assert covered == sum(sizes)


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict(keep_vars=True)


def with_data(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a change of a parameter's data to what `make` makes of it."""

    def change(module: Any) -> None:
        parameter = getattr(module, name)
        parameter.data = make(parameter.data)

    return change


def free(module: Any) -> None:
    module.p0.untyped_storage().resize_(0)


CHANGES = {
    "move": move, "turn": turn, "replace": replace, "swap": swap, "free": free,
    "integers": with_data("narrow", lambda data: data.view(torch.float16)),
    "negative": with_data("p2", torch._neg_view),  # the same memory, and its signs turned
    "conjugate": with_data("pairs", torch.conj),
    "shorter": with_data("p0", lambda data: data[:4]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_more_than_a_value_is_seen(change: Callable[[Any], None]) -> None:
    module = square()
    module.narrow = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    module.pairs = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    found = SeenTensors(state(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert found.still(state(module))
    change(module)
    assert not found.still(state(module))


def test_another_mode_of_autograd_is_no_change() -> None:
    module = square()
    found = SeenTensors(state(module))
    module.requires_grad_(False)
    with torch.inference_mode():
        assert found.still(state(module))


def test_a_tied_tensor_is_seen_under_both_names() -> None:
    tensor = torch.zeros(3)
    found = SeenTensors({"a": tensor, "b": tensor})
    assert found.still({"a": tensor, "b": tensor})
    assert not found.still({"a": tensor, "b": torch.zeros(3)})


def test_what_is_no_tensor_is_not_looked_at() -> None:
    tensor = torch.zeros(3)
    found = SeenTensors({"a": tensor, "state": object()})
    assert found.still({"a": tensor})
    assert found.still({"a": tensor, "state": object()})
    assert not found.still({"b": tensor})
    assert SeenTensors({}).still({})
