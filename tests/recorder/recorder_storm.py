"""Kills of recorders, agents, engines, trainers: ``recorder_storm.py BUS SECONDS SEED FOLDER``."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import shmbus

HERE = Path(__file__).parent
SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
GROUP_SIZE, AHEAD, TURNS, THREADS = 2, 12, 3, 3
#: Seconds between two kills, at most; and for the last prompts once the kills are over.
KILL_S, REST_S = 0.6, 240.0


# -- the parties


def post(url: str, body: Any, key: str) -> Any:
    from recorders import ask

    status, answer = ask(url, body, key)
    if status != 200:
        raise ConnectionError(f"{status}: {str(answer)[:200]}")
    return answer


def run_agent(base_url: str, key: str, rng: random.Random) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"go {rng.random()}"}]
    for _ in range(TURNS):
        answer = post(f"{base_url}/chat/completions", {"model": "m", "messages": messages}, key)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "on"}]


def be_worker(bus: str, seed: int) -> None:
    with shmbus.Producer(bus) as producer:

        def work(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            while True:
                request = producer.requests.next()
                try:
                    with producer.session(request, wait=20.0) as session:
                        run_agent(session.base_url, session.api_key, rng)
                        session.finish(rng.random())
                except (OSError, shmbus.RecorderUnavailableError):
                    pass  # the sample has failed, or was given back

        threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def be_harness(bus: str, seed: int) -> None:
    """Open, run and score over HTTP, at whichever recorder lives."""
    from shmbus.segment.recorder_files import read_recorders

    rng = random.Random(seed)
    while True:
        try:
            url = rng.choice([note.url for note in read_recorders(bus)] or ["http://127.0.0.1:9"])
            opened = post(f"{url}/sessions", {"timeout": 1}, "")
            run_agent(opened["base_url"], opened["api_key"], rng)
            post(f"{url}/session/score", {"score": rng.random()}, opened["api_key"])
        except OSError:
            time.sleep(0.1)


def be_trainer(bus: str, log: str) -> None:
    """Write each group down, acknowledge it, and write that down."""
    with (
        open(log, "a") as out,
        shmbus.Consumer(bus, sample_retries=10_000, retry_backoff=(0.01, 0.1)) as consumer,
    ):
        for group in consumer:
            rows = [
                [row[name].tolist() for name in ("tokens", "loss_mask", "logprobs")]
                for sample in group
                for row in sample.rows
            ]
            out.write(json.dumps(["got", group.instance_id, rows]) + "\n")
            out.flush()
            group.ack()
            out.write(json.dumps(["trained", group.instance_id, len(group)]) + "\n")
            out.flush()


# -- the storm


class Party:
    def __init__(self, *words: str) -> None:
        self._words = words
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, *self._words], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def entries(log: Path) -> list[Any]:
    """Return whole lines; the last one of a killed writer may be none."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            # A killed writer's half, with a successor's line behind it.
            start = line.rfind('["')
            found.append(json.loads(line[start:]))
    return found


def storm(bus: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    me = str(Path(__file__))
    records = [folder / f"engine{n}.jsonl" for n in range(2)]
    ports = [free_port() for _ in records]
    urls = [word for port in ports for word in ("--engine", f"http://127.0.0.1:{port}")]
    log = folder / "trainer.jsonl"
    parties = {
        **{
            f"engine{n}": Party(str(HERE / "stub_engine.py"), str(port), str(record), str(seed + n))
            for n, (port, record) in enumerate(zip(ports, records, strict=True))
        },
        **{
            f"recorder{n}": Party(
                "-m", "shmbus", "proxy", bus, *urls, "--http", "127.0.0.1:0", "--idle", "5"
            )
            for n in range(2)
        },
        **{f"worker{n}": Party(me, "worker", bus, str(seed + n)) for n in range(2)},
        "harness": Party(me, "harness", bus, str(seed)),
        "trainer": Party(me, "trainer", bus, str(log)),
    }
    kills: dict[str, int] = defaultdict(int)
    offered = 0
    try:
        with shmbus.Feeder(bus) as feeder:
            over = time.monotonic() + seconds
            while time.monotonic() < over:
                done = len({entry[1] for entry in entries(log) if entry[0] == "trained"})
                while offered < done + AHEAD:
                    feeder.request(f"q{offered}", group_size=GROUP_SIZE)
                    offered += 1
                time.sleep(rng.uniform(0.05, KILL_S))
                name = rng.choice(sorted(parties))
                parties[name].kill()
                kills[name.rstrip("01")] += 1
                parties[name].start()
            deadline = time.monotonic() + REST_S
            while True:
                got = {entry[1] for entry in entries(log) if entry[0] == "got"}
                if len(got) == offered or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
                dead = [p for p in parties.values() if p.process.poll() is not None]
                for party in dead:
                    party.start()
    finally:
        for party in parties.values():
            party.kill()
    return audit(records, log, offered) | {"kills": dict(kills)}


def audit(records: list[Path], log: Path, offered: int) -> dict[str, Any]:
    """Hold what was trained against what engines sampled."""
    sampled: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for record in records:
        for prompt, output, logprobs in entries(record):
            sampled[tuple(prompt)].append((output, logprobs))
    trained = [entry[1] for entry in entries(log) if entry[0] == "trained"]
    groups = {entry[1]: entry[2] for entry in entries(log) if entry[0] == "got"}
    foreign = tokens = 0
    for rows in groups.values():
        for ids, mask, logprobs in rows:
            at = 0
            while at < len(ids):
                if not mask[at]:
                    at += 1
                    continue
                fitting = [
                    one
                    for one in sampled[tuple(ids[:at])]
                    if one[0] == ids[at : at + len(one[0])]
                    and one[1] == logprobs[at : at + len(one[0])]
                ]
                if not fitting:
                    foreign += 1
                    break
                # Twice would be another sample's.
                sampled[tuple(ids[:at])].remove(fitting[0])
                tokens += len(fitting[0][0])
                at += len(fitting[0][0])
    return {
        "offered": offered,
        "trained": len(groups),
        "twice": len(trained) - len(set(trained)),
        "foreign": foreign,
        "tokens": tokens,
    }


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        be_worker(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "harness":
        be_harness(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "trainer":
        be_trainer(sys.argv[2], sys.argv[3])
    else:
        name, length, number, place = sys.argv[1:]
        with shmbus.Bus.create(name, "64MiB", schema=SCHEMA):
            print(json.dumps(storm(name, float(length), int(number), Path(place))))
