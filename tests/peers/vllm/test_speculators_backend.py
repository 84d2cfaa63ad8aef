"""The backend "shmbus" of the real hs_connectors, beside its own; the engine's worker is real."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hs_connectors import HiddenStatesBackend
from test_hidden_states_worker import finished, worker

from shmbus import BusBusyError, BusNotFoundError
from shmbus.channel import unlink_channel
from shmbus.engines.hidden_states import options_of
from shmbus.engines.speculators import ChannelTransfer


@pytest.fixture
def channel() -> Iterator[str]:
    name = f"test-backend-{os.getpid()}"
    yield name
    for file in Path("/dev/shm").glob(f"shmbus-channel.{name}*"):
        unlink_channel(file.name.removeprefix("shmbus-channel."))


def transfer_of(channel: str) -> ChannelTransfer:
    backend = HiddenStatesBackend.registry["shmbus"]
    assert "file" in HiddenStatesBackend.registry
    parser = argparse.ArgumentParser()
    backend.add_train_args(parser)
    arguments = parser.parse_args(["--hidden-states-channel", channel])
    transfer = backend.from_train_args(arguments, "/nowhere")
    assert isinstance(transfer, ChannelTransfer)
    return transfer


def test_states_come_by_handle_in_any_order_and_what_the_engine_lacks_is_none(channel: str) -> None:
    one = worker(channel, slots=8)
    transfer = pickle.loads(pickle.dumps(transfer_of(channel)))  # as a loader's worker gets it
    one.pending.extend(
        [finished(3, "cmpl-a"), finished(5, "cmpl-b"), finished(1, "cmpl-c", "none")]
    )
    assert len(one.send(0.0)) == 3
    assert transfer.get_cached(0) is None
    assert transfer.get_generated({"handle": "cmpl-c"}) is None
    b = transfer.get_generated({"handle": "cmpl-b"})
    a = transfer.get_generated({"handle": "cmpl-a"})
    assert len(a["token_ids"]) == 3 and len(b["token_ids"]) == 5
    assert torch.equal(a["hidden_states"], b["hidden_states"][:3])
    with pytest.raises(BusBusyError, match="has a living receiver"):
        transfer_of(channel).setup()
    one.pending.append(finished(3, "cmpl-d"))
    one.pending.append(finished(3, "cmpl-e"))
    one.send(0.0)
    transfer.get_generated({"handle": "cmpl-e"})
    transfer.delete("cmpl-d")
    assert transfer._kept == {}
    transfer._receiver.close()
    one.close()


def test_the_engine_is_started_with_the_same_channel(channel: str) -> None:
    backend = HiddenStatesBackend.registry["shmbus"]
    parser = argparse.ArgumentParser()
    backend.add_launch_args(parser)
    config = backend.build_kv_transfer_config(
        parser.parse_args(["--hidden-states-channel", channel])
    )
    assert options_of(config["kv_connector_extra_config"]).channel == channel
    with pytest.raises(BusNotFoundError, match="no engine sends in it; start it first"):
        transfer_of(channel).setup()
