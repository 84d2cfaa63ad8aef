"""How copies of a device are cut for one launch; the launch itself is in `test_cuda_weights.py`."""

from __future__ import annotations

import random

import numpy as np
import torch

from shmbus.tensors.copy_table import PIECE_BYTES, cut, is_alike


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


def test_no_copies_are_no_pieces() -> None:
    assert [len(table) for table in cut([])] == [0, 0, 0]


def test_copies_of_the_host_are_not_for_the_kernel() -> None:
    assert not is_alike(torch.zeros(4), torch.ones(4))
