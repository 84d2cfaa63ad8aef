"""Megabytes a sample from an engine's HTTP answer to a packed batch: ``python -m bench.megabytes``.

Workers, an event loop each, ask a stub that answers as vLLM does, and send what they decode to a
process that packs a batch a round, by turns through *files* (msgpack, renamed on tmpfs: prime-rl's
way, but looked for every 2 ms), *mmap* (the same files, mapped), *zmq* (the same messages, PUSH and
PULL over ipc), *transfer-queue* and *ray* (an object a sample), and *shmbus* (`decode_answers` into
a slot of the ring, `OnlineDataHandler`). All others decode by msgspec, base64 and NumPy. Processor
time is that of all processes but the server, less what reading the bodies alone takes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import importlib
import io
import itertools
import mmap
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

import shmbus
from bench import machine, processes, program
from bench.contenders import ray_objects, transfer_queue
from bench.processes import MeasurementError, Role, Started, descendants, processor_s
from bench.row import Row, skipped
from shmbus.decode import decode_answers

__all__ = ["main"]

POLL_S: Final = 0.002
#: Between looks at a worker's clock; what a look is late is the event loop's latency.
TICK_S: Final = 0.005
#: Workers that only read the bodies.
BODIES: Final = "bodies"
#: Layers and experts of a token; bytes of a token's arrays.
EXPERTS, TOKEN_BYTES = (48, 8), 9 + 48 * 8
Arrays = dict[str, NDArray[Any]]
load = importlib.import_module
#: Tokens of a sample, of which a prompt; workers, and rounds of a sample each.
FULL: Final = SimpleNamespace(tokens=30_000, prompt=1_000, workers=8, rounds=4)
QUICK: Final = SimpleNamespace(tokens=60, prompt=10, workers=2, rounds=2)


def serving(setup: Any, there: socket.socket) -> None:
    """Answer every request alike, for ever; a token's first expert tells which token it is."""
    from aiohttp import web

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, setup.tokens)
    experts = rng.integers(0, 128, (setup.tokens - 1, *EXPERTS), np.uint8)
    experts[:, 0, 0] = ids[:-1] % 128
    np.save(stream := io.BytesIO(), experts)
    prompt, sampled = ids[: setup.prompt].tolist(), ids[setup.prompt :].tolist()
    logprobs = (-rng.exponential(1.0, len(sampled))).astype(np.float32).tolist()
    choice = {
        "index": 0, "text": "x" * len(sampled), "finish_reason": "stop", "token_ids": sampled,
        "prompt_token_ids": prompt, "routed_experts": base64.b64encode(stream.getvalue()).decode(),
        "logprobs": {"tokens": [f"token_id:{n}" for n in sampled], "token_logprobs": logprobs},
    }  # fmt: skip
    body = msgspec.json.encode({"id": "x", "object": "text_completion", "choices": [choice]})

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    (app := web.Application()).router.add_post("/v1/completions", answer)
    web.run_app(app, sock=there, print=None)


def plainly(body: bytes) -> Arrays:
    """Decode an answer as one does without shmbus."""
    (choice,) = msgspec.json.decode(body)["choices"]
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    mask, logprobs = np.zeros((2, len(prompt) + len(output)), np.float32)
    mask[len(prompt) :], logprobs[len(prompt) :] = 1, choice["logprobs"]["token_logprobs"]
    routed = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    tokens = np.asarray(prompt + output, np.int32)
    found = {"tokens": tokens, "loss_mask": mask.astype(np.uint8), "logprobs": logprobs}
    return {**found, "routed_experts": routed}


def message_of(arrays: Arrays) -> bytes:
    """Encode arrays as their bytes, dtypes and shapes."""
    listed = [(name, each.dtype.str, each.shape, each.data) for name, each in arrays.items()]
    return msgspec.msgpack.encode(listed)


def arrays_of(message: Any) -> Arrays:
    """Make arrays that look into a message."""
    listed = msgspec.msgpack.decode(message, type=list[tuple[str, str, list[int], memoryview]])
    return {name: np.frombuffer(raw, of).reshape(shape) for name, of, shape, raw in listed}


class _Arm(contextlib.ExitStack):
    """An end of a way: a worker's has `send`, the trainer's, of number -1, `receive` or `next`."""

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, link: Any, setup: Any, number: int) -> None:
        super().__init__()
        self.link, self.setup, self.number = link, setup, number
        self.open()

    @classmethod
    def made(cls, setup: Any) -> Any:
        """Make a folder on tmpfs, or what else lies between the processes."""
        return tempfile.TemporaryDirectory("", f"bench-megabytes-{os.getpid()}-", machine.SHM)

    def open(self) -> None: ...
    def send(self, body: bytes, number: int) -> None: ...
    def receive(self) -> Arrays: ...  # type: ignore[empty-body]

    def next(self) -> dict[str, Any]:
        """Return the packed tensors of a round."""
        samples, packed = [self.receive() for _ in range(self.setup.workers)], dict[str, Any]()
        for name, like in samples[0].items():
            made = np.empty((len(samples), self.setup.tokens, *like.shape[1:]), like.dtype)
            for row, each in zip(made, samples, strict=True):
                # The last token, which no forward pass has seen, has no experts.
                row[: len(each[name])], row[len(each[name]) :] = each[name], 0
            packed[name] = load("torch").from_numpy(made.reshape(-1, *like.shape[1:]))
        return packed | {"tokens": packed["tokens"].long(), "loss_mask": packed["loss_mask"].bool()}


class _Files(_Arm):
    is_mapped, received = False, 0

    def send(self, body: bytes, number: int) -> None:
        path = Path(self.link, f"{number}-{self.number}")
        path.with_suffix(".part").write_bytes(message_of(plainly(body)))
        path.with_suffix(".part").rename(path)

    def receive(self) -> Arrays:
        number, worker = divmod(self.received, self.setup.workers)
        path, self.received = Path(self.link, f"{number}-{worker}"), self.received + 1
        while not path.exists():
            time.sleep(POLL_S)
        with path.open("rb") as file:
            path.unlink()
            map_it = functools.partial(mmap.mmap, file.fileno(), 0, access=mmap.ACCESS_READ)
            return arrays_of(map_it() if self.is_mapped else file.read())


class _Mmap(_Files):
    is_mapped = True


class _Zmq(_Arm):
    needs: ClassVar[tuple[str, ...]] = ("zmq",)

    def open(self) -> None:
        zmq, is_trainer = load("zmq"), self.number < 0
        context = self.enter_context(zmq.Context())
        self.socket = self.enter_context(context.socket(zmq.PULL if is_trainer else zmq.PUSH))
        self.socket.linger, self.socket.reconnect_ivl = -1, 1
        (self.socket.bind if is_trainer else self.socket.connect)(f"ipc://{self.link}/socket")

    def send(self, body: bytes, number: int) -> None:
        self.socket.send(message_of(plainly(body)), copy=False)

    def receive(self) -> Arrays:
        return arrays_of(self.socket.recv(copy=False).buffer)


class _Ray(_Arm):
    needs: ClassVar[tuple[str, ...]] = ("ray",)
    way: ClassVar[Any] = ray_objects
    workload = SimpleNamespace(room=1 << 12, bytes_each=1 << 20)

    @classmethod
    def made(cls, setup: Any) -> Any:
        return cls.way.link(cls.workload)

    def open(self) -> None:
        more, self.samples = ((self.number,) if self.number >= 0 else ()), list[Any]()
        end = self.way.sender if more else self.way.receiver
        self.end = self.enter_context(end(self.link, self.workload, *more))

    def send(self, body: bytes, number: int) -> None:
        self.end.send(str(number), self.number, plainly(body))

    def receive(self) -> Any:
        while not self.samples:
            self.samples += self.end.receive(processes.STALL_S)
        return self.samples.pop(0)[-1]


class _TransferQueue(_Ray):
    needs: ClassVar[tuple[str, ...]] = ("ray", "transfer_queue")
    way: ClassVar[Any] = transfer_queue

    def open(self) -> None:
        address, self.keys = self.link
        self.queue = transfer_queue._attach(address)

    def send(self, body: bytes, number: int) -> None:
        tensor = load("torch").from_numpy
        fields = {name: tensor(each[None]) for name, each in plainly(body).items()}
        batch = load("tensordict").TensorDict(fields, batch_size=1)
        self.keys.put(self.queue.kv_batch_put([f"{number}/{self.number}"], "train", batch, [{}]))

    def receive(self) -> Arrays:
        meta = self.keys.get(timeout=processes.STALL_S)
        batch = self.queue.kv_batch_get_by_meta(meta)
        self.queue.kv_clear(meta.keys, "train")
        return {name: each[0].numpy() for name, each in batch.items()}


class _Shmbus(_Arm):
    @classmethod
    def made(cls, setup: Any) -> Any:
        samples = (setup.rounds + 2) * setup.workers
        return load("bench.loop_arms").bus(max(samples * setup.tokens * TOKEN_BYTES, 8 << 20))

    def open(self) -> None:
        options: Any = {"groups_per_batch": 1, "extra_fields": {"routed_experts": "token"}}
        is_worker = self.number >= 0
        kind = shmbus.Producer if is_worker else load("trainer_adapter").OnlineDataHandler
        self.end = self.enter_context(kind(self.link, **({} if is_worker else options)))

    def send(self, body: bytes, number: int) -> None:
        sample: Any = {"group_size": self.setup.workers, "index": self.number}
        reserve = functools.partial(self.end.reserve, str(number), **sample)
        slots = decode_answers(body, lambda _, fields: reserve(fields=fields), experts=EXPERTS)
        slots[0][0].commit()

    def next(self) -> dict[str, Any]:
        batch = self.end.next_batch()
        self.end.ack(batch)
        return {"tokens": batch.tokens, **batch.extra}


ARMS: Final[dict[str, type[_Arm]]] = {
    "files": _Files, "zmq": _Zmq, "mmap": _Mmap, "transfer-queue": _TransferQueue, "ray": _Ray,
    "shmbus": _Shmbus,
}  # fmt: skip


def working(start: Any, arm: str, link: Any, setup: Any, number: int, port: int) -> Any:
    """Ask, decode and send; return processor seconds, and what the event loop was late."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    async def work(end: _Arm) -> float:
        async with load("aiohttp").ClientSession(read_bufsize=1 << 22) as client:
            for count in range(setup.rounds + 1):
                async with client.post(f"http://127.0.0.1:{port}/v1/completions") as answer:
                    end.send(await answer.read(), count)
                if count == 0:
                    start()
                    ticker, began = asyncio.create_task(tick()), time.process_time()
            ticker.cancel()
            return time.process_time() - began

    with ARMS.get(arm, _Arm)(link, setup, number) as end:
        return asyncio.run(work(end)), late


def packing(start: Any, arm: str, link: Any, setup: Any, between: Any) -> Any:
    """Pack every round; return processor seconds, with those of what lies between."""
    with ARMS[arm](link, setup, -1) as end:
        end.next()
        start()
        before = time.process_time() + sum(map(processor_s, between))
        for _ in range(setup.rounds):
            batch = end.next()
        spent = time.process_time() + sum(map(processor_s, between)) - before
    known = (batch["tokens"] % 128 == batch["routed_experts"][:, 0, 0]).view(-1, setup.tokens)
    if len(known) != setup.workers or not known[:, :-1].all():
        raise MeasurementError(f"{arm}: a batch has experts of other tokens")
    return spent, []


def run(arm: str, setup: Any, port: int) -> dict[str, float]:
    """Move all samples, and return processor seconds of one, and the loops' latency."""
    way = ARMS.get(arm, _Arm)
    with way.made(setup) as link:
        between = descendants(os.getpid()) if issubclass(way, _Ray) else []
        roles = [Role(working, (arm, link, setup, n, port)) for n in range(setup.workers)]
        roles += [Role(packing, (arm, link, setup, between))] if arm != BODIES else []
        told = processes.run_together(roles)
    late = sorted(itertools.chain.from_iterable(each for _, each in told)) or [0.0]
    total_s = sum(used for used, _ in told) / (setup.workers * setup.rounds)
    p50_s, p99_s = late[len(late) // 2], late[int(0.99 * len(late))]
    return {"total_s": total_s, "p50_s": p50_s, "p99_s": p99_s}


def measure(options: Any) -> list[Row]:
    """Run the ways by turns; each row stands beside the best of the others."""
    setup = QUICK if options.tiny else FULL
    if options.tiny:
        processes.use_template("aiohttp", "shmbus.decode", "trainer_adapter")
    room = 3 * setup.workers * setup.rounds * setup.tokens * TOKEN_BYTES
    lacks = {}
    for arm in options.arms:
        if why := machine.lacks(shm_bytes=room, modules=("aiohttp", "torch", *ARMS[arm].needs)):
            lacks[arm] = skipped(f"megabytes-{arm}", arm, why)
    arms, found = [arm for arm in options.arms if arm not in lacks], dict[str, Any]()
    with socket.create_server(("127.0.0.1", 0)) as there, contextlib.ExitStack() as stack:
        stack.callback(Started(Role(serving, (setup, there))).end)
        turns = options.repetitions or (1 if options.tiny else 3)
        for arm in [BODIES, *arms] * (turns if arms else 0):
            if arm in lacks:
                continue
            try:
                found.setdefault(arm, []).append(run(arm, setup, there.getsockname()[1]))
            except (MeasurementError, shmbus.ShmbusError, OSError, RuntimeError) as error:
                # The others are worth something without it.
                lacks[arm] = skipped(f"megabytes-{arm}", arm, f"it failed: {error}")
                del found[arm]
                continue
            print(f"{arm}: {found[arm][-1]}", flush=True)
    if BODIES in lacks:
        return [*lacks.values()]
    read, of, rows = [each["total_s"] for each in found.pop(BODIES, ())], {}, [*lacks.values()]
    for arm, runs in found.items():
        pairs = zip(runs, read, strict=True)
        of[arm] = tuple(1e3 * max(1e-6, each["total_s"] - alone) for each, alone in pairs)
    for arm, runs in found.items():
        beside = min(of.keys() - {arm}, key=lambda each: statistics.median(of[each]), default="")
        p50, p99 = (1e3 * statistics.median(each[p] for each in runs) for p in ("p50_s", "p99_s"))
        rows.append(Row(
            name=f"megabytes-{arm}", title=f"{arm}, processor time of a sample", unit="ms",
            values=of[arm], beside=beside, beside_values=of.get(beside, ()),
            note=f"event loops late by {p50:.3g} ms, p99 {p99:.3g} ms",
            figures={"runs": runs, "bodies_s": read},
        ))  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = program.parser_of("megabytes", __doc__)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--quick", dest="tiny", action="store_true", help="the same as --tiny")
    return program.run("megabytes", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
