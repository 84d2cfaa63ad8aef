"""The arms of `bench.loop`: how samples go to the trainer, and weights to the generator.

- *alternating*: one process generates and trains by turns, with all cores.
- *queue*: dicts of arrays, pickled, through `multiprocessing.Queue`; weights through tensors that
  torch.multiprocessing shares, under a lock.
- *rest*: the API server of Atropos, JSON over HTTP; weights as *queue* has them.
- *files*: a batch whole, by msgspec, as a file on tmpfs, which is renamed; weights by safetensors:
  prime-rl's way, but looked for every 2 ms.
- *shmbus*: the bus, `OnlineDataHandler` with a batch ahead, `WeightPublisher`.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

import shmbus
from bench.contenders import atropos
from bench.loop_policy import PAYLOADS, Sample, Setup
from bench.machine import SHM
from bench.processes import context
from shmbus.cli import main as shmbus_main
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler, group_advantages
from trainer_adapter.batches.batch import Batch

__all__ = ["ARMS", "ATROPOS", "POLL_S", "PREFIX", "bus"]

POLL_S: Final = 0.002
#: Of the environment that has the server of Atropos, and what that calls a sample's fields.
ATROPOS: Final = Path(__file__).parents[1] / ".venv-contenders/atropos/bin/python"
_COLUMNS: Final = {"tokens": "tokens", "masks": "loss_mask", "inference_logprobs": "logprobs"}
_DTYPES: Final = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
#: Of all that a run makes in /dev/shm.
PREFIX: Final = f"bench-loop-{os.getpid()}-"


class _Arm(contextlib.ExitStack):
    """An arm of one process, which has both ends; of the others each end has its methods.

    The generator calls `send` for a sample, `sent` after the last of a batch, `newest` for the
    version that it can have, -1 for none, and `load` for that one. The trainer calls `next` for a
    packed batch, whose samples are `collected`, `publish`, and `done` for a batch. A wait has no
    end: the program ends who waits too long. `made` gives what is between the ends.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    #: Batches, and versions of the weights, that may lie in /dev/shm at once.
    room: ClassVar[tuple[int, int]] = (0, 0)
    version = -1

    def __init__(self, link: Any, setup: Setup, policy: Any, role: str) -> None:
        super().__init__()
        self.link, self.setup, self.policy = link, setup, policy
        self.weights = {name: value.data for name, value in policy.named_parameters()}
        self.samples: list[Any] = []
        self.open(role)

    @classmethod
    @contextmanager
    def made(cls, setup: Setup) -> Iterator[Any]:
        yield None

    def open(self, role: str) -> None: ...
    def sent(self, batch: int) -> None: ...
    def load(self) -> None: ...
    def done(self, batch: Batch) -> None: ...

    def send(self, sample: Sample) -> None:
        self.samples.append(sample)

    def newest(self) -> int:
        return self.version

    def collected(self, batch: int) -> list[Sample]:
        samples, self.samples = self.samples, []
        return samples

    def next(self, batch: int) -> Batch:
        return packed(self.collected(batch), self.setup)

    def publish(self, version: int) -> None:
        self.version = version

    def copy(self, into: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
        for name, value in into.items():
            value.copy_(source[name])
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)


def packed(samples: list[Sample], setup: Setup) -> Batch:
    """Pack the samples of a batch as the handler does, for arms that have no handler."""
    samples = sorted(samples, key=lambda each: each[:2])
    kinds = {name: kind for name, (_, _, kind) in PAYLOADS[setup.payload].items()}

    def joined(name: str) -> torch.Tensor:
        join = np.stack if kinds.get(name) == "sequence" else np.concatenate
        return torch.from_numpy(join([each.fields[name] for each in samples]))

    lengths = torch.tensor([len(each.fields["tokens"]) for each in samples])
    scores = torch.tensor([each.score for each in samples])
    advantages = group_advantages(scores.view(-1, setup.work.group)).flatten().float()
    return Batch(
        tokens=joined("tokens").long(), loss_mask=joined("loss_mask").bool(),
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        max_seqlen=int(lengths.max()), logprobs=joined("logprobs"), scores=scores,
        advantages=advantages.repeat_interleave(lengths), groups=[], extra_kinds=kinds,
        instance_ids=[each.group_id for each in samples],
        policy_versions=torch.tensor([each.version for each in samples]),
        group_sizes=torch.full((setup.work.groups,), setup.work.group),
        extra={name: joined(name) for name in kinds},
    ).to(setup.trainer)  # fmt: skip


class _Queue(_Arm):
    room = (0, 1)

    @classmethod
    @contextmanager
    def made(cls, setup: Setup) -> Iterator[Any]:
        made = context()
        yield made.Queue(), made.Queue(), made.Lock(), made.Value("q", -1, lock=False)

    def open(self, role: str) -> None:
        self.queue, handles, self.lock, self.number = self.link
        self.queue.cancel_join_thread()  # what is under way at the end is of no use
        if role == "trainer":
            self.shared = {name: value.clone() for name, value in self.weights.items()}
            handles.put(self.shared)
        else:
            self.shared = handles.get()

    def send(self, sample: Sample) -> None:
        self.queue.put(sample._asdict())

    def newest(self) -> int:
        return int(self.number.value)

    def load(self) -> None:
        with self.lock:
            self.copy(self.weights, self.shared)
            self.version = self.newest()

    def collected(self, batch: int) -> list[Sample]:
        count = self.setup.work.groups * self.setup.work.group
        return [Sample(**self.queue.get()) for _ in range(count)]

    def publish(self, version: int) -> None:
        with self.lock:
            self.copy(self.shared, self.weights)
            self.number.value = version


class _Rest(_Queue):
    @classmethod
    @contextmanager
    def made(cls, setup: Setup) -> Iterator[Any]:
        size, longest = setup.work.groups * setup.work.group, setup.work.prompt + setup.work.longest
        with super().made(setup) as link, atropos.server(str(ATROPOS), size, longest) as port:
            yield *link, port

    def open(self, role: str) -> None:
        *self.link, port = self.link
        super().open(role)
        self.client, self.group = atropos.Client(port), list[Sample]()
        if role == "generator":
            about = {"max_token_length": 1 << 20, "desired_name": "bench", "weight": 1.0}
            about["group_size"] = self.setup.work.group
            self.env_id = self.client.post("/register-env", about)["env_id"]

    def send(self, sample: Sample) -> None:
        self.samples.append(sample)
        group = [each for each in self.samples if each.group_id == sample.group_id]
        if len(group) == self.setup.work.group:
            self.samples = [each for each in self.samples if each.group_id != sample.group_id]
            columns = {
                name: [each.fields[field].tolist() for each in group]
                for name, field in _COLUMNS.items()
            }
            more = {"name": sample.group_id, "about": [each[1:3] for each in group]}
            scores = [each.score for each in group]
            said = {**columns, "env_id": self.env_id, "scores": scores, "group_overrides": more}
            self.client.post("/scored_data", said)

    def collected(self, batch: int) -> list[Sample]:
        while not (groups := self.client.get("/batch")["batch"]):
            time.sleep(POLL_S)
        return [
            Sample(
                group["group_overrides"]["name"], member, version, group["scores"][row],
                {field: np.array(group[name][row], _DTYPES[field])
                 for name, field in _COLUMNS.items()},
            )
            for group in groups
            for row, (member, version) in enumerate(group["group_overrides"]["about"])
        ]  # fmt: skip


class _Files(_Arm):
    needs = ("msgspec", "safetensors")
    room = (3, 5)

    @classmethod
    @contextmanager
    def made(cls, setup: Setup) -> Iterator[Any]:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=SHM) as folder:
            yield folder

    def _path(self, kind: str, number: int) -> Path:
        return Path(self.link, f"{kind}-{number}")

    def send(self, sample: Sample) -> None:
        arrays = [(name, x.dtype.str, x.shape, x.data) for name, x in sample.fields.items()]
        self.samples.append((*sample[:-1], arrays))

    def sent(self, batch: int) -> None:
        import msgspec

        self._path("part", batch).write_bytes(msgspec.msgpack.encode(self.samples))
        self._path("part", batch).rename(self._path("batch", batch))
        self.samples = []

    def newest(self) -> int:
        found = self.version
        while self._path("weights", found + 1).exists():
            found += 1
        return found

    def load(self) -> None:
        from safetensors.torch import load_file

        self.version = self.newest()
        file = self._path("weights", self.version)
        self.copy(self.weights, load_file(file, device=str(self.policy.device)))

    def collected(self, batch: int) -> list[Sample]:
        import msgspec

        path, samples = self._path("batch", batch), []
        while not path.exists():
            time.sleep(POLL_S)
        for group, member, version, score, arrays in msgspec.msgpack.decode(path.read_bytes()):
            fields = {name: np.frombuffer(x, of).reshape(shape) for name, of, shape, x in arrays}
            samples.append(Sample(group, member, version, score, fields))
        path.unlink()
        return samples

    def publish(self, version: int) -> None:
        from safetensors.torch import save_file

        save_file(self.weights, self._path("new", version))
        self._path("new", version).rename(self._path("weights", version))
        self._path("weights", version - self.setup.lag - 3).unlink(missing_ok=True)


@contextmanager
def bus(capacity: int) -> Iterator[str]:
    """Make a bus, and remove it with the weights that go with it, whoever was killed."""
    name = f"{PREFIX}{secrets.token_hex(3)}"
    try:
        shmbus.Bus.create(name, capacity).close()
        yield name
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            shmbus_main(["rm", "--force", name])


class _Shmbus(_Arm):
    room = (4, 2)
    carrier = "shm"

    @classmethod
    @contextmanager
    def made(cls, setup: Setup) -> Iterator[Any]:
        with bus(max(setup.room(4, 0), 8 << 20)) as name:
            yield name

    def open(self, role: str) -> None:
        setup, source = self.setup, ModuleSource(self.policy)
        if role == "generator":
            self.producer = self.enter_context(shmbus.Producer(self.link))
            reader = WeightSubscriber(self.link, device=setup.generator)
            self.subscriber = self.enter_context(reader)
            return
        kinds: Any = {name: kind for name, (_, _, kind) in PAYLOADS[setup.payload].items()}
        handler = OnlineDataHandler(
            self.link, groups_per_batch=setup.work.groups, device=setup.trainer, prefetch=1,
            extra_fields=kinds,
        )  # fmt: skip
        self.handler = self.enter_context(handler)
        device = "cpu" if self.carrier == "shm" else setup.trainer
        writer = WeightPublisher(self.link, source, carrier=self.carrier, device=device)
        self.publisher = self.enter_context(writer)

    def send(self, sample: Sample) -> None:
        fields: Any = sample.fields
        self.producer.put(
            sample.group_id, group_size=self.setup.work.group, index=sample.member,
            score=sample.score, policy_version=sample.version, **fields,
        )  # fmt: skip

    def newest(self) -> int:
        return self.producer.policy_version

    def load(self) -> None:
        with self.subscriber.latest() as weights:
            weights.load_into(self.policy)
            self.version = weights.version

    def next(self, batch: int) -> Batch:
        return self.handler.next_batch()

    def publish(self, version: int) -> None:
        self.publisher.publish(version=version)
        self.handler.set_policy_version(version)

    def done(self, batch: Batch) -> None:
        self.handler.ack(batch)


class _ShmbusDevice(_Shmbus):
    room, carrier = (4, 0), "cuda_vmm"


ARMS: Final[dict[str, type[_Arm]]] = {
    "alternating": _Arm, "queue": _Queue, "rest": _Rest,
    "files": _Files, "shmbus": _Shmbus, "shmbus-device": _ShmbusDevice,
}  # fmt: skip
