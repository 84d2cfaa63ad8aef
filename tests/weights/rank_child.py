"""Ranks of trainers or inference servers with a sharded model, as test_ranks starts them.

usage: python -m rank_child DIRECTORY ROLE:BUS:WORLD:LAYOUT[:CARRIER[:DEVICE]]...
"""

import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from weight_models import bits

from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

VERSIONS = (1, 2, 3)
#: In the directory, after a test's read of the publication.
READ = "read"


def say(line: str) -> None:
    """Print a line by a single write: ranks share their output, and print would write twice."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def whole_model() -> torch.nn.Sequential:
    """The same on every rank: sizes indivisible by any number of ranks."""
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(13, 30), torch.nn.Linear(30, 7), torch.nn.LayerNorm(7)
    ).to(torch.float32)


def own_part(value: torch.Tensor, mesh: DeviceMesh, placed: Placement) -> torch.Tensor:
    """Return this rank's part of a wholly known tensor."""
    if not isinstance(placed, Shard):
        return value
    chunks = value.chunk(mesh.size(), placed.dim)
    at = mesh.get_local_rank()
    return chunks[at] if at < len(chunks) else value.narrow(placed.dim, 0, 0)


def sharded(layout: str, world: int, device: str = "cpu") -> torch.nn.Sequential:
    model = whole_model().to(device)
    if layout == "replicated" or world == 1:
        return model
    mesh = init_device_mesh(device, (world,))
    if layout == "fsdp":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = 1 if layout == "columns" and parameter.dim() > 1 else 0
            placed = Replicate() if parameter.dim() == 1 and layout == "columns" else Shard(dim)
            part = own_part(parameter.detach(), mesh, placed).clone()
            shape, stride = parameter.shape, parameter.stride()
            made = DTensor.from_local(part, mesh, [placed], shape=shape, stride=stride)
            module.register_parameter(name, torch.nn.Parameter(made))
    return model


def step(model: torch.nn.Module, version: int) -> None:
    """Set a version's parameters, known without any communication."""
    fresh = whole_model().state_dict()
    with torch.no_grad():
        for name, parameter in model.state_dict(keep_vars=True).items():
            value = fresh[name] + version
            if isinstance(parameter, DTensor):
                (placed,) = parameter.placements
                parameter.to_local().copy_(own_part(value, parameter.device_mesh, placed))
            else:
                parameter.copy_(value)


def publish(
    bus: str, rank: int, world: int, layout: str, carrier: Any, device: str, directory: Path
) -> None:
    model = sharded(layout, world, device)
    source = ModuleSource(model, dtype=torch.bfloat16)
    options: Any = {"keep": True} if carrier == "shm" else {}
    if carrier not in ("shm", "memfd"):
        options["device"] = f"cuda:{torch.cuda.current_device()}"
    with WeightPublisher(
        bus, source, carrier=carrier, rank=rank, world_size=world, timeout=30, **options
    ) as publisher:
        for version in VERSIONS:
            step(model, version)
            publisher.publish(version=version)
        say(f"rank {rank} of {world}: published {bus}")
        if carrier != "shm":
            wait_for(directory / READ)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.01)


def read(bus: str, rank: int, world: int, layout: str) -> None:
    model = sharded(layout, world).to(torch.bfloat16) if world == 1 else sharded(layout, world)
    with WeightSubscriber(bus) as subscriber, subscriber.latest(timeout=20) as weights:
        weights.load_into(model, cast=True)
        assert weights.version == VERSIONS[-1]
    wanted = sharded(layout, world)
    step(wanted, VERSIONS[-1])
    for name, value in model.state_dict().items():
        expected = wanted.state_dict()[name]
        if isinstance(value, DTensor):
            value, expected = value.to_local(), expected.to_local()
        assert bits(value.bfloat16()) == bits(expected.bfloat16()), name
    say(f"rank {rank} of {world}: read {bus}")


def run_rank(role: str, bus: str, rank: int, world: int, how: list[str], rendezvous: Path) -> None:
    layout, carrier, device = [*how, *("shm", "cpu")[len(how) - 1 :]]
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if world > 1 and layout != "replicated":
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
        )
    if role == "publish":
        publish(bus, rank, world, layout, carrier, device, rendezvous.parent)
    else:
        read(bus, rank, world, layout)
    if dist.is_initialized():
        dist.destroy_process_group()


def fork_rank(*arguments: Any) -> int:
    """Run a rank as a fork with torch loaded; return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run_rank(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # Without Python's teardown: a mesh keeps gloo's threads past destroy_process_group, and a
        # thread with a tensor in hand would abort the process (pytorch/pytorch#179291).
        os._exit(status)


def main() -> None:
    """Run the ranks of each task in turn; the exit status reports success."""
    directory, *tasks = sys.argv[1:]
    torch.set_num_threads(1)
    if not any("cuda" in task for task in tasks):
        # Otherwise each rank's first operation on a DTensor imports it; CUDA may not survive the
        # fork of a process with the import.
        importlib.import_module("torch._dynamo")
    for number, task in enumerate(tasks):
        role, bus, world, *how = task.split(":")
        rendezvous = Path(directory, f"task-{number}")
        ranks = [
            fork_rank(role, bus, rank, int(world), how, rendezvous) for rank in range(int(world))
        ]
        statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
        if any(statuses):
            sys.exit(f"{task}: the ranks ended with {statuses}")


if __name__ == "__main__":
    main()
