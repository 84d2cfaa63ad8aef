"""Where a bus lies: at whole huge pages, in every process alike."""

import os
import subprocess
import sys
from pathlib import Path

from shmbus import Bus


def _mapping_of(pid: int, bus_name: str) -> tuple[int, int]:
    """Where a process has a bus mapped, and how many of its KiB by huge pages."""
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(f"/dev/shm/shmbus.{bus_name}"))
    huge = next(line for line in lines[at:] if line.startswith("ShmemPmdMapped:"))
    return int(lines[at].partition("-")[0], 16), int(huge.split()[1])


def test_all_who_attach_map_the_huge_pages_that_the_kernel_gave(bus_name: str) -> None:
    with Bus.create(bus_name, "8MiB"):
        start, huge = _mapping_of(os.getpid(), bus_name)
        assert start % (2 << 20) == 0
        code = (
            "import sys; from shmbus import Producer; producer = Producer(sys.argv[1]);"
            "print('attached', flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, bus_name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None and other.stdin is not None
            assert other.stdout.readline() == b"attached\n"
            assert _mapping_of(other.pid, bus_name)[0] % (2 << 20) == 0
            assert _mapping_of(other.pid, bus_name)[1] == huge
            other.stdin.close()
        assert other.returncode == 0
