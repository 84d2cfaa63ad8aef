"""Prompts of a bus under SIGKILL: made once each, in any process."""

import contextlib
import threading
import time

from relay.relay_storm import SIZE, Plan, Storm, is_useless, sample, split_of
from relay.relay_storm import work as be_party

import shmbus
from shmbus.inspect.status import read_status

WORKERS = 2


def work(plan: Plan, address: str) -> None:
    bus, _, worker = address.partition("/")
    if not worker:
        be_party(plan, address)
    with shmbus.Producer(bus) as producer:
        while True:
            request = producer.requests.next()
            number, index = request.meta["group"], request.index
            assert (request.group_size, request.round, request["prompt"].tolist()) == (
                SIZE, 0, [number] * 50,
            )  # fmt: skip
            score = 0.0 if is_useless(number) else float(index)
            producer.requests.answer(
                request, score=score, meta={"of": [number, index]}, **sample(number, index)
            )


class PromptStorm(Storm):
    """The storm of relays, with samples requested by the trainer's bus."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, work)
        workers = [f"{bus}/{i}" for bus in plan.sources for i in range(WORKERS)]
        self.processes = [*plan.parties, *workers]
        self.makers = [threading.Thread(target=self.offer)]

    def offer(self) -> None:
        with (
            contextlib.suppress(shmbus.BusRemovedError),
            shmbus.Feeder(self.plan.trainers[0]) as feeder,
        ):
            for number in range(self.plan.groups):
                feeder.request(
                    f"q{number}", group_size=SIZE, round=0, meta={"group": number},
                    split=split_of(number), prompt=[number] * 50,
                )  # fmt: skip
                self.produced += 1

    def audit(self, buses: list[shmbus.Bus]) -> None:
        """Compare lanes and ledgers after everything ended."""
        if doubled := [each for each, count in self.seen.items() if count > 1]:
            self.faults.append(f"doubled: {doubled[:10]}")
        groups = self.plan.groups
        useful = groups - sum(map(is_useless, range(groups)))
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            ledgers = [bus.stats() for bus in buses]
            lanes = [read_status(bus.name).requests for bus in buses]
            open_ = [lane.groups for lane in lanes if lane is not None]
            if not any(open_) and all(ledger.undelivered == 0 for ledger in ledgers):
                break
            time.sleep(0.05)
        else:
            self.faults.append(f"not ended: {open_} groups of the lanes, {ledgers}")
            return
        trainer, lane = ledgers[-1], lanes[-1]
        assert lane is not None
        if (lane.offered, lane.done) != (groups * SIZE, useful * SIZE):
            self.faults.append(f"the trainer's lane: {lane}")
        if (trainer.acknowledged, trainer.committed) != (useful * SIZE, useful * SIZE):
            self.faults.append(f"the trainer's ledger: {trainer}")
        made = sum(ledger.committed for ledger in ledgers[:-1])
        if made != groups * SIZE:
            self.faults.append(f"{made} samples were made of {groups * SIZE}: {ledgers[:-1]}")
