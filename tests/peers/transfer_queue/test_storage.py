"""TransferQueue keeps its values in shared memory: its own tests run on it, and what it adds."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import tensordict
import torch
import transfer_queue as tq
from conftest import wait_until
from transfer_queue.storage.clients.base import StorageClientFactory

from shmbus.errors import BusBusyError, CapacityError, DamagedError
from trainer_adapter.adapters import transfer_queue
from trainer_adapter.adapters.transfer_queue import Store

HERE = Path(__file__).parent
#: In TransferQueue's wheel.
THEIRS = Path(tq.__file__).parents[1] / "tests" / "e2e"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def store(bus_name: str) -> Iterator[Store]:
    made = Store(bus_name)
    yield made
    made.close()


@pytest.fixture
def client(store: Store, bus_name: str) -> Any:
    return StorageClientFactory.create("ShmbusStorageClient", {"store": bus_name})


@pytest.mark.parametrize("name", ["kv_interface", "checkpoint", "e2e_lifecycle_consistency"])
def test_their_own_tests_pass_on_it(name: str, bus_name: str) -> None:
    environment = {
        **os.environ, "TQ_TEST_BACKEND": "Shmbus", "SHMBUS_TEST_STORE": bus_name,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    [file] = THEIRS.glob(f"test_{name}*.py")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "on_shmbus",
        "-W", "ignore", "-c", os.devnull, "--rootdir", str(THEIRS), str(file),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]
    # The process that made the store has ended, and the store with it.
    assert not os.path.exists(f"{transfer_queue._PREFIX}{bus_name}")


TENSORS = {
    "row": torch.arange(2048),
    "large": torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000),
    "bfloat16": torch.arange(6).to(torch.bfloat16).reshape(2, 3),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3j]).conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4, dtype=torch.int16),
    "strided": torch.arange(12).reshape(3, 4).t(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
}
VALUES = {
    "text": "ответ",
    "number": 7,
    "none": None,
    "dict": {"a": [1, 2.5, torch.ones(2)]},
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "tensordict": tensordict.TensorDict({"x": torch.ones(2, 3)}, batch_size=2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(client: Any, name: str) -> None:
    client.put([f"0@{name}"], [TENSORS[name]])
    [found] = client.get([f"0@{name}"])
    assert found.dtype == TENSORS[name].dtype and torch.equal(found, TENSORS[name])


@pytest.mark.parametrize("name", VALUES)
def test_any_other_value_comes_back_as_their_encoding_has_it(client: Any, name: str) -> None:
    client.put([name], [VALUES[name]])
    [found] = client.get([name])
    assert type(found) is type(VALUES[name])
    assert str(found) == str(VALUES[name])


def test_what_was_read_stays_and_may_be_written(client: Any) -> None:
    for size in (10, 1_000_000):  # read, and mapped
        client.put(["k"], [torch.zeros(size)])
        [found] = client.get(["k"])
        found += 1
        client.put(["k"], [torch.full((size,), 2.0)])
        [again] = client.get(["k"])
        client.clear(["k", "never there"])
        assert found.sum() == size and again.sum() == 2 * size
        with pytest.raises(KeyError, match="another machine"):
            client.get(["k"])


def test_a_checkpoint_brings_back_what_was_there(
    client: Any, bus_name: str, tmp_path: Path
) -> None:
    manager = object.__new__(transfer_queue.ShmbusStorageManager)
    manager._path = f"{transfer_queue._PREFIX}{bus_name}"
    client.put(["tensor", "text"], [torch.ones(4), "x"])
    asyncio.run(manager.save_checkpoint(str(tmp_path / "saved")))
    client.clear(["text"])
    client.put(["tensor", "later"], [torch.zeros(4), 1])
    asyncio.run(manager.load_checkpoint(str(tmp_path / "saved")))
    [tensor, *rest] = client.get(["tensor", "text", "later"])
    assert torch.equal(tensor, torch.ones(4)) and rest == ["x", 1]
    with pytest.raises(FileNotFoundError, match="another backend"):
        asyncio.run(manager.load_checkpoint(str(tmp_path)))


def test_keys_of_any_length_and_character_are_taken(client: Any) -> None:
    keys = ["../../etc/passwd", "a/b\0c", "k" * 5000, ""]
    client.put(keys, list(range(4)))
    assert client.get(keys) == [0, 1, 2, 3]


def test_a_full_memory_is_an_error_that_leaves_the_value_before(
    client: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put(["k"], [torch.ones(4)])

    def full(fd: int, parts: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(CapacityError, match="clear what was trained on"):
            client.put(["k"], [torch.zeros(4)])
    assert torch.equal(client.get(["k"])[0], torch.ones(4))
    assert len(os.listdir(store.path)) == 1


def test_a_damaged_file_is_named(client: Any, store: Store) -> None:
    client.put(["k"], [torch.ones(4)])
    [file] = Path(store.path).iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], b"\xff" * len(whole), whole[:4] + b"\x93\xa3xyz"):
        file.write_bytes(damaged)
        with pytest.raises(DamagedError, match="'k'"):
            client.get(["k"])


HOLDER = """
import sys, time
from trainer_adapter.adapters.transfer_queue import Store, ShmbusStorageClient
import torch
store = Store(sys.argv[1])
ShmbusStorageClient({"store": sys.argv[1]}).put(["k"], [torch.ones(4)])
print("ready", flush=True)
time.sleep(600)
"""


def test_a_store_is_of_one_process_and_a_killed_one_is_made_anew(bus_name: str) -> None:
    command = [sys.executable, "-c", HOLDER, bus_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        reader = StorageClientFactory.create("ShmbusStorageClient", {"store": bus_name})
        assert reader.get(["k"])[0].sum() == 4
        with pytest.raises(BusBusyError, match="another name"):
            Store(bus_name)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    # What the dead one had is there until the next of its name.
    assert reader.get(["k"])[0].sum() == 4
    store = wait_until(lambda: Store(bus_name), what="the store")
    with pytest.raises(KeyError):
        reader.get(["k"])
    store.close()
    with pytest.raises(FileNotFoundError, match="on this machine"):
        StorageClientFactory.create("ShmbusStorageClient", {"store": bus_name})


WRITER = """
import os, sys, time
from trainer_adapter.adapters.transfer_queue import ShmbusStorageClient
import torch

def half(fd, parts):
    os.write(fd, parts[0])
    print("half", flush=True)
    time.sleep(600)

os.writev = half
ShmbusStorageClient({"store": sys.argv[1]}).put(["k"], [torch.zeros(1_000_000)])
"""


def test_a_writer_that_is_killed_in_mid_put_leaves_the_value_before(
    client: Any, store: Store, bus_name: str
) -> None:
    client.put(["k"], [torch.ones(4)])
    command = [sys.executable, "-c", WRITER, bus_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert torch.equal(client.get(["k"])[0], torch.ones(4))
    client.put(["k"], [torch.full((4,), 2.0)])
    assert client.get(["k"])[0].sum() == 8
    # What it left goes with the store.
    assert len(os.listdir(store.path)) == 2
    store.close()
    assert not os.path.exists(store.path)


def test_a_folder_that_others_may_read_is_refused(bus_name: str) -> None:
    path = f"{transfer_queue._PREFIX}{bus_name}"
    os.mkdir(path, 0o755)
    try:
        with pytest.raises(PermissionError, match="alone"):
            Store(bus_name)
    finally:
        os.rmdir(path)


def test_the_page_configures_and_installs_what_ran(bus_name: str) -> None:
    wanted = doc_pages.installs("transfer-queue.md", "pip install")
    assert wanted <= set((HERE / "requirements.txt").read_text().splitlines()), wanted
    code = doc_pages.block("transfer-queue.md", "tq.init").replace('"run1"', repr(bus_name))
    code += (
        'tq.kv_put(key="k", partition_id="p", fields={"x": torch.arange(6)})\n'
        'got = tq.kv_batch_get(keys=["k"], partition_id="p")["x"]\n'
        'assert torch.equal(got[0], torch.arange(6)), got\n'
        'tq.close()\n'
    )  # fmt: skip
    command = [sys.executable, "-c", f"import torch\n{code}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
