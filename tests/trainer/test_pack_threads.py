"""`pack_threads=`: several threads make the batch of a single thread."""

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Spawner, together
from numpy_batches import assert_batch, put, sample

from shmbus import Bus, Consumer, Producer
from trainer_adapter import pack
from trainer_adapter._arguments import checked_pack_threads
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.pack import HostPacker

#: More tokens than a piece of a copy, with a rest: cuts a sequence, with odd ends.
LONG = 3 * 4096 + 5


def wide_sample(rng: np.random.Generator, length: int, **more: Any) -> dict[str, Any]:
    return sample(
        rng,
        length,
        ref=rng.random((length, 3), np.float32),
        image=rng.integers(0, 255, (int(rng.integers(0, 9)), 7), np.uint8),
        one=rng.random(5),
        meta={"finish_reason": "length" if rng.random() < 0.3 else "stop"},
        **more,
    )


def put_wide(producer: Producer, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = [LONG, 0, 1, 4095, 4096, 4097, 2 * 4096, 17]
    groups = {
        f"k{n}": [wide_sample(rng, length) for length in rng.permutation(lengths)] for n in range(3)
    }
    for key, group in groups.items():
        put(producer, key, group)
    return groups


EXTRA: dict[str, Any] = {"ref": "token", "image": "ragged", "one": "sequence"}


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_make_the_same_bits(bus: Bus, producer: Producer, seed: int, threads: int) -> None:
    put_wide(producer, seed)
    with Consumer(bus.name) as consumer:
        groups = consumer.take(8, 10)
        for options in (
            {},
            {"extra_fields": EXTRA},
            {"truncated": "mask", "advantages": "batch"},
            {"layout": "padded"},
        ):
            one = pack(groups, **options).asdict()
            packer = HostPacker(**options, pack_threads=threads, memory=BatchMemory())
            for _ in range(5):
                several = packer.pack(groups).asdict()
                assert several.keys() == one.keys()
                for name, value in one.items():
                    assert same(several[name], value), name


def same(mine: Any, right: Any) -> bool:
    if isinstance(right, torch.Tensor):
        return mine.dtype == right.dtype and torch.equal(mine, right)
    if isinstance(right, dict):
        return mine.keys() == right.keys() and all(same(mine[k], right[k]) for k in right)
    return bool(mine == right)


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u8", "f8"])
def test_width_decides_where_a_cut_is(bus: Bus, producer: Producer, seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    groups = {
        "a": [
            {
                "tokens": rng.integers(0, 99, LONG).astype(dtype if dtype[0] != "f" else "i8"),
                "loss_mask": rng.integers(0, 2, LONG).astype(dtype),
                "logprobs": -rng.random(LONG),
                "advantages": rng.random(LONG),
                "score": 0.0,
            }
            for _ in range(3)
        ]
    }
    put(producer, "a", groups["a"])
    with Consumer(bus.name) as consumer:
        assert_batch(pack(consumer.take(1, 10), pack_threads=3), groups)


def spoiled(rng: np.random.Generator, how: str) -> dict[str, Any]:
    one = sample(rng, LONG)
    if how == "nan":
        one["logprobs"][-1] = np.nan
        one["loss_mask"][-1] = 1
    elif how == "length":
        one["logprobs"] = one["logprobs"][:-1]
    elif how == "lacks":
        del one["loss_mask"]
    else:
        one["tokens"] = one["tokens"].astype(np.float32)
    return one


@pytest.mark.parametrize("how", ["nan", "length", "lacks", "dtype"])
def test_threads_refuse_malformed_ones(bus: Bus, producer: Producer, seed: int, how: str) -> None:
    rng = np.random.default_rng(seed)
    put(producer, "good", [sample(rng, LONG) for _ in range(2)])
    put(producer, "bad", [sample(rng, 3), spoiled(rng, how)])
    with Consumer(bus.name) as consumer:
        groups = consumer.take(2, 10)
        refusals = []
        for threads in (1, 3):
            with pytest.raises((TypeError, ValueError)) as refusal:
                pack(groups, pack_threads=threads)
            refusals.append((refusal.type, str(refusal.value)))
        assert refusals[0] == refusals[1]
        good = [group for group in groups if group.instance_id == "good"]
        assert pack(good, pack_threads=3).num_sequences == 2


def test_a_batch_comes_though_threads_cannot_start(bus: Bus, spawn: Spawner) -> None:
    assert spawn.script(NO_ROOM, bus.name).finish().splitlines() == ["18000"]


NO_ROOM = """
import resource, sys
import numpy as np
from shmbus import Consumer, Producer
from trainer_adapter.batches.pack import HostPacker
with Producer(sys.argv[1]) as producer, Consumer(sys.argv[1]) as consumer:
    for index in range(2):
        producer.put("a", group_size=2, index=index, tokens=np.arange(9000, dtype=np.int32))
    groups = consumer.take(1, 10)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    # Room for a few stacks of threads, and not for 63.
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    print(HostPacker(pack_threads=64).pack(groups).num_tokens, flush=True)
"""


def test_a_packer_serves_two_threads(bus: Bus, producer: Producer, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for key, group in {key: [sample(rng, LONG) for _ in range(4)] for key in "ab"}.items():
        put(producer, key, group)
    with Consumer(bus.name) as consumer:
        taken = consumer.take(2, 10)
        want = {group.instance_id: pack([group]) for group in taken}
        for _ in range(10):
            packer, wrong = HostPacker(pack_threads=3), []

            def work(group: Any, packer: HostPacker = packer, wrong: list[Any] = wrong) -> None:
                for _ in range(20):
                    batch = packer.pack([group])
                    if not torch.equal(batch.logprobs, want[group.instance_id].logprobs):
                        wrong.append(group.instance_id)

            together(work, taken)
            assert wrong == []


FORKING = """
import os, sys
import numpy as np
from shmbus import Consumer, Producer
from trainer_adapter.batches.pack import HostPacker
with Producer(sys.argv[1]) as producer, Consumer(sys.argv[1]) as consumer:
    for index in range(2):
        producer.put("a", group_size=2, index=index, score=index,
                     tokens=np.arange(20_000, dtype=np.int32))
    groups = consumer.take(1, 10)
    packer = HostPacker(pack_threads=3)
    whole = packer.pack(groups).tokens.sum().item()
    child = os.fork()
    if child == 0:
        # The ring refuses a pack in the child, which waits for no thread of the parent.
        try:
            packer.pack(groups)
        except Exception as error:
            print(type(error).__name__, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert packer.pack(groups).tokens.sum().item() == whole
    print("packed", flush=True)
"""


def test_a_fork_has_no_threads_and_waits_for_none(bus: Bus, spawn: Spawner) -> None:
    assert spawn.script(FORKING, bus.name).finish().splitlines() == ["BusClosedError", "packed"]


INTERRUPTED = """
import signal
import sys
import shmbus
from trainer_adapter import OnlineDataHandler
handler = OnlineDataHandler(sys.argv[1], groups_per_batch=1, pack_threads=3)
got, interrupts, batch, inside = {}, 0, None, False

def interrupt(*_):
    # Once a turn, and never between two: that would end the loop, not a step of it.
    global inside
    if inside:
        inside = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
print("waiting", flush=True)
while True:
    try:
        inside = True
        while len(got) < 100 or batch is not None:
            if batch is None:
                batch = handler.next_batch(20)
            assert batch.tokens[:5].tolist() == [0, 1, 2, 3, 4]
            assert batch.tokens.sum().item() == 2 * sum(range(20_000))
            got[batch.instance_ids[0]] = True
            try:
                handler.ack(batch)
            except shmbus.ProtocolError:
                assert batch.groups[0].state == "acknowledged"
            batch = None
        inside = False
        break
    except KeyboardInterrupt:
        interrupts += 1
print("end", interrupts > 0, list(got) == [f"k{n}" for n in range(100)], flush=True)
handler.close()
"""


def test_ctrl_c_meets_the_packing_thread(bus: Bus, producer: Producer, spawn: Spawner) -> None:
    child = spawn.script(INTERRUPTED, bus.name, until="waiting")
    tokens = np.arange(20_000, dtype=np.int32)
    for number in range(100):
        for index in range(2):
            producer.put(f"k{number}", group_size=2, index=index, timeout=20, tokens=tokens)
        if number % 5 == 0 and number < 90:
            child.send_signal(signal.SIGINT)
    assert child.finish().splitlines()[-1] == "end True True"


def test_by_default_a_rank_has_a_quarter_of_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(processors: int, ranks: int) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
        return checked_pack_threads(None, ranks)

    assert [usual(n, 1) for n in (1, 2, 4, 7, 8, 16, 64)] == [1, 1, 1, 1, 2, 4, 4]
    assert [usual(n, 8) for n in (16, 64, 128)] == [1, 2, 4]
