"""Closed training loops, an arm each: ``python -m bench.loop``, or ``--soak 2h`` under faults.

A generator, at most `--lag` versions behind, and a trainer run at once; each step has new weights.
Arms (`bench.loop_arms`) take turns. *Idle* is what neither generates nor trains. The soak kills a
worker or the trainer by turns, which goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import shmbus
from bench import machine, processes, program
from bench.loop_arms import ARMS, ATROPOS, POLL_S, PREFIX, bus
from bench.loop_policy import PAYLOADS, WORKS, Sample, Setup, check, generated, make, step
from bench.processes import MeasurementError, Role, Started, context, descendants
from bench.row import Row, skipped
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler

__all__ = ["main"]

#: Steps that do not count, while the pipe fills.
FIRST: Final = 2
#: GiB that a device with the generator and the trainer needs, and one with either.
DEVICE_GIB: Final = (60, 40)
WORKERS: Final = 2
#: What the soak lets grow from the first half of its checks to the second, once each kind of
#: process has come again: of all processes together, and of the files in /dev/shm with the bus's
#: name. The highest of each half counts, since a process that begins has less.
MAY_GROW: Final = {"MB": 64, "descriptors": 8, "threads": 4, "segments": 1}
#: Seconds that a run may take, and that the soak may stand still.
PATIENCE_S: Final = 300.0
Found = dict[str, Any]
now = time.perf_counter


def end_with_parent() -> None:
    """Be killed when the program ends, however it does; a template may be the parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def generating(end: Any, setup: Setup, stop: Any, found: Found) -> Iterator[None]:
    """Attach, and generate batch after batch, until no more are wanted."""
    while end.newest() < 0:
        time.sleep(POLL_S)
    end.load()
    list(generated(end.policy, setup.prompts(0), setup.lengths(0), lambda rows: True))
    yield
    found |= {"busy_s": 0.0, "pauses_s": [], "tokens": 0, "made": Counter()}
    started = now()

    def goes_on(rows: int) -> bool:
        found["tokens"] += rows
        found["lived_s"] = now() - started
        return not stop.is_set()

    for batch in itertools.count():
        while end.newest() < batch - setup.lag and not stop.is_set():
            time.sleep(POLL_S)
        began = now()
        if end.newest() > end.version:
            end.load()
            found["pauses_s"].append(now() - began)
        began, lengths = now(), setup.lengths(batch)
        for row, *made in generated(end.policy, setup.prompts(batch), lengths, goes_on):
            key = f"{batch}-{row // setup.work.group}", row % setup.work.group
            sample = Sample.made(setup, key, end.version, *made)
            found["made"][key[0]] += int(lengths[row])
            sending = now()
            end.send(sample)
            began += now() - sending
        found["busy_s"] += now() - began
        if stop.is_set():
            return
        end.sent(batch)
        yield


def training(end: Any, setup: Setup, found: Found) -> Iterator[None]:
    """Publish, and take all steps."""
    optimizer = torch.optim.Adam(end.policy.parameters(), lr=setup.work.rate)
    end.publish(0)
    found["steps"] = []
    yield
    before = now()
    for number in range(setup.steps):
        batch = end.next(number)
        there = now()
        check(batch, setup)
        step(end.policy, optimizer, batch, setup)
        trained, lag = now(), number - float(batch.policy_versions.float().mean())
        reward, groups = float(batch.scores.mean()), sorted(set(batch.instance_ids))
        end.publish(number + 1)
        end.done(batch)
        waited, before = there - before, now()
        found["steps"].append((before, waited, trained - there, lag, reward, groups))
        if number + 1 < setup.steps:
            yield


def role(start: Any, name: str, arm: str, link: Any, setup: Setup, stop: Any) -> Found:
    """Be the "generator", the "trainer" or "both", and return what was measured."""
    end_with_parent()
    found: Found = {}
    policy = make(setup, setup.generator if name == "generator" else setup.trainer)
    with ARMS[arm](link, setup, policy, name) as end:
        sides = [training(end, setup, found)] if name != "generator" else []
        sides += [generating(end, setup, stop, found)] if name != "trainer" else []
        for side in sides:
            next(side)
        start()
        while all(next(side, "ended") is None for side in reversed(sides)):
            pass
        stop.set()
    return found


def run(arm: str, setup: Setup, patience_s: float) -> dict[str, float]:
    """Run a loop, and return its figures; MeasurementError where it is not done in time."""
    names = ["both"] if arm == "alternating" else ["generator", "trainer"]
    setup = setup._replace(threads=max(1, (os.cpu_count() or 1) // len(names)))
    with ARMS[arm].made(setup) as link:
        more = (arm, link, setup, context().Event())
        told = processes.run_together([Role(role, (name, *more)) for name in names], patience_s)
    found = {name: value for each in told for name, value in each.items()}
    ends, waits, trains, lags, rewards, groups = zip(*found["steps"], strict=True)
    made, first = found["made"], min(FIRST, setup.steps - 1)
    wanted = sum(size for name, size in made.items() if int(name.split("-")[0]) < setup.steps)
    trained = [name for names in groups for name in names]
    pauses, span = sorted(found["pauses_s"]) or [0.0], ends[-1] - ends[first - 1]
    return {
        "step_s": statistics.median(b - a for a, b in itertools.pairwise(ends[first - 1 :])),
        "wait_s": statistics.median(waits[first:]), "trainer_idle": 1 - sum(trains[first:]) / span,
        "generator_idle": 1 - found["busy_s"] / found["lived_s"],
        "pause_p50_s": statistics.median(pauses), "pause_p95_s": pauses[int(0.95 * len(pauses))],
        "trained_per_s": sum(made[name] for names in groups[first:] for name in names) / span,
        "generated_per_s": found["tokens"] / found["lived_s"], "lag": statistics.mean(lags[first:]),
        "goodput": sum(made[name] for name in set(trained)) / wanted, "reward": rewards[-1],
        "in_flight_tokens": found["tokens"] - wanted, "twice": len(trained) - len(set(trained)),
    }  # fmt: skip


def why_not(arm: str, setup: Setup) -> str:
    """Say what keeps an arm from running here; nothing if nothing does."""
    if arm == "shmbus-device" and setup.trainer == "cpu":
        return "needs --device cuda"
    if arm == "rest" and setup.payload != "text":
        return "its groups have no such field"
    if arm == "rest" and not ATROPOS.exists():
        return "its environment is not there: make bench-contenders"
    needs = DEVICE_GIB[setup.trainer != setup.generator]
    for device in {setup.trainer, setup.generator} - {"cpu"}:
        if (free := torch.cuda.mem_get_info(device)[0] >> 30) < needs:
            return f"needs {needs} GiB of {device}, {free} are free"
    return machine.lacks(shm_bytes=setup.room(*ARMS[arm].room), modules=ARMS[arm].needs)


def said(run: Found) -> str:
    """Say what a run found beside the length of a step."""
    return (
        f"idle trainer {run['trainer_idle']:.0%}, "
        f"generator {run['generator_idle']:.0%}; "
        f"pause {1e3 * run['pause_p50_s']:,.1f} to {1e3 * run['pause_p95_s']:,.1f} ms; "
        f"{run['trained_per_s']:,.0f} and {run['generated_per_s']:,.0f} tokens/s; lag "
        f"{run['lag']:.2g}; goodput {run['goodput']:.3g}; reward {run['reward']:.2f}"
    )


def rows_of(payload: str, found: dict[str, list[Found]], failed: dict[str, str]) -> Iterator[Row]:
    """Make the rows of a payload: of each arm a step, and what the trainer waits in it."""
    for figure, name, title in (("step_s", "", "a step"), ("wait_s", "-wait", "the trainer waits")):
        of = {arm: tuple(1e3 * run[figure] for run in runs) for arm, runs in found.items()}
        for arm, why in failed.items():
            yield skipped(f"loop-{payload}-{arm}{name}", f"{payload}, {arm}, {title}", why)
        for arm, runs in found.items():
            others = sorted((statistics.median(of[each]), each) for each in of if each != arm)
            beside = others[0][1] if others else ""
            mid = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            yield Row(
                name=f"loop-{payload}-{arm}{name}", title=f"{payload}, {arm}, {title}", unit="ms",
                values=of[arm], beside=beside, beside_values=of.get(beside, ()),
                note="" if name else said(mid), figures={} if name else {"runs": runs},
            )  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    """Run the arms by turns, or the soak."""
    print(f"seed {options.seed}", flush=True)
    processes.use_template("transformers", "bench.loop_arms", "trainer_adapter.attention")
    if options.soak:
        setup = Setup(WORKS["tiny"], "text", options.seed)
        return [soak(setup, options.soak, options.every, options.patience)]
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        return [skipped("loop", "closed loops", "torch sees no CUDA device")]
    devices = ("cuda:1" if torch.cuda.device_count() > 1 else "cuda:0", "cuda:0")
    work, rows = WORKS["tiny" if options.tiny else options.device], list[Row]()
    steps = options.steps or (3 if options.tiny else 8 if cuda else 16)
    for payload in options.payloads:
        setup = Setup(work, payload, options.seed, steps, options.lag, *(devices if cuda else ()))
        failed = {arm: why for arm in options.arms if (why := why_not(arm, setup))}
        found: dict[str, list[Found]] = {}
        turns = options.repetitions or (1 if options.tiny else 3)
        for arm in (arm for arm in options.arms * turns if arm not in failed):
            try:
                found.setdefault(arm, []).append(run(arm, setup, options.patience))
                step_s = found[arm][-1]["step_s"]
                print(
                    f"{payload}, {arm}: {step_s:.3g} s a step, {said(found[arm][-1])}", flush=True
                )
            except MeasurementError as error:
                failed[arm] = f"ended: {str(error).strip().splitlines()[-1]}"
                print(f"{payload}, {arm}: {error}", flush=True)
                del found[arm]
        rows += rows_of(payload, found, failed)
    return rows


# -- the soak --------------------------------------------------------------------------------------


def sampler(name: str, setup: Setup, counts: torch.Tensor, number: int) -> None:
    """Answer requests by the newest weights, for ever, and count tokens."""
    end_with_parent()
    policy, version = make(setup, "cpu"), -1
    with shmbus.Producer(name) as producer, WeightSubscriber(name) as subscriber:
        while True:
            request = producer.requests.next()
            if producer.policy_version != version:
                with subscriber.latest() as weights:
                    weights.load_into(policy)
                    version = weights.version
            prompt, at = int(request.instance_id), slice(request.index, request.index + 1)
            wanted = setup.prompts(prompt)[at], setup.lengths(prompt)[at]
            ((_, *made),) = generated(policy, *wanted, lambda rows: bool(counts[number].add_(rows)))
            sample: Any = Sample.made(setup, ("", 0), version, *made)
            answer = {"score": sample.score, "policy_version": version, **sample.fields}
            producer.requests.answer(request, **answer)


def learner(name: str, setup: Setup, checkpoint: Path, counts: torch.Tensor) -> None:
    """Train from the checkpoint to the end of the prompts, and keep an account in it."""
    end_with_parent()
    policy = make(setup, "cpu")
    optimizer = torch.optim.Adam(policy.parameters(), lr=setup.work.rate)
    account: Found = {"offered": 0, "times": bytearray(), "tokens": 0}
    with (
        OnlineDataHandler(name, groups_per_batch=setup.work.groups, sample_retries=16) as handler,
        WeightPublisher(name, ModuleSource(policy)) as publisher,
    ):
        if checkpoint.exists():
            weights, moments, state, account = pickle.loads(checkpoint.read_bytes())
            policy.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            handler.load_state_dict(state)

        def prompts() -> Iterator[tuple[int, dict[str, Any]]]:
            for number in itertools.count():
                if counts[-1] and number >= account["offered"]:
                    return
                yield number, {}

        handler.offer(prompts(), ahead=2, group_size=setup.work.group)
        publisher.publish(version=handler.step)
        handler.set_policy_version(handler.step)
        for batch in handler:
            step(policy, optimizer, batch, setup)
            for number in set(map(int, batch.instance_ids)):
                account["times"].extend(bytes(max(0, number + 1 - len(account["times"]))))
                account["times"][number] += 1
            publisher.publish(version=handler.step)
            handler.set_policy_version(handler.step)
            state, ledger = handler.state_dict(), handler.stats()
            left = state.get("requests") or {}
            account |= {
                "offered": state["offer"]["position"], "step": handler.step,
                "in_flight": [int(each["instance_id"]) for each in left.get("open", ())],
                "tokens": account["tokens"] + int(batch.loss_mask.sum()),
                "balanced": ledger.balanced and ledger.requests.balanced,
                "dropped": dict(ledger.dropped), "reward": float(batch.scores.mean()),
            }  # fmt: skip
            kept = policy.state_dict(), optimizer.state_dict(), state, account
            checkpoint.with_suffix(".new").write_bytes(pickle.dumps(kept))
            checkpoint.with_suffix(".new").rename(checkpoint)
            handler.ack(batch)


def audited(checkpoint: Path) -> Found:
    """Read the newest account; MeasurementError where a prompt is lost or trained twice."""
    account: Found = pickle.loads(checkpoint.read_bytes())[3]
    times = account.pop("times").ljust(account["offered"], b"\0")
    account["trained"] = len(times) - times.count(0)
    twice = account["trained"] - times.count(1)
    # A prompt of the life before, behind what this one has come to again, may be in flight too.
    known = sum(not times[number] for number in account["in_flight"] if number < account["offered"])
    lost = times[: account["offered"]].count(0) - known
    if twice or lost or not account["balanced"]:
        raise MeasurementError(f"trained twice {twice}, lost {lost} prompts: {account}")
    return account


def in_use(name: str) -> Counter[str]:
    """Add up what this process, all below it and the bus's files use."""
    used = Counter(segments=sum(name in each.name for each in Path(machine.SHM).iterdir()))
    for pid in (os.getpid(), *descendants(os.getpid())):
        place = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it has ended meanwhile
            used["MB"] += int((place / "statm").read_text().split()[1]) >> 8
            used["descriptors"] += len(list((place / "fd").iterdir()))
            used["threads"] += len(list((place / "task").iterdir()))
    return used


def soak(setup: Setup, seconds: float, every_s: float, patience_s: float) -> Row:
    """Train under faults, with checks, until all that was offered is trained."""
    # Tokens of each worker, and whether the end is near; no lock, which a kill would leave held.
    shared: Any = torch.zeros(WORKERS + 1, dtype=torch.int64)
    counts = shared.share_memory_()
    rng, kills, used = random.Random(setup.seed), Counter[str](), list[Counter[str]]()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(bus(32 << 20))
        place = tempfile.TemporaryDirectory(prefix=PREFIX, dir=machine.SHM)
        checkpoint = Path(stack.enter_context(place), "checkpoint")
        roles = [Role(sampler, (name, setup, counts, number)) for number in range(WORKERS)]
        roles.append(Role(learner, (name, setup, checkpoint, counts)))
        started = [Started(each) for each in roles]
        stack.callback(lambda: list(map(Started.end, started)))

        def wait(done: Callable[[], object]) -> None:
            limit = time.monotonic() + patience_s
            while not done():
                for why in filter(None, (each.failure() for each in started)):
                    raise MeasurementError(why)
                if time.monotonic() > limit:
                    raise MeasurementError(f"the soak stands still, {patience_s:g} s long")
                time.sleep(0.05)

        def has_steps(more: int) -> None:
            before = audited(checkpoint)["step"]
            wait(lambda: audited(checkpoint)["step"] >= before + more)

        wait(checkpoint.exists)
        began, period = time.monotonic(), min(60.0, seconds / 6)
        kill_at, check_at = began + every_s, began + period
        while (at := time.monotonic()) < began + seconds:
            has_steps(1)
            if at >= kill_at:
                number = WORKERS if kills.total() % 2 else rng.randrange(WORKERS)
                started[number].end()
                started[number] = Started(roles[number])
                kills["trainers" if number == WORKERS else "workers"] += 1
                has_steps(2)
                kill_at = time.monotonic() + every_s
            if at >= check_at:
                uses = in_use(name)
                used += [uses] if len(kills) == 2 else []
                print(f"{at - began:.0f} s: {audited(checkpoint)}, {dict(uses)}", flush=True)
                check_at += period
        counts[-1] = 1
        wait(lambda: not started[-1].running)
        account = audited(checkpoint)
    if account["in_flight"]:
        raise MeasurementError(f"the soak ended with prompts that are not trained: {account}")
    half = len(used) // 2
    for what, limit in MAY_GROW.items() if half else ():
        first, last = (max(each[what] for each in part) for part in (used[:half], used[half:]))
        if last > first + limit:
            raise MeasurementError(f"{what} grew from {first} to {last}, by more than {limit}")
    return Row(
        name="loop-soak", title=f"soak of {seconds:g} s, goodput",
        values=(account["tokens"] / int(counts[:-1].sum()),), figures={**account, "used": used},
        note=f"{account['trained']} prompts once, 0 twice, 0 lost; {dict(kills)} killed; "
        + (f"nothing grew in {len(used)} checks" if half else "too short to see what grows"),
    )  # fmt: skip


# -- the program -----------------------------------------------------------------------------------


def duration(text: str) -> float:
    """Read seconds, minutes or hours, as argparse's ``type``."""
    found = re.fullmatch(r"0*([1-9]\d*)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 2h, got {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("loop", __doc__)
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    made.add_argument("--payloads", nargs="+", choices=list(PAYLOADS), default=list(PAYLOADS))
    made.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    made.add_argument("--steps", type=program.at_least_one, metavar="N", help="of a run")
    made.add_argument("--lag", type=program.at_least_one, default=1, help="versions (default 1)")
    made.add_argument("--seed", type=int, default=0, help="of prompts, lengths and kills")
    made.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for a run")
    made.add_argument("--soak", type=duration, metavar="TIME", help="under faults, such as 2h")
    made.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("loop", parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
