"""Pairs of faults, the second during the recovery from the first, over a whole system.

A fault kills or stops a process (engine, recorder, worker, harness, relay, daemon, annotator,
trainer), or fills the disk. After each pair the trainer must take a step. At the end every prompt
was trained, once, with its engine's tokens, its agent's score and its annotator's column; no call
waited beyond its timeout.

Usage: ``PYTHONPATH=tests:tests/recorder python tests/process/second_fault.py NAME PAIRS SECONDS
SEED``, limited by pairs and by seconds. Prints a JSON report.
"""

import asyncio
import contextlib
import faulthandler
import http.client
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from http_requests import free_port
from recorders import ask
from relay.connections import open_mailbox
from stub_engine import END, LETTERS
from stub_engine import run as run_engine
from supervisor import DEADLINE_S, Supervisor, own_tmpfs, unmount

import shmbus
from shmbus.cli import main as shmbus_main
from shmbus.relay import keep
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.party import run_party
from shmbus.relay.sink_party import SinkParty
from shmbus.relay.source_party import SourceParty
from shmbus.segment.recorder_files import read_recorders
from shmbus.stash.stash import StashPolicy
from trainer_adapter import OnlineDataHandler

SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
COLUMN = {"reference": "float32"}
COORDINATOR = "coordinator"
GROUP_SIZE, GROUPS_PER_BATCH, TURNS, THREADS = 2, 2, 2, 2
#: The disk, and the kept file's limit of ended records, to have the file made anew often.
DISK_BYTES, keep._SPARE_BYTES = 8 << 20, 1 << 20
#: Seconds between two faults of a pair, and of a stop; at most.
APART_S, STOP_S = 0.3, 0.6
#: Seconds of a call's wait, and a busy machine's extra.
WAIT_S, SLACK_S = 2.0, DEADLINE_S / 2
#: Seconds for the trainer's step after a pair.
STEP_S = 2 * DEADLINE_S

#: Characters of a process's log in a failed storm's output.
TOLD = 3000

Value = TypeVar("Value")


def entries(log: Path) -> list[Any]:
    """Whole lines of a log; a killed writer may leave half a line before its successor's."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line[line.rindex("[[") :]))
    return found


def score_of(tokens: list[int]) -> float:
    """Return the agent's score for these letters."""
    return sum(tokens) % 97 / 97


class System(Supervisor):
    """The processes of the chain, and their faults."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.seed, self.folder = seed, folder
        self.source, self.trainer_bus = f"{name}.s", f"{name}.t"
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.has_disk = own_tmpfs(self.disk, DISK_BYTES)
        self.trained, self.position = folder / "trained", self.disk / "checkpoint"
        self.trained.touch()
        self.over = mmap.mmap(-1, 4096)
        self.make_buses()
        self.records = [folder / f"engine-{number}" for number in range(2)]
        self.ports = [free_port() for _ in self.records]
        for number in range(2):
            self.start(f"engine {number}", lambda life, n=number: self.engine(n, life))
            self.start(f"recorder {number}", self.recorder)
            self.start(f"worker {number}", self.worker)
            self.start(f"annotator {number}", self.annotator)
        self.start("harness", self.harness)
        for party, make in {
            "source": lambda box: SourceParty(self.source, box, COORDINATOR),
            "sink": lambda box: SinkParty(
                self.trainer_bus, box, COORDINATOR, keep=str(self.disk), keep_sync_s=0.1
            ),
            "coordinator": self.coordinator,
        }.items():
            self.start(party, lambda life, party=party, make=make: self.relay(party, make))
        self.start("daemon", self.daemon)
        self.start("trainer", self.trainer)

    def make_buses(self) -> None:
        shmbus.Bus.create(self.source, "16MiB", schema=SCHEMA).close()
        shmbus.Bus.create(self.trainer_bus, "16MiB").close()

    def remove_buses(self) -> None:
        for bus in (self.source, self.trainer_bus):
            shmbus_main(["rm", "--force", bus])
        with contextlib.suppress(shmbus.BusNotFoundError):
            shmbus.unlink(f"{self.trainer_bus}.columns.reference")

    # -- processes

    def start(self, name: str, program: Callable[[int], None] | None = None) -> None:
        def logged(life: int) -> None:
            log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1)
            torch.set_num_threads(1)
            program(life)

        super().start(name, logged if program is not None else None)

    def within(self, what: str, call: Callable[[], Value]) -> Value:
        """Make a call with a timeout of `WAIT_S`, and note a longer wait."""
        began = time.monotonic()
        try:
            return call()
        finally:
            waited = time.monotonic() - began
            if waited > WAIT_S + SLACK_S:
                with (self.folder / "late").open("a") as log:
                    log.write(f"{what} waited {waited:.1f} s\n")

    def engine(self, number: int, life: int) -> None:
        asyncio.run(run_engine(self.ports[number], str(self.records[number]), self.seed + life))

    def recorder(self, life: int) -> None:
        engines = [word for port in self.ports for word in ("--engine", f"http://127.0.0.1:{port}")]
        shmbus_main(["proxy", self.source, *engines, "--http", "127.0.0.1:0", "--idle", "5"])

    def relay(self, address: str, make: Callable[[Any], Any]) -> None:
        mailbox = open_mailbox(str(self.folder), address)
        run_party(lambda: make(mailbox), mailbox, lambda: True)

    def coordinator(self, box: Any) -> CoordinatorParty:
        policy = StashPolicy(sample_retries=10_000, retry_backoff_s=(0.01, 0.1), retry_timeout_s=5)
        return CoordinatorParty(box, ["source"], ["sink"], policy)

    def daemon(self, life: int) -> None:
        assert shmbus_main(["serve", self.trainer_bus]) == 0

    def worker(self, life: int) -> None:
        with shmbus.Producer(self.source) as producer:

            def work(number: int) -> None:
                rng = random.Random(f"{self.seed} {life} {number}")
                while True:
                    request = self.within("a worker", lambda: producer.requests.next(WAIT_S))
                    if request is not None:
                        with contextlib.suppress(*AGENT_FAULTS):
                            self.make(producer, request, rng)

            threads = [threading.Thread(target=work, args=(each,)) for each in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def make(self, producer: shmbus.Producer, request: shmbus.Request, rng: random.Random) -> None:
        """Make a sample by an agent's session."""
        opened = self.within("a session", lambda: producer.session(request, wait=WAIT_S))
        with opened as session:
            session.finish(run_agent(session.base_url, session.api_key, rng))

    def harness(self, life: int) -> None:
        rng = random.Random(f"{self.seed} {life}")
        while True:
            with contextlib.suppress(*AGENT_FAULTS):
                urls = [note.url for note in read_recorders(self.source)]
                url = rng.choice(urls or ["http://127.0.0.1:9"])
                status, opened = ask(f"{url}/sessions", {"timeout": 0.2})
                if status == 200:
                    score = run_agent(opened["base_url"], opened["api_key"], rng)
                    ask(f"{url}/session/score", {"score": score}, opened["api_key"])
            time.sleep(0.05)

    def annotator(self, life: int) -> None:
        with shmbus.Annotator(self.trainer_bus, COLUMN) as annotator:
            while True:
                group = self.within("an annotator", lambda: annotator.take(WAIT_S))
                if group is not None:
                    group.write(reference=[reference(sample["tokens"]) for sample in group])

    def trainer(self, life: int) -> None:
        """Log a batch, save a checkpoint, acknowledge; resume from the checkpoint."""
        with (
            shmbus.Columns(
                self.trainer_bus, COLUMN, capacity="4MiB", request_capacity="4MiB", claim_timeout=1
            ) as columns,
            self.attach(columns) as handler,
            self.trained.open("r+b") as log,
        ):
            if self.position.exists():
                state = json.loads(self.position.read_text())
                log.truncate(state["log"])
                log.seek(0, os.SEEK_END)
                handler.load_state_dict(state["handler"])
            else:
                log.truncate(0)
            handler.offer(self.prompts(), ahead=3, group_size=GROUP_SIZE)
            while True:
                try:
                    batch = self.within("a trainer", lambda: handler.next_batch(WAIT_S))
                except TimeoutError:
                    continue
                except EOFError:
                    break
                right = reference(batch.tokens.numpy())
                assert np.array_equal(batch.extra["reference"].numpy(), right), "another's column"
                log.write(
                    "".join(json.dumps(line_of(each)) + "\n" for each in batch.groups).encode()
                )
                log.flush()
                self.save({"log": log.tell(), "handler": handler.state_dict()})
                handler.ack(batch)

    def attach(self, columns: shmbus.Columns) -> OnlineDataHandler:
        """Attach once a daemon knows the previous trainer's death."""
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                return OnlineDataHandler(
                    self.trainer_bus, groups_per_batch=GROUPS_PER_BATCH, prefetch=1, daemon=True,
                    annotate_group=columns,
                )  # fmt: skip
            except (shmbus.BusBusyError, shmbus.DaemonUnavailableError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def prompts(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield prompts until the storm is over."""
        number = 0
        while not (self.over[0] and number >= int.from_bytes(self.over[8:16], "little")):
            number += 1
            self.over[8:16] = max(number, int.from_bytes(self.over[8:16], "little")).to_bytes(
                8, "little"
            )
            yield f"q{number - 1}", np.array([number], np.int32)

    def save(self, state: dict[str, Any]) -> None:
        """Save a checkpoint, once the disk has room."""
        new = self.position.with_suffix(".new")
        while True:
            try:
                new.write_text(json.dumps(state))
                break
            except OSError:
                time.sleep(0.02)
        new.replace(self.position)

    # -- faults

    def fault(self, name: str) -> Callable[[], None]:
        """Do a fault; return the function that ends it."""
        if name == "disk":
            self.done["disk full"] += 1
            ballast = self.disk / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            return ballast.unlink
        if name == "reboot":
            self.done["reboot"] += 1
            self.reboot()
            return lambda: None
        kind = name.split()[0]
        if self.rng.random() < 0.3:
            self.done[f"{kind} stopped"] += 1
            child = self.children[name]
            child.stop()
            time.sleep(self.rng.random() * STOP_S / 2)
            return lambda: child.go_on() if child is self.children.get(name) else None
        self.done[f"{kind} killed"] += 1
        self.kill(name)
        if self.rng.random() < 0.5:
            self.start(name)
            return lambda: None
        return lambda: None if name in self.children else self.start(name)

    def reboot(self) -> None:
        """Lose the memory of every machine; disks and engines' records stay."""
        self.end()
        self.remove_buses()
        self.make_buses()
        for name in self.programs:
            self.start(name)

    def pair(self) -> None:
        """Do two faults, and end both in any order; then require a step of the trainer."""
        names = [*self.children, *["disk"] * 3 * self.has_disk]
        first = self.rng.choice(names)
        second = self.rng.choice([name for name in [*names, "reboot"] if name != first])
        self.latest = f"{first}, {second}"
        ends = [self.fault(first)]
        time.sleep(self.rng.random() ** 2 * APART_S)
        ends.append(self.fault(second))
        time.sleep(self.rng.random() ** 2 * APART_S)
        self.rng.shuffle(ends)
        for end in ends:
            end()
        self.done["pairs"] += 1
        self.await_step()

    def await_step(self) -> None:
        before, end = self.stamp(), time.monotonic() + STEP_S
        while self.stamp() == before:
            self.replace_finished()
            if time.monotonic() > end:
                self.say_where()
                raise AssertionError(f"no step in {STEP_S} s after {self.latest}")
            time.sleep(0.01)

    def say_where(self) -> None:
        """Have processes write their stacks into their logs."""
        for child in self.children.values():
            os.kill(child.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def stamp(self) -> int:
        """Time of the newest checkpoint."""
        return self.position.stat().st_mtime_ns if self.position.exists() else 0

    def finish(self) -> None:
        self.over[0] = 1
        trainer, end = self.children["trainer"], time.monotonic() + 2 * STEP_S
        while not trainer.look():
            assert time.monotonic() < end, "the last prompts were not trained"
            time.sleep(0.02)
        assert trainer.status == 0, "the trainer failed"
        while any(self.undelivered()):
            assert time.monotonic() < end, f"records that nobody reads: {self.undelivered()}"
            time.sleep(0.001)

    def undelivered(self) -> list[int]:
        """Count the unread records of the trainer's bus and of the source."""
        with shmbus.Bus.open(self.trainer_bus) as trainer, shmbus.Bus.open(self.source) as source:
            return [trainer.stats().undelivered, source.stats().undelivered]

    def audit(self) -> dict[str, Any]:
        """Compare the trained with the offered, sampled and scored."""
        offered = int.from_bytes(self.over[8:16], "little")
        sampled: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        for record in self.records:
            for prompt, output, logprobs in entries(record):
                sampled[tuple(prompt)].append((output, logprobs))
        times: Counter[str] = Counter()
        foreign = scores = 0
        for group, samples in entries(self.trained):
            times[group] += 1
            for score, rows in samples:
                foreign += not all(take_sampled(row, sampled) for row in rows)
                letters = [
                    token - LETTERS
                    for tokens, mask, _ in rows
                    for token, counts in zip(tokens, mask, strict=True)
                    if counts and token != END
                ]
                scores += abs(score - score_of(letters)) > 1e-6
        with shmbus.Bus.open(self.trainer_bus) as trainer, shmbus.Bus.open(self.source) as source:
            dropped = [trainer.stats().dropped, source.stats().dropped]
        late = self.folder / "late"
        return {
            "offered": offered,
            "trained": len(times),
            "lost": [f"q{number}" for number in range(offered) if f"q{number}" not in times],
            "twice": sum(count > 1 for count in times.values()),
            "foreign": foreign,
            "scores": scores,
            "late": late.read_text().splitlines() if late.exists() else [],
            "dropped": dropped,
            "faults": dict(self.done),
            "disk": self.has_disk,
        }


#: Errors of an agent after its recorder's or engine's death; the sample is asked for again.
AGENT_FAULTS = (
    OSError,
    ValueError,
    KeyError,
    http.client.HTTPException,
    shmbus.RecorderUnavailableError,
)


def run_agent(base_url: str, key: str, rng: random.Random) -> float:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"go {rng.random()}"}]
    said = ""
    for _ in range(TURNS):
        status, answer = ask(
            f"{base_url}/chat/completions", {"model": "m", "messages": messages}, key
        )
        if status != 200:
            raise ConnectionError(f"{status}: {str(answer)[:200]}")
        message = answer["choices"][0]["message"]
        said += message["content"]
        messages += [message, {"role": "user", "content": "on"}]
    return score_of([ord(letter) for letter in said])


def reference(tokens: np.ndarray) -> np.ndarray:
    """The annotators' column."""
    return -tokens.astype(np.float32)


def line_of(group: shmbus.Group) -> list[Any]:
    samples = [
        [
            sample.score,
            [
                [row[name].tolist() for name in ("tokens", "loss_mask", "logprobs")]
                for row in sample.rows
            ],
        ]
        for sample in group
    ]
    return [group.instance_id, samples]


def take_sampled(row: list[Any], sampled: dict[tuple[int, ...], list[Any]]) -> bool:
    """Whether engines sampled each trained token of a row, for this sample alone."""
    ids, mask, logprobs = row
    at = 0
    while at < len(ids):
        if not mask[at]:
            at += 1
            continue
        fitting = [
            one
            for one in sampled[tuple(ids[:at])]
            if one == (ids[at : at + len(one[0])], logprobs[at : at + len(one[0])])
        ]
        if not fitting:
            return False
        sampled[tuple(ids[:at])].remove(fitting[0])
        at += len(fitting[0][0])
    return True


def main() -> None:
    name, seed = sys.argv[1], int(sys.argv[4])
    pairs, seconds = float(sys.argv[2]), float(sys.argv[3])
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="shmbus-") as folder:
        system = System(name, seed, Path(folder))
        end = time.monotonic() + seconds
        try:
            system.latest = "the start"
            system.await_step()
            while system.done["pairs"] < pairs and time.monotonic() < end:
                system.pair()
            system.finish()
            report = system.audit()
            print(json.dumps(report))
            assert not report["lost"] and not report["twice"], "the audit"
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.stem}\n{log.read_text()[-TOLD:]}", file=sys.stderr)
            raise
        finally:
            system.end()
            system.remove_buses()
            if system.has_disk:
                unmount(system.disk)


if __name__ == "__main__":
    main()
