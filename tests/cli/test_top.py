"""``shmbus top``: on a real pseudo-terminal, whole again after any end."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator

import pytest
from conftest import Spawner, wait_until
from operators import WORKER, cli, put_group

import shmbus
from shmbus.cli.top import fitted, frame
from shmbus.inspect.rates import Watcher

_LEAVES_SCREEN = "\x1b[?1049l"
_SHOWS_CURSOR = "\x1b[?25h"


class Terminal:
    def __init__(self, *arguments: str, columns: int = 80, rows: int = 60) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self._seen = bytearray()
        # readline puts the size of pytest's own terminal there, ahead of a terminal's own.
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("LINES", None)
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmbus.cli", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 65536):
                self._seen += data

    def screen(self) -> str:
        return self._seen.decode("utf-8", "replace")

    def expect(self, text: str) -> None:
        wait_until(lambda: text in self.screen(), what=f"{text!r} on the terminal")

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def finish(self) -> int:
        status = self.process.wait(timeout=30)
        wait_until(lambda: _LEAVES_SCREEN in self.screen(), what="the normal screen")
        assert self.screen().rindex(_LEAVES_SCREEN) > self.screen().rindex("\x1b[?1049h")
        assert self.screen().rindex(_SHOWS_CURSOR) > self.screen().rindex("\x1b[?25l")
        assert termios.tcgetattr(self.slave) == self.before
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.close()


def start(terminal: list[Terminal], *arguments: str) -> Terminal:
    terminal.append(Terminal(*arguments))
    return terminal[-1]


@pytest.mark.parametrize("how", ["q", "Q", "SIGTERM", "SIGHUP", "SIGINT"])
def test_top_restores_the_terminal(bus_name: str, terminal: list[Terminal], how: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name, label="worker") as producer:
        put_group(producer, "waits", skip=1)
        top = start(terminal, "top", bus_name, "--interval", "0.2")
        top.expect("1 incomplete")
        top.expect("waits")
        top.expect("worker")
        if how.startswith("SIG"):
            top.process.send_signal(getattr(signal, how))
        else:
            top.press(how)
        assert top.finish() == 0


def test_other_keys_do_not_quit(bus_name: str, terminal: list[Terminal]) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        top = start(terminal, "top", bus_name, "--interval", "0.1")
        top.expect("ledger")
        top.press("\x1b[A")
        seen = len(top.screen())
        wait_until(lambda: len(top.screen()) > seen + 2000, what="more frames")
        assert top.process.poll() is None
        top.press("q")
        assert top.finish() == 0


def test_a_bus_that_goes_away_ends_the_view(bus_name: str, terminal: list[Terminal]) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        top = start(terminal, "top", bus_name, "--interval", "0.1")
        top.expect("ledger")
    assert top.finish() == 1
    top.expect("there is no bus")


def test_an_unknown_bus_never_takes_the_screen(bus_name: str, terminal: list[Terminal]) -> None:
    top = start(terminal, "top", bus_name)
    assert top.process.wait(timeout=30) == 1
    top.expect("there is no bus")
    assert "\x1b[?1049h" not in top.screen()


def test_without_a_terminal_it_prints_a_frame(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "g")
        once = cli("top", bus_name, "--interval", "0.1")
        assert once.status == 0
        assert "in the ring" in once.out and "\x1b" not in once.out


def test_rates_come_from_counts_and_time(bus_name: str, spawn: Spawner) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        watcher = Watcher(bus_name)
        watcher.poll()
        assert watcher.rates.committed == 0
        spawn.script(WORKER, bus_name, 5, "w").expect("ready")
        watcher.poll()
        assert watcher.rates.committed > 0
        assert watcher.rates.tokens == pytest.approx(64 * watcher.rates.committed)
        assert watcher.rates.bytes == pytest.approx(256 * watcher.rates.committed)
        assert watcher.producer_rates == {1: watcher.rates.committed}
    with shmbus.Bus.create(bus_name, "1MiB"):
        watcher.poll()
        assert watcher.rates.committed == 0


@pytest.mark.parametrize("producers", [0, 3, 40])
def test_a_frame_fits_and_counts_omissions(bus_name: str, producers: int) -> None:
    with shmbus.Bus.create(bus_name, "1MiB", max_producers=64), contextlib.ExitStack() as stack:
        for number in range(producers):
            producer = stack.enter_context(shmbus.Producer(bus_name, label=f"w{number}\x1b[2J"))
            put_group(producer, f"\x1b[31m{number}", skip=0)
        watcher = Watcher(bus_name)
        watcher.poll()
        text = frame(watcher)
    assert "\x1b" not in text
    whole = text.splitlines()
    narrow = fitted(text, 30, 200)[: -len(whole) + 3]
    assert max(map(len, narrow)) <= 30 and " ".join(narrow).split() == " ".join(whole[:3]).split()
    for rows in (1, 16, 24, 60, 200):
        lines = fitted(text, 200, rows)
        if len(whole) <= rows:
            assert lines == whole
        else:
            assert len(lines) == rows and lines[:-1] == whole[: rows - 1]
            assert lines[-1].startswith(f"{len(whole) - rows + 1} more lines: ")
