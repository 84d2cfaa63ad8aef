"""A life of a relay with producer and trainer, which writes acknowledged groups down."""

import time

from relay.local import put_group, relay

import shmbus


def main(source: str, trainer: str, directory: str, log: str) -> None:
    with (
        relay([source], [trainer], keep=directory),
        shmbus.Consumer(trainer) as consumer,
        open(log, "a", buffering=1) as said,
    ):
        for number in range(100_000):
            put_group([source], number, values=50)
            for group in consumer.take(timeout=0.02):
                if int(group.instance_id[1:]) % 3:
                    group.ack()
                    said.write(f"{group.instance_id} {time.monotonic()}\n")
