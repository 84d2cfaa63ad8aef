"""One copy of a model for trainer and server: views, the guard of a step, and who dies in it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import together
from fork_server import TEMPLATE
from weight_models import fill

from shmbus import BusBusyError, BusClosedError, DamagedError, WaitTimeoutError
from shmbus.inspect.leftovers import survey
from shmbus.weights import ManifestError, Slice, WeightsError, attach_model, share_model
from shmbus.weights.shared_model import SharedModel
from shmbus.weights.single_copy import path_of, shared_state


class Tiny(torch.nn.Module):
    """A fused qkv, tied embeddings, a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.qkv_proj = torch.nn.Linear(8, 16, bias=False)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


class Split(torch.nn.Module):
    """The same in a checkpoint's names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.q_proj = torch.nn.Linear(8, 8, bias=False)
        self.k_proj = torch.nn.Linear(8, 4, bias=False)
        self.v_proj = torch.nn.Linear(8, 4, bias=False)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


SLICES = {
    "q_proj.weight": Slice("qkv_proj.weight", 0, 0, 8),
    "k_proj.weight": Slice("qkv_proj.weight", 0, 8, 4),
    "v_proj.weight": Slice("qkv_proj.weight", 0, 12, 4),
}


def start(target: Callable[..., None], *given: object) -> tuple[Any, Any]:
    """Start a process that has one end of a pipe; return it and the other end."""
    ours, theirs = TEMPLATE.Pipe()
    process = TEMPLATE.Process(target=target, args=(*given, theirs))
    process.start()
    return process, ours


@pytest.fixture
def trained(bus_name: str) -> Iterator[tuple[Tiny, SharedModel]]:
    model = Tiny()
    fill(model, 1)
    with share_model(bus_name, model, slices=SLICES, version=1) as shared:
        yield model, shared


def test_a_server_sees_the_trainers_own(bus_name: str, trained: tuple[Tiny, SharedModel]) -> None:
    model, shared = trained
    with torch.device("meta"):
        shell = Split()
    shell.steps = torch.zeros(1, dtype=torch.int64)
    with attach_model(bus_name, shell) as seen, seen.reading() as version:
        assert version == 1
        assert all((tensor == 1).all() for tensor in shell.state_dict().values())
    with shared.stepping(2):
        fill(model, 2)
    assert all((tensor == 2).all() for tensor in shell.state_dict().values())
    assert shell.k_proj.weight.shape == (4, 8) and seen.version == 2


def test_an_optimizer_goes_on_with_the_parameters_that_it_has(bus_name: str) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fill(model, 1)
    server = Tiny()
    with share_model(bus_name, model) as shared, attach_model(bus_name, server):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with shared.stepping(0):
            optimizer.step()
        assert (server.head.weight == 0).all() and (server.qkv_proj.weight == 0).all()
        assert model.head.weight is model.embed.weight
        assert not server.head.weight.requires_grad


def test_a_misfit_attaches_nothing(bus_name: str, trained: tuple[Tiny, SharedModel]) -> None:
    with torch.device("meta"):
        shell = Split()
    shell.embed = torch.nn.Embedding(11, 8)
    shell.q_proj = shell.q_proj.to(torch.bfloat16)
    shell.more = torch.nn.Parameter(torch.zeros(1))
    shell.register_buffer("inv_freq", torch.zeros(4, device="meta"), persistent=False)
    before = shell.embed.weight
    with pytest.raises(ManifestError, match="was not changed") as caught:
        attach_model(bus_name, shell)
    text = " ".join(caught.value.faults)
    for part in ("missing: 'more'", "'embed.weight': ", "'q_proj.weight': ", "'inv_freq'"):
        assert part in text
    assert shell.embed.weight is before and shell.k_proj.weight.is_meta


def test_steps_and_readers_take_turns(bus_name: str, trained: tuple[Tiny, SharedModel]) -> None:
    model, shared = trained
    server = Tiny()
    with attach_model(bus_name, server) as seen:
        with (
            seen.reading(),
            pytest.raises(WaitTimeoutError, match="a reader has not left"),
            shared.stepping(2, timeout=0.05),
        ):
            raise AssertionError("stepped beside a reader")
        with (
            shared.stepping(2),
            pytest.raises(WaitTimeoutError, match="has not ended"),
            seen.reading(timeout=0.05),
        ):
            raise AssertionError("read in a step")
        with seen.reading(), shared.stepping(3, guard="none"):
            fill(model, 3)
        with seen.reading() as version:
            assert version == 3
        with pytest.raises(WeightsError, match="only reads"), seen.stepping(4):
            pass


def generate(bus: str, threads: int, seconds: float, result: Any) -> None:
    """Read in many threads; each pass has to meet a single version."""
    torch.set_num_threads(1)
    model = Tiny()
    found: list[set[float]] = []

    def run(seen: SharedModel) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with seen.reading() as version:
                values = {float(v) for t in model.state_dict().values() for v in t.unique()}
                found.append(values | {float(version)})

    with attach_model(bus, model) as seen:
        together(run, [seen] * threads)
    result.send((len(found), sum(len(values) != 1 for values in found)))


def test_passes_meet_one_version_and_starve_no_step(trained: tuple[Tiny, SharedModel]) -> None:
    model, shared = trained
    started = [start(generate, shared.bus, 2, 1.0) for _ in range(2)]
    version = 1
    while any(process.is_alive() for process, _ in started):
        version += 1
        with shared.stepping(version, timeout=30):
            fill(model, version)
        time.sleep(0.001)
    answers = [pipe.recv() for _, pipe in started]
    assert all(passes > 10 and torn == 0 for passes, torn in answers), answers
    assert version > 10


def die_in_a_step(bus: str) -> None:
    model = Tiny()
    fill(model, 1)
    with share_model(bus, model, version=1) as shared, shared.stepping(2):
        model.embed.weight.data.fill_(2)
        os.kill(os.getpid(), signal.SIGKILL)


def read_and_wait(bus: str, ready: Any) -> None:
    with attach_model(bus, Tiny()) as seen, seen.reading():
        ready.send(True)
        signal.pause()


def test_a_trainer_that_died_in_a_step_leaves_an_error_and_no_mix(bus_name: str) -> None:
    process = TEMPLATE.Process(target=die_in_a_step, args=(bus_name,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert shared_state(bus_name) == (1, True)
    with attach_model(bus_name, Tiny()) as seen:
        with pytest.raises(DamagedError, match="a mix of version 1"), seen.reading():
            pass
        with pytest.raises(BusBusyError, match="a living process"):
            share_model(bus_name, Tiny())
    assert "removable" in [each.verdict for each in survey() if each.name == bus_name]
    # The next trainer continues with a server's copy, or shares a new one.
    server, successor = Tiny(), Tiny()
    with (
        attach_model(bus_name, server) as seen,
        attach_model(bus_name, successor, writable=True) as shared,
    ):
        with pytest.raises(BusBusyError, match="lives"):
            attach_model(bus_name, Tiny(), writable=True)
        with shared.stepping(5, heal=True):
            fill(successor, 5)
        with seen.reading() as version:
            assert version == 5 and (server.embed.weight == 5).all()
        assert successor.embed.weight.requires_grad
    with share_model(bus_name, Tiny(), version=1) as shared, shared.reading() as version:
        assert version == 1 and not shared.torn


def test_a_failed_step_is_torn_until_a_whole_load(trained: tuple[Tiny, SharedModel]) -> None:
    model, shared = trained
    with pytest.raises(RuntimeError, match="optimizer"), shared.stepping(2):
        raise RuntimeError("the optimizer failed")
    with pytest.raises(DamagedError), shared.reading():
        pass
    with pytest.raises(DamagedError, match="heal=True"), shared.stepping(2):
        pass
    with shared.stepping(1, heal=True):
        fill(model, 1)
    with shared.reading() as version:
        assert version == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_only_a_stopped_reader_blocks(number: int, trained: tuple[Tiny, SharedModel]) -> None:
    _, shared = trained
    process, pipe = start(read_and_wait, shared.bus)
    assert pipe.poll(60)
    os.kill(process.pid, number)
    if number == signal.SIGSTOP:
        with pytest.raises(WaitTimeoutError), shared.stepping(2, timeout=0.1):
            pass
        assert not shared.torn
        process.kill()
    with shared.stepping(2, timeout=30):
        pass
    process.join()
    assert shared.version == 2


def test_a_file_that_is_none_is_not_mapped(bus_name: str) -> None:
    path = Path(f"/dev/shm/shmbus-shared.{bus_name}")
    try:
        for content in (b"", b"something else entirely, and long enough to be a header ......"):
            path.write_bytes(content)
            with pytest.raises(WeightsError, match="nothing was mapped"):
                attach_model(bus_name, Tiny())
        path.unlink()
        with share_model(bus_name, Tiny()):
            whole = path.read_bytes()
        path.write_bytes(whole[:5000])
        with pytest.raises(WeightsError, match="nothing was mapped"):
            attach_model(bus_name, Tiny())
        path.unlink()
        with pytest.raises(WaitTimeoutError, match="call share"):
            attach_model(bus_name, Tiny(), timeout=0)
    finally:
        path.unlink(missing_ok=True)


def test_a_parameter_that_was_replaced_is_not_stepped_for_nobody(bus_name: str) -> None:
    model, replica = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    with share_model(bus_name, model) as shared, attach_model(bus_name, replica) as server:
        mine = model.weight
        model.weight = torch.nn.Parameter(torch.zeros(3, 4))
        with pytest.raises(WeightsError, match="'weight' of the model"), shared.stepping(version=1):
            raise AssertionError("it was begun")
        model.weight = mine
        with shared.stepping(version=1):
            mine.data.fill_(7.0)
        with server.reading(timeout=20.0) as version:
            assert version == 1 and bool((replica.weight == 7.0).all())


def test_a_closed_copy_says_so(bus_name: str) -> None:
    shared = share_model(bus_name, torch.nn.Linear(4, 3))
    server = attach_model(bus_name, torch.nn.Linear(4, 3))
    server.close()
    shared.close()
    with pytest.raises(BusClosedError, match="are closed"), server.reading():
        pass
    with pytest.raises(BusClosedError, match="are closed"), shared.stepping(version=1):
        pass


PARTS = 4


#: Elements of a part: copying all of them takes longer than to look for the file twice.
ELEMENTS = 4 << 20


def model_of(value: float) -> torch.nn.Module:
    parts = [torch.full((ELEMENTS,), value) for _ in range(PARTS)]
    return torch.nn.ParameterList(torch.nn.Parameter(part) for part in parts)


def read_at_once(bus: str, pipe: Any) -> None:
    model = model_of(0.0)
    pipe.send("looks")
    with attach_model(bus, model, timeout=60) as shared, shared.reading() as version:
        pipe.send((version, [float(part[-1].detach()) for part in model]))


def share_one(bus: str, pipe: Any) -> None:
    model = model_of(1.0)
    pipe.send("begins")
    share_model(bus, model, version=1)
    pipe.send("has shared")
    signal.pause()


def test_a_server_that_waits_for_a_model_gets_all_of_it(bus_name: str) -> None:
    server, pipe = start(read_at_once, bus_name)
    model = model_of(1.0)
    assert pipe.recv() == "looks"
    with share_model(bus_name, model, version=1):
        assert pipe.recv() == (1, [1.0] * PARTS)
        server.join()


def test_a_trainer_killed_while_sharing_leaves_all_or_nothing(bus_name: str, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8 if "SHMBUS_TEST_LONG" in os.environ else 4):
        trainer, pipe = start(share_one, bus_name)
        assert pipe.recv() == "begins"
        time.sleep(chance.uniform(0, 0.1))
        trainer.kill()
        trainer.join()
        if os.path.exists(path_of(bus_name)):
            model = model_of(0.0)
            with attach_model(bus_name, model) as shared, shared.reading() as version:
                assert version == 1
                assert all(bool((part == 1).all()) for part in model)
        assert all(each.verdict == "removable" for each in survey() if each.name == bus_name)
        share_model(bus_name, torch.nn.Linear(2, 2), version=0).close()  # over the remains
