"""A relay over nodes in namespaces; the program is a node: ``relay_nodes.py DIRECTORY NAME``."""

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from relay.connections import open_mailbox
from relay.hub import Hub, Node, address_of
from relay.relay_storm import SIZE, sample

import shmbus
from shmbus.inspect.status import read_status
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.host import HostMailbox
from shmbus.relay.party import run_party
from shmbus.relay.sink_party import SinkParty
from shmbus.relay.source_party import SourceParty
from shmbus.stash.stash import StashPolicy

NODES = ("head", "left", "right", "t0", "t1")
SOURCES, TRAINERS = ("left", "right"), ("t0", "t1")
QUIET_S = 90.0
#: Between a worker's groups, to have nodes die in the middle.
PAUSE_S = 0.005


class Inside:
    def __init__(self, plan: dict[str, Any], name: str) -> None:
        self.plan, self.name = plan, name
        self.directory = Path(plan["directory"])
        self.party: Any = None

    def holds(self) -> bool:
        """Whether the node shall pause."""
        return (self.directory / f"{self.name}.hold").exists()

    def say(self, what: Any) -> None:
        path = self.directory / f"{self.name}.json"
        path.with_suffix(".new").write_text(json.dumps(what))
        path.with_suffix(".new").rename(path)

    def run(self) -> None:
        if self.name != "head":
            shmbus.Bus.create(self.name, "8MiB")
        mailbox = open_mailbox(str(self.directory), self.name, address_of(NODES.index(self.name)))
        threading.Thread(
            target=run_party, args=(lambda: self.make(mailbox), mailbox, lambda: True), daemon=True
        ).start()
        {"head": self.lead, "left": self.work, "right": self.work}.get(self.name, self.train)()

    def make(self, mailbox: HostMailbox) -> Any:
        if self.name == "head":
            policy = StashPolicy(sample_retries=2)
            self.party = CoordinatorParty(mailbox, SOURCES, TRAINERS, policy)
        elif self.name in SOURCES:
            self.party = SourceParty(self.name, mailbox, "head")
        else:
            self.party = SinkParty(self.name, mailbox, "head", self.plan["release"])
        return self.party

    def lead(self) -> None:
        """Forget the nodes to forget, and report the state."""
        forgotten: set[str] = set()
        while True:
            for path in self.directory.glob("*.forget"):
                if path.stem not in forgotten and self.party is not None:
                    forgotten.add(path.stem)
                    self.party.forgotten.append(path.stem)
            if self.party is not None:
                self.say(msgspec.to_builtins(self.party.note()))
            time.sleep(0.1)

    def work(self) -> None:
        """Put every second sample of each group, and the samples asked for again."""
        done = 0
        with shmbus.Producer(self.name) as producer:
            while True:
                for asked in producer.requests.retries():
                    self.put(producer, int(asked.instance_id[1:]), asked.index)
                if done == self.plan["groups"] or self.holds():
                    (self.directory / f"{self.name}.held").touch()
                    time.sleep(0.02)
                    continue
                for index in range(SOURCES.index(self.name), SIZE, 2):
                    self.put(producer, done, index)
                done += 1
                self.say(done)
                time.sleep(PAUSE_S)

    def put(self, producer: shmbus.Producer, group: int, index: int) -> None:
        producer.put(
            f"q{group}", group_size=SIZE, index=index, score=float(index), round=0,
            meta={"of": [group, index]}, timeout=None, **sample(group, index),
        )  # fmt: skip

    def train(self) -> None:
        """Take groups, check every byte, and note the acknowledged groups."""
        with (
            shmbus.Consumer(self.name) as consumer,
            (self.directory / f"{self.name}.log").open("a") as log,
        ):
            said_s = 0.0
            while True:
                if time.monotonic() - said_s > 0.2:
                    said_s = time.monotonic()
                    status = read_status(self.name)
                    ledger = status.ledger
                    settled = status.relay.settled if status.relay else 0
                    self.say([ledger.committed, ledger.undelivered, settled])
                if self.holds():
                    time.sleep(0.02)
                    continue
                for group in consumer.take(timeout=0.05):
                    torn = not is_whole(group)
                    number = int(group.instance_id[1:])
                    group.ack()
                    log.write(json.dumps([number, torn, time.monotonic()]) + "\n")
                    log.flush()


def is_whole(group: shmbus.Group) -> bool:
    number = int(group.instance_id[1:])
    if len(group) != SIZE or any(t.meta != {"of": [number, t.index]} for t in group):
        return False
    return all(
        t[name].tobytes() == array.tobytes()
        for t in group
        for name, array in sample(number, t.index).items()
    )


class Cluster:
    def __init__(self, directory: str, groups: int, release: str, seed: int) -> None:
        self.directory = Path(directory)
        self.groups = groups
        plan = {"directory": directory, "groups": groups, "release": release}
        (self.directory / "plan.json").write_text(json.dumps(plan))
        self.hub = Hub(seed)
        self.nodes: dict[str, Node] = {}

    def start(self, *names: str) -> None:
        for name in names:
            argv = [sys.executable, "-u", __file__, str(self.directory), name]
            log = self.directory / f"{name}.out"
            self.nodes[name] = Node(self.hub, NODES.index(name), argv, log)

    def tell(self, name: str, what: str) -> None:
        """Have a node pause, or the head forget a node."""
        (self.directory / f"{name}.{what}").touch()

    def untell(self, name: str, what: str) -> None:
        (self.directory / f"{name}.{what}").unlink()

    def said(self, name: str) -> Any:
        try:
            return json.loads((self.directory / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def log(self, name: str) -> list[tuple[int, bool, float]]:
        path = self.directory / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line)) for line in lines]

    def acked(self) -> Counter[int]:
        return Counter(number for name in TRAINERS for number, _, _ in self.log(name))

    def wait(self, holds: Callable[[], Any], what: str) -> None:
        """Wait for a condition, as long as groups come, or for a while."""
        moved_s, seen = time.monotonic(), -1
        while not holds():
            count = sum(self.acked().values())
            if count != seen:
                moved_s, seen = time.monotonic(), count
            if time.monotonic() - moved_s > QUIET_S:
                raise AssertionError(f"no {what}: {seen} groups, the head says {self.said('head')}")
            for name, node in self.nodes.items():
                assert node.running, f"{name} ended: {(self.directory / f'{name}.out').read_text()}"
            time.sleep(0.05)

    def kill(self, name: str) -> float:
        self.nodes.pop(name).kill()
        return time.monotonic()

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self.hub.close()


@contextmanager
def cluster(*, groups: int, release: str = "acknowledged", seed: int) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="shmbus-nodes-") as directory,
        closing(Cluster(directory, groups, release, seed)) as made,
    ):
        made.start(*NODES)
        yield made


def audit(made: Cluster, *, lost: int = 0, died: float = 0.0, who: str = "") -> dict[str, Any]:
    """Compare the acknowledged with the put groups."""
    acked = made.acked()
    torn = [each for name in TRAINERS for each, is_torn, _ in made.log(name) if is_torn]
    doubled = {number for number, count in acked.items() if count > 1}
    # The trainer's last reports were under way at its node's death.
    last = {number for number, _, at in made.log(who) if at > died - 1.0} if who else set()
    missing = made.groups - len(acked)
    assert not torn, f"torn: {torn}"
    assert doubled <= last, f"doubled: {sorted(doubled - last)}"
    assert missing == lost, f"{missing} groups are missing, and {lost} were announced as lost"
    return {"groups": len(acked), "lost": lost, "twice": len(doubled), "packets": made.hub.carried}


def a_trainers_node_dies(seed: int, groups: int) -> dict[str, Any]:
    """With "acknowledged" nothing is lost: unacknowledged groups go to the second trainer."""
    with cluster(groups=groups, seed=seed) as made:
        made.wait(lambda: len(made.log("t1")) > groups // 10, "groups at the node that dies")
        died = made.kill("t1")
        made.tell("t1", "forget")
        made.wait(lambda: len(made.acked()) == groups, "groups of the dead node")
        return audit(made, died=died, who="t1")


def a_trainers_node_dies_under_put(seed: int, groups: int) -> dict[str, Any]:
    """With "put" losses equal the announcement in its status."""
    with cluster(groups=groups, release="put", seed=seed) as made:
        made.tell("t1", "hold")
        made.wait(lambda: made.said("right") == made.said("left") == groups, "workers' ends")
        both = lambda at: sum((made.said(name) or [0, 0, 0])[at] for name in TRAINERS)  # noqa: E731
        made.wait(lambda: both(0) == groups * SIZE and both(2) == 0, "all on the trainers' buses")
        made.wait(lambda: made.said("t0")[1] == 0, "what the other trainer has")
        _, undelivered, _ = made.said("t1")
        assert undelivered and undelivered % SIZE == 0, undelivered
        made.kill("t1")
        made.tell("t1", "forget")
        made.wait(
            lambda: all(each["name"] != "t1" for each in made.said("head")["peers"]), "end of it"
        )
        time.sleep(2.0)  # time for repetitions
        return audit(made, lost=undelivered // SIZE)


def a_rollout_node_dies(seed: int, groups: int) -> dict[str, Any]:
    """Announced and unfetched groups are counted, and asked for elsewhere."""
    with cluster(groups=groups, seed=seed) as made:
        made.tell("right", "hold")  # leaves the left node's groups incomplete
        made.wait(lambda: (made.said("left") or 0) >= groups // 2, "half of the left node's")
        made.tell("left", "hold")
        made.wait((made.directory / "left.held").exists, "end of the left node's work")
        each = SIZE // 2
        made.wait(
            lambda: (made.said("head") or {}).get("announced") == each * made.said("left"),
            "announcements",
        )
        begun = made.said("left")
        made.kill("left")
        made.tell("left", "forget")
        made.wait(lambda: made.said("head")["lost"] == each * begun, "its loss in the status")
        made.groups = begun  # the rest stays half put
        made.untell("right", "hold")
        made.wait(lambda: len(made.acked()) == begun, "groups that were asked for elsewhere")
        return {**audit(made), "asked for elsewhere": each * begun}


def a_partition(
    seed: int, groups: int, *, cut_s: float, delay_s: float, loss: float
) -> dict[str, Any]:
    """A node out of reach for a while, on a slow network that loses packets."""
    with cluster(groups=groups, seed=seed) as made:
        made.hub.delay_s, made.hub.loss = delay_s, loss
        cuts = [NODES.index("right"), NODES.index("t0"), NODES.index("head")]
        for number, node in enumerate(cuts):
            count = (number + 1) * groups // 5
            made.wait(lambda count=count: len(made.acked()) >= count, "groups before a partition")
            made.hub.cut = {node}
            time.sleep(cut_s)
            made.hub.cut = set()
        began = time.monotonic()
        made.wait(lambda: len(made.acked()) == groups, "groups after the partitions")
        return {**audit(made), "lost packets": made.hub.lost, "then": time.monotonic() - began}


def main() -> None:
    directory, name = sys.argv[1:]
    Inside(json.loads((Path(directory) / "plan.json").read_text()), name).run()


if __name__ == "__main__":
    main()
