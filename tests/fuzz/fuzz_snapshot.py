"""Damaged snapshots: a snapshot is restored unchanged, or a named error makes no bus.

An input is a list of edits to the files of a snapshot. The fuzzer may correct the manifest's
digests afterwards, like a forger, to reach the code behind them.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bytes, run

import shmbus
from shmbus import errors
from shmbus.inspect.status import read_status
from shmbus.store import snapshot
from shmbus.store.directory import MANIFEST

_NAME = f"fuzz-{os.getpid()}"
_MOST_EDITS = 20
#: Documented errors of `snapshot.restore`.
_PROMISED = (FileNotFoundError, errors.LayoutMismatchError, errors.CapacityError)
_VALUES = (0, 1, -1, 2**31, 2**63, 2**64 - 1, "", "x", "../x", None, [], {}, 1.5, True)


class FuzzedSnapshot:
    """A snapshot of a gone bus, and a place to damage copies."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        with shmbus.Bus.create(_NAME, "64KiB", max_producers=2, extent_bytes=4096) as bus:
            with shmbus.Producer(_NAME) as producer:
                for index in range(6):
                    data: dict[str, Any] = {"tokens": np.arange(9 + index), "weights": np.ones(2)}
                    if index % 2:
                        data = {"words": np.array(["ab", "cde"])}
                    producer.put("a", group_size=6, index=index, meta={"n": index}, **data)
            snapshot.take(_NAME, self.directory / "whole")
            bus.unlink()
        whole = (self.directory / "whole").iterdir()
        self.files = {path.name: path.read_bytes() for path in sorted(whole)}
        self.names = sorted(self.files)

    def run(self, data: bytes) -> None:
        given = Bytes(data)
        forge = given.number() % 2
        files = dict(self.files)
        for _ in range(_MOST_EDITS):
            if not given:
                break
            name = self.names[given.number() % len(self.names)]
            files[name] = edit(files[name], given)
        if forge:
            files[MANIFEST] = forged(files)
        target = self.directory / "damaged"
        target.mkdir()
        try:
            for name, content in files.items():
                (target / name).write_bytes(content)
            self.restore(target)
        finally:
            shutil.rmtree(target)

    def restore(self, target: Path) -> None:
        """A restored bus can be read; after an error no bus exists."""
        try:
            manifest = snapshot.restore(target, _NAME, capacity="64KiB")
        except _PROMISED:
            assert not os.path.exists(f"/dev/shm/shmbus.{_NAME}")
            return
        try:
            assert read_status(_NAME).ledger.in_ring >= manifest.records
            with shmbus.Consumer(_NAME, group_timeout=0.001, on_timeout="partial") as consumer:
                for group in consumer.take(64, timeout=0):
                    for sample in group:
                        repr(sample)
                    group.ack()
        finally:
            shmbus.unlink(_NAME)

    def close(self) -> None:
        shutil.rmtree(self.directory)


def edit(content: bytes, given: Bytes) -> bytes:
    way, at = given.number() % 4, given.number(2) % (len(content) + 1)
    if way == 0:
        return content[:at] + given.take(1) + content[at + 1 :]
    if way == 1:
        return content[:at]
    if way == 2:
        return content[:at] + given.take(given.number() % 16) + content[at:]
    return with_value(content, at, _VALUES[given.number() % len(_VALUES)])


def with_value(content: bytes, at: int, value: object) -> bytes:
    """Replace a value of a JSON object, or of an object within it."""
    try:
        root = json.loads(content)
    except ValueError:
        return content
    places: list[tuple[Any, Any]] = []
    pending = [root] if isinstance(root, (dict, list)) else []
    while pending:
        each = pending.pop()
        keys = each.keys() if isinstance(each, dict) else range(len(each))
        for key in keys:
            places.append((each, key))
            if isinstance(each[key], (dict, list)):
                pending.append(each[key])
    if places:
        container, key = places[at % len(places)]
        container[key] = value
    return json.dumps(root).encode()


def forged(files: dict[str, bytes]) -> bytes:
    """Return the manifest with the parts' present sizes and digests."""
    try:
        manifest = json.loads(files[MANIFEST])
        for part in manifest["parts"]:
            content = files[part["file"]]
            part["nbytes"], part["sha256"] = len(content), hashlib.sha256(content).hexdigest()
        return json.dumps(manifest).encode()
    except (ValueError, KeyError, TypeError):
        return files[MANIFEST]


if __name__ == "__main__":
    run(FuzzedSnapshot)
