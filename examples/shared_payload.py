"""An image a group: once in the ring, and once in the batch.

    python examples/shared_payload.py             # a second

A worker for whole groups puts the common parts of the samples beside them.
"""

from __future__ import annotations

import argparse
import os
import secrets

import numpy as np

import shmbus
from trainer_adapter import OnlineDataHandler

GROUPS, GROUP_SIZE, PATCHES, PATCH = 3, 16, 256, 768


def main() -> None:
    """Put groups with an image each, and look at a batch of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="accepted as in other examples; changes nothing"
    )
    parser.parse_args()
    bus, rng = f"shared-{os.getpid()}-{secrets.token_hex(3)}", np.random.default_rng(0)
    with (
        shmbus.Bus.create(bus, "16MiB"),
        shmbus.Producer(bus) as producer,
        OnlineDataHandler(
            bus, groups_per_batch=GROUPS, extra_fields={"pixel_values": "group"}
        ) as handler,
    ):
        for number in range(GROUPS):
            answers = rng.integers(0, 9, (GROUP_SIZE, 20), np.int32)
            image = rng.random((PATCHES, PATCH), np.float32)
            producer.put_group(
                f"q{number}", [{"tokens": one} for one in answers], shared={"pixel_values": image}
            )
        megabytes = producer.stats().bytes / 1e6
        batch = handler.next_batch(10.0)
        assert (batch.groups[0].shared["pixel_values"].shape) == (PATCHES, PATCH)
        patches = batch.extra_offsets["pixel_values"].diff().tolist()  # of each group
        handler.ack(batch)
    print(f"{GROUPS * GROUP_SIZE} samples in {megabytes:.1f} MB, patches of groups: {patches}")


if __name__ == "__main__":
    main()
