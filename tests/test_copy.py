"""Payload on its way into the ring: whole lines past the caches, the rest beside them."""

from __future__ import annotations

import numpy as np
import pytest

from shmbus import Bus, Consumer, Producer


@pytest.mark.parametrize("checksum", [False, True])
def test_every_byte_arrives_whatever_the_size_and_alignment(bus_name: str, checksum: bool) -> None:
    # Large arrays take another way into the ring than small ones, by whole cache lines.
    noise = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8)
    sizes = [1, 63, 64, 2047, 2048, 2049, 2111, 2112, 4095, 4097, 18_432]
    with (
        Bus.create(bus_name, "1MiB"),
        Producer(bus_name, checksum=checksum) as producer,
        Consumer(bus_name) as consumer,
    ):
        for size in sizes:
            for skip in (0, 1, 8, 17):
                sent = noise[skip : skip + size]
                producer.put("x", group_size=1, index=0, a=sent, b=sent[::-1].copy(), timeout=9)
                (group,) = consumer.take(timeout=9)
                with group:
                    np.testing.assert_array_equal(group[0]["a"], sent)
                    np.testing.assert_array_equal(group[0]["b"], sent[::-1])
