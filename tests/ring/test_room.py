"""Limits on new shared memory: cgroups of both versions at each level, and words of a refusal."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Spawner

from shmbus import Bus, CapacityError, unlink
from shmbus.channel import ChannelSender
from shmbus.pool import PoolSpec, create_pool
from shmbus.segment import room
from shmbus.segment.names import shm_path

MIB = 1 << 20
V2 = "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
STAT = "anon 5\ninactive_file 3\nactive_file 4\nslab_reclaimable 1\nbroken\n"


def v2(folder: str, limit: str, used: str = "100", **more: str) -> dict[str, str]:
    files = {"memory.max": limit, "memory.current": used, **more}
    return {f"sys/fs/cgroup{folder}/{name}": text for name, text in files.items()}


def v1(folder: str, limit: str, used: str = "100") -> dict[str, str]:
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
    return {f"sys/fs/cgroup/memory{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("own", "mounts", "files", "left"),
    [
        ("0::/a/b\n", V2, v2("/a/b", "max") | v2("/a", "max"), {}),
        ("0::/a/b\n", V2, v2("/a/b", "1000\n"), {"/a/b": (900, 1000)}),
        (
            "0::/a/b\n",
            V2,
            v2("/a/b", "1000") | v2("/a", "300") | v2("", "5000"),
            {
                "/a/b": (900, 1000),
                "/a": (200, 300),
                "": (4900, 5000),
            },
        ),
        # The page cache goes before a process does, and never makes more than the limit.
        ("0::/\n", V2, v2("", "1000", "1000", **{"memory.stat": STAT}), {"": (8, 1000)}),
        ("0::/\n", V2, v2("", "1000", "2", **{"memory.stat": STAT}), {"": (1000, 1000)}),
        ("0::/\n", V2, v2("", "1000", "1200"), {"": (0, 1000)}),
        # A container without a namespace of cgroups mounts its own folder.
        (
            "9:cpu:/docker/c\n4:memory:/docker/c/job\n0::/\n",
            V1.format(root="/docker/c") + V2.replace("cgroup rw", "cgroup/unified rw"),
            v1("/job", "400") | v1("", "1000"),
            {"/memory/job": (300, 400), "/memory": (900, 1000)},
        ),
        ("4:memory:/x\n", V1.format(root="/"), v1("/x", "9223372036854771712"), {}),
        ("4:cpu,memory:/x\n", V1.format(root="/"), v1("/x", "700"), {"/memory/x": (600, 700)}),
        # The own folder is above the mount, or a name has a space.
        ("0::/../other\n", V2, v2("", "1000"), {"": (900, 1000)}),
        (
            "0::/a\n",
            V2.replace("cgroup rw", r"c\040g rw"),
            {"sys/fs/c g/a/memory.max": "500", "sys/fs/c g/a/memory.current": "1"},
            {"/sys/fs/c g/a": (499, 500)},
        ),
        # Damaged, empty and missing files limit nothing.
        ("0::/a\n", V2, v2("/a", "-5") | v2("", "nonsense"), {}),
        ("0::/a\n", V2, {"sys/fs/cgroup/a/memory.max": "1000"}, {}),
        ("", V2, {}, {}),
        ("::::\n\nx\n", "1 2 3\n - \n", {}, {}),
    ],
)  # fmt: skip
def test_each_level_of_each_hierarchy_is_a_limit(
    own: str, mounts: str, files: dict[str, str], left: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    files = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert {
        limit.name.split(" ", 3)[3].removeprefix("/sys/fs/cgroup"): limit[1:3]
        for limit in room.cgroup_limits(tmp_path)
    } == left


def test_without_proc_there_is_no_limit(tmp_path: Path) -> None:
    assert room.cgroup_limits(tmp_path) == []


def test_a_quota_of_the_user_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {0: room._DQBLK.pack(64, 32, 48 << 10), 1: bytes(room._DQBLK.size)}
    monkeypatch.setattr(room, "_quota", lambda kind, number: raw[kind])
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    [quota] = room._quotas()
    assert (quota.left, quota.total) == (16 << 10, 64 << 10)
    assert "1234" in quota.name


MAKERS: dict[str, Callable[[str], object]] = {
    "bus": lambda name: Bus.create(name, "64MiB"),
    "pool": lambda name: create_pool(name, "weights", PoolSpec(slot_bytes="32MiB", slots=2)),
    "channel": lambda name: ChannelSender(name, slots=2).send(bytes(40 * MIB)),
}


@pytest.mark.parametrize("make", MAKERS)
def test_what_does_not_fit_a_limit_is_refused_with_both_numbers(
    make: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = room.Limit("the memory cgroup /x", 48 * MIB, 50 * MIB, "docker run -m ...")
    monkeypatch.setattr(room, "cgroup_limits", lambda root: [small])
    with pytest.raises(CapacityError) as refused:
        MAKERS[make](bus_name)
    said = str(refused.value)
    assert {"/x", "48.0 MiB", "50.0 MiB"} <= {*re.findall(r"/x|[\d.]+ MiB", said)}, said
    assert "docker run -m" in said and bus_name in said


def test_a_refusal_says_what_gc_would_free(bus_name: str, spawn: Spawner) -> None:
    dead = f"{bus_name}-dead"
    spawn.script("import sys, shmbus; shmbus.Bus.create(sys.argv[1], '4MiB')", dead).wait()
    with Bus.create(f"{bus_name}-lives", "1MiB"):
        found = room.abandoned()
    assert shm_path(dead) in found and shm_path(f"{bus_name}-lives") not in found
    assert found[shm_path(dead)] > 4 * MIB
    with pytest.raises(CapacityError, match=r"shmbus gc --yes.* free [\d.]+ \w+ of \d+ "):
        Bus.create(bus_name, 1 << 45)
    unlink(dead)


JOINED = """
import os, sys
with open(sys.argv[2] + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
import shmbus
try:
    shmbus.Bus.create(sys.argv[1], "64MiB").unlink()
except shmbus.CapacityError as error:
    print(f"refused: {error}", flush=True)
else:
    print("created", flush=True)
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    for kind, own, _ in room._memory_cgroups(Path("/")):
        made = own / f"shmbus-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / room._CGROUPS[kind][0]).write_text(str(48 * MIB))
            yield made
            return
        except OSError:
            continue
        finally:
            made.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_a_bus_above_a_cgroups_limit_is_refused_before_the_kernel_kills_its_maker(
    bus_name: str, small_cgroup: Path, spawn: Spawner
) -> None:
    said = spawn.script(JOINED, bus_name, str(small_cgroup), fresh=True).finish(60.0)
    assert "refused" in said and small_cgroup.name in said and "48.0 MiB" in said
