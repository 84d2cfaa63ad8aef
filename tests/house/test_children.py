"""A fork server's child equals a fresh interpreter (fork_server.py)."""

import json
import os
import signal

import pytest
from conftest import Spawner, wait_until
from fork_server import Forked

FACTS = """
import json, os, signal, sys, threading
import __main__
print(json.dumps({
    "arguments": sys.argv[1:], "script": sys.argv[0] == __main__.__file__, "name": __name__,
    "own": sorted(name for name in vars(__main__) if not name.startswith("__")),
    "beside": sys.path[0] == os.path.dirname(sys.argv[0]), "directory": os.getcwd(),
    "environment": sorted(os.environ), "flags": list(sys.flags),
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])], "threads": threading.active_count(),
    "streams": [os.readlink(f"/proc/self/fd/{n}").rpartition(".")[2] for n in range(3)],
    "open": len(os.listdir("/proc/self/fd")),
    "segments": "/dev/shm/" in open("/proc/self/maps").read(),
}))
print("to the other stream", file=sys.stderr)
"""


def test_it_has_what_a_fresh_one_has(spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # left behind by an import of Ray in any test
    forked = spawn.script(FACTS, "a b", 7)
    fresh = spawn.script(FACTS, "a b", 7, fresh=True)
    assert isinstance(forked.popen, Forked) and not isinstance(fresh.popen, Forked)
    (said, other), (expected, _) = (each.finish().splitlines() for each in (forked, fresh))
    assert json.loads(said) == json.loads(expected)
    assert json.loads(said)["arguments"] == ["a b", "7"] and other == "to the other stream"


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_leaves_in_the_environment_is_taken_back(turn: int) -> None:
    assert "SHMBUS_TEST_LEFT" not in os.environ
    os.environ["SHMBUS_TEST_LEFT"] = str(turn)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        (
            "import atexit, threading, time; atexit.register(print, 'at exit')\n"
            "threading.Thread(target=lambda: time.sleep(0.05) or print('thread')).start()",
            0,
            "thread\nat exit\n",
        ),
    ],
)
def test_it_ends_as_a_fresh_one_does(
    spawn: Spawner, script: str, status: int, said: str, fresh: bool
) -> None:
    child = spawn.script(script, fresh=fresh)
    assert child.wait() == status
    assert child.output().endswith(said)


def test_ctrl_c_and_a_stop_reach_it(spawn: Spawner) -> None:
    # Short sleeps: a signal just before a sleep goes unnoticed until its end.
    child = spawn.script("import time; print('ready')\nwhile True: time.sleep(0.05)")
    child.expect("ready")
    child.send_signal(signal.SIGSTOP)
    assert child.running
    child.send_signal(signal.SIGCONT)
    child.send_signal(signal.SIGINT)
    assert child.wait() == -signal.SIGINT
    assert child.output().endswith("KeyboardInterrupt\n")
    wait_until(lambda: not child.running)


def test_it_ends_without_a_word_of_what_its_server_has_imported(spawn: Spawner) -> None:
    child = spawn.script("import torch\nprint('over')")
    assert isinstance(child.popen, Forked)
    assert child.finish() == "over\n"


def test_other_environments_are_fresh(spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os; print(os.environ['SHMBUS_TEST_CHILD'])"
    given = spawn.script(script, env={"SHMBUS_TEST_CHILD": "given"})
    monkeypatch.setenv("SHMBUS_TEST_CHILD", "set")
    found = spawn.script(script)
    assert (given.finish(), found.finish()) == ("given\n", "set\n")
    assert not isinstance(given.popen, Forked) and not isinstance(found.popen, Forked)
