"""A Ray cluster of three nodes on this machine, and the processor time of its processes by whom.

Invariant: processor time is that of whole processes, system calls and threads of Ray included.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
from ray.cluster_utils import Cluster

__all__ = ["SIDES", "Account", "cluster", "on_side", "pid_of"]

#: The nodes: one for each side of a hop. A third has Ray's own services.
SIDES: Final = ("left", "right")
STORE_BYTES: Final = 400 << 20
#: What Ray takes for processors of a node: as many as there are processes that ask for one.
PROCESSES: Final = 4
#: Of a resource that a node has 1 of.
A_LITTLE: Final = 0.001
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


@contextmanager
def cluster() -> Any:
    """Have a cluster for a while."""
    node = {"num_cpus": PROCESSES, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for name in SIDES:
        made.add_node(**node, resources={name: 1})
    ray.init(address=made.address, namespace="shmbus", log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def on_side(kind: type, side: str, *arguments: Any) -> Any:
    """Start an actor of this class on a side."""
    actor = ray.remote(kind).options(num_cpus=0, resources={side: A_LITTLE})
    return actor.remote(*arguments)


def pid_of(actor: Any) -> int:
    """Return the process of an actor that has a method `pid`."""
    return int(ray.get(actor.pid.remote()))


def _seconds(pid: int) -> float:
    """Return user and system time of a process; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _services(made: Any) -> dict[int, str]:
    """Return the processes of Ray's own that carry bytes or calls, by what they are."""
    found = {}
    for node, side in zip(made.list_all_nodes(), ("head", *SIDES), strict=True):
        for kind, processes in node.all_processes.items():
            for info in processes:
                found[info.process.pid] = f"{side} {kind}"
    return found


class Account:
    """Processor seconds a gigabyte, by whom.

    Parameters
    ----------
    made : Cluster
        Whose services count.
    workers : dict of int to str
        Other processes, by what they are.
    """

    def __init__(self, made: Any, workers: dict[int, str]) -> None:
        self._names = {**_services(made), **workers}

    def over(self, nbytes: int, work: Callable[[], T]) -> tuple[T, dict[str, float]]:
        """Do work that moves so many bytes; return what it returns, and seconds a GB by whom."""
        before = {pid: _seconds(pid) for pid in self._names}
        said = work()
        spent: dict[str, float] = {}
        for pid, name in self._names.items():
            took = max(0.0, _seconds(pid) - before[pid]) / nbytes * 1e9
            if took >= 0.005:
                spent[name] = round(spent.get(name, 0.0) + took, 3)
        return said, {"all": round(sum(spent.values()), 3), **spent}
