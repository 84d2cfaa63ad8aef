"""A death and a stop at each named point of a worker's answer to a request, as a program.

Uses the parts of failpoints.py; test_failpoints.py builds, runs and judges the program. While the
worker is stopped, new collectors and a relay look for requests whose answers left the bus.
"""

import contextlib
import functools
import mmap
import time
from collections import Counter

import numpy as np
from failpoints import pattern, play
from relay.local import relay
from supervisor import Child, deadline

import shmbus

REQUESTS = 4
#: Looks for lost answers while the first worker stands.
LOOKS = 15
#: Point: passes at which the signal comes.
POINTS: dict[str, tuple[int, ...]] = {
    "request-intended": (1, 3),
    "request-committing": (1, 3),
    "record-published": (1,),
    "commit-marked": (1,),
    "request-answering": (1,),
}


def work(name: str, begun: mmap.mmap) -> None:
    while not begun[0]:
        time.sleep(0.002)
    with shmbus.Producer(name) as producer:
        while (request := producer.requests.next()) is not None:
            producer.requests.answer(request, data=request["prompt"])


def case(name: str, failpoint: str, action: str, *, relayed: bool) -> dict[str, object]:
    """Every request is trained once; a second worker begins after the signal to the first."""
    trainer = f"{name}.t" if relayed else name
    seen: Counter[str] = Counter()
    begun, both = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    with contextlib.ExitStack() as stack:
        for bus in {name, trainer}:
            stack.enter_context(shmbus.Bus.create(bus, "512KiB"))
            stack.callback(shmbus.unlink, bus)
        first = Child(lambda: work(name, begun), failpoint)
        second = Child(lambda: work(name, both))
        stack.callback(second.kill)
        stack.callback(first.kill)
        if relayed:
            stack.enter_context(relay([name], [trainer]))
        with shmbus.Feeder(trainer) as feeder:
            for number in range(REQUESTS):
                feeder.request(f"q{number}", group_size=1, round=number, prompt=pattern(number, 9))
        begun[0] = 1
        left, looks = REQUESTS, 0
        for _ in deadline("every request"):
            with shmbus.Consumer(trainer) as consumer:
                for group in consumer.take(8, timeout=0.02):
                    number = int(group.instance_id[1:])
                    seen[group.instance_id] += np.array_equal(group[0]["data"], pattern(number, 9))
                    group.ack()
                left = len(consumer.open_requests())
            both[0] = both[0] or first.look() or first.stopped
            looks += left <= 1
            if first.stopped and looks > LOOKS:
                first.go_on()
            if not left:
                break
    expected = {f"q{number}": 1 for number in range(REQUESTS)}
    faults = [] if seen == expected else [f"expected each request once, got {dict(seen)}"]
    return {"signalled": bool(both[0]), "faults": faults}


if __name__ == "__main__":
    kinds = {"here": False, "relayed": True}
    play(
        dict.fromkeys(kinds, POINTS),
        {kind: functools.partial(case, relayed=relayed) for kind, relayed in kinds.items()},
    )
