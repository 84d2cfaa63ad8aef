"""A server's processes end in order: the server, its workers, and the resource tracker last."""

import os
import sys
import threading
from pathlib import Path

import pytest
from conftest import wait_until

from shmbus.base import process_group

#: A server with a worker and a resource tracker, like vLLM's; each notes its SIGTERM, and the
#: tracker removes a file after the last holder of its pipe ends.
SERVER = """
import os, signal, sys, time
folder, obeys = sys.argv[1], sys.argv[2] == "obeys"
def note(name):
    with open(folder + "/order", "a") as file:
        file.write(name + chr(10))
ends, holds = os.pipe()
open(folder + "/psm_left", "w").close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the tracker
if os.fork() == 0:
    os.close(holds)
    os.read(ends, 1)
    os.unlink(folder + "/psm_left")
    note("tracker")
    os._exit(0)
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGTERM, lambda *_: (note("worker"), os._exit(0)))
    open(folder + "/ready", "w").close()
    while True:
        signal.pause()
def end(*_):
    note("server")
    if obeys:
        os.kill(worker, signal.SIGTERM)
        os.waitpid(worker, 0)
        os._exit(0)
signal.signal(signal.SIGTERM, end)
open(folder + "/set", "w").close()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("server", ["obeys", "waits for a connection"])
def test_a_server_ends_first(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "END_S", 5.0 if server == "obeys" else 0.5)
    theirs, ours = os.pipe()
    command = [str(theirs), sys.executable, "-c", SERVER, str(tmp_path), server]
    runs = threading.Thread(target=process_group.main, args=(command,))
    runs.start()
    wait_until(lambda: (tmp_path / "ready").exists() and (tmp_path / "set").exists())
    os.close(ours)
    runs.join(60.0)
    os.close(theirs)
    assert not runs.is_alive() and not (tmp_path / "psm_left").exists()
    order = (tmp_path / "order").read_text().split()
    assert list(dict.fromkeys(order)) == ["server", "worker", "tracker"]
