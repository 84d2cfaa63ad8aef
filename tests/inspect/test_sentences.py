"""The sentence of `shmbus status` in each state of real processes, with and without a daemon."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from conftest import Child, Daemon, Spawner, wait_until

from shmbus import Bus
from shmbus.data.status_types import BusStatus
from shmbus.inspect import verdict
from shmbus.inspect.rates import Watcher
from shmbus.inspect.stall_report import gather
from shmbus.inspect.status import read_status
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from trainer_adapter import OnlineDataHandler

GROUPS, SIZE = 4, 2
#: Seconds until a woken process sleeps again.
SETTLE_S = 0.3

TRAINER = """
import sys, time, shmbus
name, offered, taken, then, retries = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6]
options = {"sample_retries": int(retries)} if retries else {}
rank = sys.argv[6:]
if rank:
    options |= {"rank": int(rank[0]), "world_size": int(rank[1])}
consumer = shmbus.Consumer(name, label="trainer.py", **options)
for number in range(offered):
    consumer.request(f"q{number}", group_size=2)
print("offered", flush=True)
held = []
while len(held) < taken:
    held += consumer.take(64, timeout=0.05)
if not rank:
    consumer.take(timeout=0.05)
print("ready", flush=True)
while then == "wait":
    held += consumer.take_shard(groups=8, timeout=None) if rank else consumer.take(64, timeout=None)
if then == "end":
    consumer.ack(held)
    consumer.close()
time.sleep(600)
"""

WORKER = """
import sys, time, shmbus
name, answers, then = sys.argv[1], int(sys.argv[2]), sys.argv[3]
producer = shmbus.Producer(name, label="worker.py")
for _ in range(answers):
    request = producer.requests.next()
    producer.requests.answer(request, score=1.0, tokens=[1, 2])
if then == "hold":
    producer.requests.next()
elif then == "fail":
    request = producer.requests.next()
    producer.requests.fail(request, "sandbox timed out")
    producer.requests.next()
elif then == "refuse":
    print("ready", flush=True)
    while True:
        request = producer.requests.next()
        producer.requests.fail(request, "connection refused")
elif then in ("away", "many_words"):
    print("ready", flush=True)
    number = 0
    while request := producer.requests.next():
        number += 1
        if then == "away":
            producer.requests.release(request, reason="engine away")
        else:
            producer.requests.fail(request, "%d is no answer: %s" % (number, "abcdefghij" * number))
elif then == "reserve":
    producer.put("q", group_size=2, index=0, score=1.0, tokens=[1])
    slot = producer.reserve("q", group_size=2, index=1, fields={"tokens": ("int32", 8)})
elif then == "leave":
    producer.put("q", group_size=2, index=0, score=1.0, tokens=[1])
    producer.close()
elif then == "flood":
    for number in range(100_000):
        producer.put(f"f{number}", group_size=1, index=0, score=1.0, tokens=[1] * 4000)
        if number == 8:
            print("flooding", flush=True)
elif then[:-1] in ("index", "third", "slow"):
    size = 2 if then[:-1] == "index" else 3
    for number in range(1 if then[:-1] == "slow" else 3):
        producer.put(f"q{number}", group_size=size, index=int(then[-1]), score=1.0, tokens=[1])
print("ready", flush=True)
time.sleep(600)
"""


MEASURING_TRAINER = """
import sys, time, torch
from types import SimpleNamespace
from trainer_adapter import OnlineDataHandler, logprob_mismatch
handler = OnlineDataHandler(sys.argv[1], groups_per_batch=1, label="trainer.py")
for number in range(4):
    handler.request(f"q{number}", group_size=2)
print("offered", flush=True)
batch = handler.next_batch(60)
torch.manual_seed(0)
exact, kept = -3 * torch.rand(400), torch.ones(400, dtype=torch.bool)
engine = exact + 0.3 * torch.randn(400)
sampled = SimpleNamespace(logprobs=engine, loss_mask=kept, advantages=torch.randn(400))
figures = logprob_mismatch(exact, sampled, at_engine_dtype=0.9 * engine + 0.1 * exact)
handler.note_mismatch(figures, engine=torch.bfloat16, trainer="float32")
print("ready", flush=True)
time.sleep(600)
"""


class Scene:
    """A bus, its reader and its workers, in separate processes."""

    def __init__(
        self, name: str, spawn: Spawner, daemon: Callable[..., Daemon], served: bool
    ) -> None:
        self.name = name
        self._spawn = spawn
        self.served = served
        self.retries = ""
        self._serve = daemon
        self._begun = False
        self.daemon: Daemon | None = None
        self.stopped: list[Child] = []

    def begin(self, retries: int | None = None) -> None:
        """Create the bus; without this call the first trainer or worker creates it."""
        self._begun = True
        if self.served:
            options = [] if retries is None else ["--sample-retries", retries]
            self.daemon = self._serve("--capacity", "1MiB", *options)
        else:
            self.retries = "" if retries is None else str(retries)
            Bus.create(self.name, "1MiB").close()

    def trainer(self, offered: int = GROUPS, taken: int = 0, then: str = "train") -> Child:
        """Start a trainer; return after its offer."""
        return self._start("offered", TRAINER, offered, taken, then, self.retries)

    def waiting(self, offered: int = GROUPS) -> None:
        """Start a trainer that waits for groups."""
        self._start("ready", TRAINER, offered, 0, "wait", self.retries)

    def training(self, then: str = "train", script: str = TRAINER) -> Child:
        """Start a trainer that holds one group of four, and the worker that made the group."""
        trainer = self._start("offered", script, GROUPS, 1, then, self.retries)
        self.worker(answers=3)
        trainer.expect("ready")
        return trainer

    def rank(self, rank: int, of: int) -> Child:
        return self._start("ready", TRAINER, 0, 0, "wait", "", rank, of)

    def worker(self, then: str = "hold", answers: int = 0, line: str = "ready") -> Child:
        """Start a worker; return after its work."""
        return self._start(line, WORKER, answers, then)

    def _start(self, line: str, script: str, *arguments: object) -> Child:
        if not self._begun:
            self.begin()
        return self._spawn.script(script, self.name, *arguments, until=line)

    def stop(self, child: Child) -> None:
        """Send SIGSTOP, until the row is over."""
        child.send_signal(signal.SIGSTOP)
        self.stopped.append(child)

    def until(self, predicate: Callable[[BusStatus], object]) -> None:
        wait_until(lambda: predicate(read_status(self.name)))


def healthy(scene: Scene) -> None:
    scene.training()


def rounding_clips(scene: Scene) -> None:
    scene.training(script=MEASURING_TRAINER)


def measuring_trainer_dead(scene: Scene) -> None:
    scene.training(script=MEASURING_TRAINER).kill()
    scene.trainer(offered=0, taken=1).expect("ready")


def one_failed(scene: Scene) -> None:
    scene.begin(retries=2)
    trainer = scene.trainer(taken=1, then="wait")
    scene.worker("fail", answers=3)
    trainer.expect("ready")
    scene.until(lambda status: status.wanted or (status.requests and status.requests.claimed))


def paused(scene: Scene) -> None:
    healthy(scene)
    with Bus.open(scene.name) as bus:
        bus.pause("loading weights")


def paused_while_full(scene: Scene) -> None:
    full(scene)
    with Bus.open(scene.name) as bus:
        bus.pause("loading weights")


def trainer_stopped(scene: Scene) -> None:
    scene.stop(scene.training())
    scene.until(lambda status: "stopped" in sentence_of(status))


def trainer_dead(scene: Scene) -> None:
    scene.training().kill()
    if scene.served:
        scene.until(lambda status: status.daemon and not status.daemon.leases)


def trainer_left(scene: Scene) -> None:
    scene.training("end")
    if scene.served:
        scene.until(lambda status: status.daemon and not status.daemon.leases)
    else:
        scene.until(lambda status: not status.collector.alive)


def workers_dead(scene: Scene) -> None:
    scene.trainer(then="wait")
    scene.worker(answers=1).kill()
    scene.until(lambda status: not any(p.state == "alive" for p in status.producers))


def workers_dead_while_it_trains(scene: Scene) -> None:
    trainer = scene.trainer(taken=1)
    worker = scene.worker(answers=2)
    trainer.expect("ready")
    worker.kill()


def no_worker_ever(scene: Scene) -> None:
    scene.waiting()


def worker_stopped(scene: Scene) -> None:
    scene.waiting()
    scene.stop(scene.worker(answers=1))
    scene.until(lambda status: any(p.stopped for p in status.producers))


def nothing_open(scene: Scene) -> None:
    trainer = scene.trainer(offered=2, taken=2, then="wait")
    scene.worker("idle", answers=4)
    trainer.expect("ready")
    scene.until(waits)


def all_given_up(scene: Scene) -> None:
    scene.begin(retries=0)
    scene.trainer(then="wait")
    scene.worker("refuse")
    scene.until(lambda status: status.groups_given_up == GROUPS and waits(status))
    time.sleep(SETTLE_S)  # for the trainer, woken by the last failure
    scene.until(waits)


def all_failing(scene: Scene) -> None:
    scene.begin(retries=1_000)
    scene.trainer(then="wait")
    scene.worker("refuse")
    scene.until(lambda status: status.lane_pause is not None)


def untaken(scene: Scene) -> None:
    scene.waiting()
    scene.worker("idle")


def engine_away(scene: Scene) -> None:
    scene.waiting()
    scene.worker("away")


def all_fail_in_changing_words(scene: Scene) -> None:
    scene.begin(retries=1_000)
    scene.waiting(16)
    scene.worker("many_words")
    scene.until(lambda status: any(each.rests_s > 0 for each in status.producers))


def trainer_busy(scene: Scene) -> None:
    """A trainer trains on a group, beside complete groups."""
    trainer = scene.trainer(taken=1)
    scene.worker("idle", answers=SIZE)
    trainer.expect("ready")
    scene.worker("idle", answers=(GROUPS - 1) * SIZE)
    scene.until(lambda status: not status.daemon or status.daemon.groups_ready == GROUPS - 1)


def two_trainers(scene: Scene) -> None:
    for _ in range(2):
        scene.waiting(2)
    scene.worker()


def nobody_makes(scene: Scene) -> None:
    scene.waiting(0)
    scene.until(waits)


def all_dead(scene: Scene) -> None:
    scene.begin(retries=2)
    for child in (scene.trainer(), scene.worker(answers=1)):
        child.kill()
    if scene.daemon is not None:
        scene.daemon.kill()


def full(scene: Scene) -> None:
    trainer = scene.trainer(offered=0, taken=8, then="wait")
    scene.worker("flood", line="flooding")
    trainer.expect("ready")
    scene.until(lambda status: status.space_wanted and not status.ledger.in_ring)


def flooder_dead(scene: Scene) -> None:
    trainer = scene.trainer(offered=0, taken=8)
    worker = scene.worker("flood", line="flooding")
    trainer.expect("ready")
    scene.until(lambda status: status.space_wanted)
    worker.kill()


def nobody_reads(scene: Scene) -> None:
    scene.worker("index0")
    scene.worker("index1")
    if scene.served:
        scene.until(lambda status: status.daemon and status.daemon.groups_ready == 3)


def slow_worker(scene: Scene) -> Child:
    """Return the worker with the missing last samples, out of three with an index each."""
    scene.waiting(0)
    scene.worker("third0")
    scene.worker("third1")
    return scene.worker("slow2")


def dead_worker(scene: Scene) -> None:
    slow_worker(scene).kill()
    scene.until(lambda status: status.groups_incomplete == 2 and waits(status))


def stopped_worker(scene: Scene) -> None:
    scene.stop(slow_worker(scene))
    scene.until(
        lambda status: (
            status.groups_incomplete == 2
            and waits(status)
            and any(p.stopped for p in status.producers)
        )
    )


def last_producer_dead(scene: Scene) -> None:
    scene.waiting(0)
    scene.worker("index0").kill()
    scene.until(lambda status: status.groups_incomplete == 3 and waits(status))


def last_producer_left(scene: Scene) -> None:
    scene.waiting(0)
    scene.worker("leave")
    scene.until(lambda status: status.groups_incomplete == 1 and waits(status))


def reserved_for_long(scene: Scene) -> None:
    scene.waiting(0)
    scene.worker("reserve")
    scene.until(lambda status: any(p.reservations and p.idle_s for p in status.producers))


def rank_dead(scene: Scene) -> None:
    scene.rank(0, 2)
    other = scene.rank(1, 2)
    scene.worker("index0")
    scene.worker("index1")
    other.kill()
    scene.until(lambda status: status.daemon and len(status.daemon.leases) == 1)


def daemon_dead(scene: Scene) -> None:
    healthy(scene)
    assert scene.daemon is not None
    scene.daemon.kill()


def daemon_stopped(scene: Scene) -> None:
    healthy(scene)
    assert scene.daemon is not None
    scene.stop(scene.daemon.child)
    scene.until(lambda status: status.collector.stopped)


def daemon_recovers(scene: Scene) -> None:
    trainer = scene.training()
    assert scene.daemon is not None
    scene.stop(trainer)
    scene.daemon.restart()


def trainer_stopped_since_the_daemon_before(scene: Scene) -> None:
    daemon_recovers(scene)
    scene.until(lambda status: status.daemon and not status.daemon.recovering)


def trainer_stopped_beside_its_successor(scene: Scene) -> None:
    """A new trainer waits for groups perhaps in a stopped trainer's hands."""
    trainer_stopped_since_the_daemon_before(scene)
    scene.waiting(0)
    scene.until(waits)


def servers_paused(scene: Scene) -> None:
    healthy(scene)
    with open(SHM_DIRECTORY + companion_name("fleet", scene.name), "wb") as note:
        note.write(b"x")


def waits(status: BusStatus) -> bool:
    if status.daemon is not None:
        return any(lease.waiting for lease in status.daemon.leases)
    return status.collector.waits


class Row(NamedTuple):
    """A state and its sentence; `where` tells with or without a daemon."""

    make: Callable[[Scene], None]
    says: str
    served: str = ""
    where: str = "embedded daemon"


PID = r"\(pid \d+\)"
TRAINER_IS = rf"trainer\.py {PID}"
WORKER_IS = rf"worker\.py {PID}"
NO_WORKER = (
    rf"no worker is attached; the last was {WORKER_IS}, which (died|is gone)\. Start workers"
)
NO_PRODUCER = rf"no producer is attached; the last was {WORKER_IS}"
END_GROUPS = "Start producers; a group_timeout ends groups that nobody completes"

NOT_BACK = (
    r"\d+ groups? may be held by a trainer that has not come back to the daemon \(pid \d+, "
    r"stopped\)\. `kill -CONT \d+` continues it; others get them once it ends"
)

TABLE = [
    Row(healthy, rf"Nothing stands in the way: 1 producer, .* on; {TRAINER_IS} holds 1 group for"),
    Row(rounding_clips,
        r"Engine bfloat16, trainer float32: 90% of the logprob difference is rounding, and PPO's "
        r"clip removes the gradients of \d\d% of the tokens\. Run the trainer's forward pass in "
        r"the engine's dtype, or publish the weights with rounding='stochastic'\."),
    Row(measuring_trainer_dead, r"Nothing stands in the way: 1 producer,"),
    Row(one_failed, rf"{TRAINER_IS} waits for groups( and holds 1)?: .* with workers"),
    Row(paused, r"Paused for .* s: loading weights\. `shmbus resume test-.*` ends the pause"),
    Row(paused_while_full, r"Paused for .* s: loading weights\."),
    Row(trainer_stopped, rf"{TRAINER_IS} is stopped and holds 1 group\. `kill -CONT \d+` cont"),
    Row(trainer_dead,
        rf"Nobody reads the bus; the last was {TRAINER_IS}, which died: 3 traj.*Start the trainer",
        r"(No trainer|1 complete group waits, and no trainer) is attached\. Start the trainer"),
    Row(trainer_left,
        r"Nobody reads the bus: 1 trajectory and 3 open prompts wait\. Start the trainer",
        r"No trainer is attached\. Start the trainer"),
    Row(workers_dead, rf"4 prompts are open, and {NO_WORKER}"),
    Row(workers_dead_while_it_trains, rf"3 prompts are open, and {NO_WORKER}"),
    Row(no_worker_ever, r"4 prompts are open, and no worker has ever attached\. Start workers"),
    Row(worker_stopped,
        rf"{WORKER_IS} is stopped, and no other worker is attached: 4 prompts are open\. "
        r"`kill -CONT \d+` continues it"),
    Row(nothing_open,
        rf"{TRAINER_IS} waits for groups( and holds 2)?, and no prompt is open\. Offer more"),
    Row(all_given_up,
        rf"{TRAINER_IS} waits for groups, and no prompt is open: 4 groups were given up for "
        r"failed samples\. Offer more"),
    Row(all_failing,
        r"The request lane is paused: the last \d+ samples all failed: connection refused; asked "
        r"again one at a time\. Mend what the workers report"),
    Row(untaken, r"4 prompts are open, and none of 1 producer takes one\."),
    Row(engine_away,
        rf"{WORKER_IS} gave back \d+ samples? in a row, and made none: engine away\. Mend what "
        r"the worker reports; shmbus holds it back until a sample succeeds"),
    Row(all_fail_in_changing_words,
        rf"{WORKER_IS} failed \d+ samples in a row, and made none: \d+ is no answer.*\. Mend what "
        r"the worker reports; shmbus holds it back until a sample succeeds"),
    Row(trainer_busy,
        rf"3 complete groups wait, and {TRAINER_IS} has asked for none for \d.*; it holds 1 group"
        r"\. Unless its step takes so long, see what it does: `py-spy dump --pid \d+`"),
    Row(two_trainers,
        rf"{TRAINER_IS} and {TRAINER_IS} share the groups of split 'train', and each gets a part\. "
        r"If they are two runs, end one",
        where="daemon"),
    Row(nobody_makes,
        rf"{TRAINER_IS} waits for groups, and no producer has ever attached\. Start producers"),
    Row(all_dead,
        r"No living process has the bus open: 1 trajectory and 4 open prompts wait\. Start the "
        r"trainer and the workers again"),
    Row(full, rf"Producers wait for space, the ring is \d+% full: {TRAINER_IS} holds \d+ gr"),
    Row(flooder_dead,
        rf"No producer is attached; the last was {WORKER_IS}, which|{WORKER_IS} died"),
    Row(nobody_reads, r"Nobody reads the bus: 6 trajectories wait\. Start the trainer",
        r"3 complete groups wait, and no trainer is attached\. Start the trainer"),
    Row(dead_worker,
        rf"{WORKER_IS} (died|is gone), and 2 groups wait for it alone; nobody will send these "
        r"samples\. Start it again, or set group_timeout"),
    Row(stopped_worker,
        rf"{WORKER_IS} is stopped, and 2 groups wait for it alone\. `kill -CONT \d+` continues it"),
    Row(last_producer_dead,
        rf"3 incomplete groups wait, and {NO_PRODUCER}, which (died|is gone)\. {END_GROUPS}"),
    Row(last_producer_left,
        rf"1 incomplete group waits, and {NO_PRODUCER}, which (has left|is gone)\. {END_GROUPS}"),
    Row(reserved_for_long, rf"{WORKER_IS} has 1 record reserved and has sent nothing for"),
    Row(rank_dead,
        r"The step waits for rank 1, and no trainer of that rank is attached\. Start it again",
        where="daemon"),
    Row(daemon_dead,
        rf"Nobody reads the bus; the last was shmbus serve {PID}, which died: .*Start `shmbus se",
        where="daemon"),
    Row(daemon_stopped, rf"shmbus serve {PID} is stopped.*`kill -CONT \d+` continues it",
        where="daemon"),
    Row(daemon_recovers, r"A new daemon waits for the clients of the one before", where="daemon"),
    Row(trainer_stopped_since_the_daemon_before, NOT_BACK, where="daemon"),
    Row(trainer_stopped_beside_its_successor, NOT_BACK, where="daemon"),
    Row(servers_paused,
        r"Inference servers are paused by a trainer that died\. `shmbus weights .* --resume`",
        where="embedded"),
]  # fmt: skip


def sentence_of(status: BusStatus) -> str:
    """Return the sentence for a walked status."""
    assert status.verdict is not None
    return status.verdict.sentence


@pytest.mark.parametrize(
    ("row", "served"),
    [
        pytest.param(row, place == "daemon", id=f"{row.make.__name__}-{place}")
        for row in TABLE
        for place in row.where.split()
    ],
)
def test_each_state_has_its_sentence(
    bus_name: str,
    spawn: Spawner,
    daemon: Callable[..., Daemon],
    row: Row,
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdict, "RESERVED_S", 0.0)
    monkeypatch.setattr(verdict, "BUSY_S", 0.0)
    scene = Scene(bus_name, spawn, daemon, served)
    pattern = re.compile(row.served if served and row.served else row.says)
    try:
        row.make(scene)
        said: list[str] = []

        def matches() -> bool:
            said.append(sentence_of(read_status(bus_name)))
            return pattern.match(said[-1]) is not None

        try:
            wait_until(matches, timeout=10)
        except TimeoutError:
            raise AssertionError(f"expected {pattern.pattern}, got {said[-1]}") from None
        watcher = Watcher(bus_name)
        watcher.poll()
        assert pattern.match(sentence_of(watcher.status)), sentence_of(watcher.status)
        others = [line for line in said if line.startswith("Nothing stands")]
        assert row.make in (healthy, measuring_trainer_dead, one_failed) or not others, said
    finally:
        for child in scene.stopped:
            child.send_signal(signal.SIGCONT)
        if not served:
            note = SHM_DIRECTORY + companion_name("fleet", bus_name)
            if os.path.exists(note):
                os.unlink(note)


@pytest.mark.parametrize("served", [False, True])
def test_a_timeout_of_a_trainer_has_the_sentence_and_what_it_needs(
    bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon], served: bool
) -> None:
    scene = Scene(bus_name, spawn, daemon, served)
    scene.begin()
    with OnlineDataHandler(bus_name, groups_per_batch=4, label="me.py") as handler:
        for number in range(2):
            handler.request(f"q{number}", group_size=2)
        with pytest.raises(TimeoutError, match="2 prompts are open, and no worker has ever"):
            handler.next_batch(0.3)
        scene.worker("idle", answers=4)

        def held() -> bool:
            with contextlib.suppress(TimeoutError):
                handler.next_batch(0)
            return handler.stats().leased == 4

        wait_until(held)
        with pytest.raises(TimeoutError) as caught:
            handler.next_batch(0.3)
    says = (
        rf"no batch within 0.3 s: me\.py \(pid {os.getpid()}\) waits for 2 more groups"
        r"( and holds 2)?, and no prompt is open\. Offer more"
    )
    assert re.match(says, str(caught.value)), caught.value


@pytest.mark.parametrize("served", [False, True])
def test_a_stall_report_begins_with_the_sentence(
    bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon], served: bool
) -> None:
    workers_dead(Scene(bus_name, spawn, daemon, served))
    report = str(gather(bus_name, "a complete group", 1.0))
    assert "\n4 prompts are open, and no worker is attached" in report, report


@pytest.mark.parametrize("served", [False, True])
def test_a_workers_stall_report_names_the_trainer_that_asks_for_nothing(
    bus_name: str,
    spawn: Spawner,
    daemon: Callable[..., Daemon],
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdict, "BUSY_S", 0.0)
    trainer_busy(Scene(bus_name, spawn, daemon, served))
    wait_until(lambda: "3 complete groups" in sentence_of(read_status(bus_name)))
    status = gather(bus_name, "space", 100.0).status
    assert status is not None and status.verdict is not None
    [finding] = status.verdict.findings
    assert finding.kind == "trainer_busy" and finding.who[0].startswith("trainer.py (pid ")
