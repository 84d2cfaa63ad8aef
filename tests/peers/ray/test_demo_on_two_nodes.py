"""The demo learns over two nodes as on a single node; SHMBUS_TEST_DEMO=1 trains to the end."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
ray = pytest.importorskip("ray")
pytest.importorskip("torch", reason="the demo trains")
ROOT = Path(__file__).resolve().parents[3]
LONG = os.environ.get("SHMBUS_TEST_DEMO") == "1"
STEPS = 500 if LONG else 8
STORE_BYTES = 100 << 20
DEADLINE_S = 1200 if LONG else 200
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * DEADLINE_S + 60),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root, unshare"
    ),
]


def start_node(address: str, name: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a raylet in separate namespaces: its processes see no segment of a second node."""
    ray_program = str(Path(sys.executable).with_name("ray"))
    inner = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    with log.open("ab") as out:
        return subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "--pid", "--fork", "--kill-child",
             "--mount-proc", "sh", "-c", inner, "sh",
             ray_program, "start", "--address", address, "--num-cpus", "1", "--block",
             "--object-store-memory", str(STORE_BYTES), "--resources", json.dumps({name: 1})],
            stdout=out, stderr=out, stdin=subprocess.DEVNULL,
        )  # fmt: skip


@contextmanager
def two_nodes(directory: Path) -> Iterator[str]:
    """Run a cluster of a head and two nodes joined only by a network; yield the address."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    nodes = []
    try:
        ray.init(address=made.address, namespace="shmbus", log_to_driver=False)
        # In sequence: both look for free names in the same directory of sockets.
        for name in ("rollout", "trainer"):
            log = directory / f"{name}.log"
            nodes.append(start_node(made.address, name, log))
            deadline = time.monotonic() + 60.0
            while name not in ray.cluster_resources():
                assert time.monotonic() < deadline, f"no node {name!r}: {log.read_text()}"
                time.sleep(0.1)
        yield made.address
    finally:
        ray.shutdown()
        for node in nodes:
            node.kill()  # with every process in its namespaces
            node.wait()
        made.shutdown()


def run(*words: Any) -> str:
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False,
        timeout=DEADLINE_S, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_over_two_nodes_learns_as_on_one(tmp_path: Path) -> None:
    here = set(Path("/dev/shm").glob("shmbus*two-nodes-*"))
    with two_nodes(tmp_path) as address:
        output = tmp_path / "two.json"
        said = run(
            ROOT / "examples" / "demo_on_two_nodes.py", "--address", address,
            "--steps", STEPS, "--output", output,
        )  # fmt: skip
        assert set(Path("/dev/shm").glob("shmbus*two-nodes-*")) == here, "a bus of this node"
    print(said)
    assert said.count("balances") == 2 and "DOES NOT" not in said
    two = json.loads(output.read_text())
    assert two["steps"] == STEPS and two["groups"] == 48 * STEPS
    assert two["ledger"]["acknowledged"] == two["trajectories"] == 48 * 8 * STEPS
    if LONG:
        print(run("-m", "shmbus", "demo", "--steps", STEPS, "--output", tmp_path))
        one = json.loads((tmp_path / "summary.json").read_text())
        for each in (one, two):
            print(each["reward_start"], each["reward_end"], each["seconds_to_target"])
            assert each["target_reached"]
