"""A network between namespaces of this machine, with delays, losses and cuts.

A node has namespaces of its own and a link, a TUN device. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: Few packets: Python carries them.
MTU = 9000
_DESTINATION = slice(16, 20)
_READ_BYTES = 1 << 16


def unavailable() -> str:
    """Return the obstacle to a hub here; "" without."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (apt install iproute2 util-linux)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "-mn", "--pid", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "the kernel refuses namespaces"


def address_of(number: int) -> str:
    return f"10.201.0.{number + 1}"


class Node:
    def __init__(self, hub: Hub, number: int, argv: list[str], log: Path) -> None:
        self.number = number
        device = f"shm{os.getpid() % 100_000}n{number}"
        self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(
            self.tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI)
        )
        inner = 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && read go && exec "$@"'
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                ["unshare", "-mn", "--propagation", "private", "--pid", "--fork", "--kill-child",
                 "sh", "-c", inner, "sh", *argv],
                stdin=subprocess.PIPE, stdout=out, stderr=out,
            )  # fmt: skip
        self.pid = self._child()
        run = ["nsenter", "-t", str(self.pid), "-n", "ip"]
        subprocess.run(["ip", "link", "set", device, "netns", str(self.pid)], check=True)
        subprocess.run([*run, "addr", "add", f"{address_of(number)}/24", "dev", device], check=True)
        subprocess.run([*run, "link", "set", device, "mtu", str(MTU), "up"], check=True)
        hub.add(number, self.tun)
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def _child(self) -> int:
        """Wait until the node is in its namespaces, and return its number here."""
        own = os.stat("/proc/self/ns/net").st_ino
        deadline = time.monotonic() + 30.0
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(path.read_text().split()[0])
                if os.stat(f"/proc/{pid}/ns/net").st_ino != own:
                    return pid
            time.sleep(0.01)
        raise RuntimeError("a node does not begin")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the whole at once: processes, memory, link."""
        if self.running:
            os.kill(self.process.pid, signal.SIGKILL)  # its child goes along
        self.process.wait()


class Hub:
    """Carries packets between nodes, by `delay_s`, the share `loss`, and the set `cut` of nodes."""

    def __init__(self, seed: int) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.cut: set[int] = set()
        self.carried = self.lost = 0
        self._rng = random.Random(seed)
        self._tuns: dict[bytes, tuple[int, int]] = {}
        self._poll = select.poll()
        self._late: list[tuple[float, int, bytes]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def add(self, number: int, tun: int) -> None:
        """Connect a node, in place of an earlier node of its number."""
        self._tuns[bytes(map(int, address_of(number).split(".")))] = (number, tun)
        self._poll.register(tun, select.POLLIN)

    def _work(self) -> None:
        number_of: dict[int, int] = {}
        while not self._over.is_set():
            wait_ms = 20.0
            if self._late:
                wait_ms = max(0.0, min(wait_ms, 1e3 * (self._late[0][0] - time.monotonic())))
            if not self._tuns:
                time.sleep(0.01)
                continue
            number_of = {tun: number for number, tun in self._tuns.values()}
            for tun, _ in self._poll.poll(wait_ms):
                self._read(tun, number_of.get(tun, -1))
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                self._write(heapq.heappop(self._late)[2])

    def _read(self, tun: int, sender: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(tun, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # a gone node
                self._poll.unregister(tun)
                return
            self.carried += 1
            if sender in self.cut or self._rng.random() < self.loss:
                self.lost += 1
            elif self.delay_s:
                due = time.monotonic() + self.delay_s
                heapq.heappush(self._late, (due, self.carried, packet))
            else:
                self._write(packet)

    def _write(self, packet: bytes) -> None:
        number, tun = self._tuns.get(packet[_DESTINATION], (-1, -1))
        if number < 0 or number in self.cut:
            self.lost += 1
            return
        with contextlib.suppress(OSError):  # gone or full: lost, as in networks
            os.write(tun, packet)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for _, tun in self._tuns.values():
            os.close(tun)
