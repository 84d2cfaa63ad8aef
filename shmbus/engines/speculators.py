"""Backend "shmbus" of speculators' ``hs_connectors``: hidden states over a channel, no files.

Importing this module registers the backend. The engine side is `shmbus.engines.hidden_states`.

Invariant: a channel has one reader: one process loads data, and a second learns the reader's name.

Source: hs_connectors/transfer.py of hs-connectors 0.9.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import msgspec
import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from shmbus.channel.endpoint import living_statement
from shmbus.errors import BusNotFoundError
from shmbus.tensors import StepFailedError, TensorChannel, TensorReceiver
from shmbus.tensors.agreement import Statement

#: Name of the argument in both programs.
_OPTION: Final = "--hidden-states-channel"

#: Seconds to wait for states already announced by the engine.
_TIMEOUT_S: Final = 120.0


class ChannelTransfer(HiddenStatesTransfer):
    """States of finished requests by handle, handed out in any order."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._receiver: TensorReceiver | None = None
        #: States received before their request; None for an engine's failure.
        self._kept: dict[str, dict[str, torch.Tensor] | None] = {}

    def setup(self) -> None:
        """Open the channel with the engine's specs."""
        if self._receiver is None:
            stated = living_statement(self._channel)
            if not stated:
                raise BusNotFoundError(
                    f"channel {self._channel!r}: no engine sends in it; start it first, with this "
                    "channel in its kv_connector_extra_config"
                )
            specs = msgspec.msgpack.decode(stated, type=Statement).specs
            self._receiver = TensorChannel.open(self._channel, specs=specs)

    def get_cached(self, file_idx: int) -> None:
        """Return None: nothing is cached."""

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Return a finished request's states; None if the engine lost them."""
        handle = hs_transfer_params["handle"]
        self.setup()
        while handle not in self._kept:
            self._receive()
        return self._kept.pop(handle)

    def _receive(self) -> None:
        assert self._receiver is not None
        try:
            with self._receiver.recv(_TIMEOUT_S) as item:
                self._kept[item.meta["request"]] = {
                    "hidden_states": item["hidden"].clone(),
                    "token_ids": item["token_ids"].clone(),
                }
        except StepFailedError as error:
            # "request ID: why"
            self._kept[error.reason.partition(": ")[0].partition(" ")[2]] = None

    def delete(self, handle: str) -> None:
        """Forget a request's states."""
        self._kept.pop(handle, None)


@HiddenStatesBackend.register("shmbus")
class ChannelBackend(HiddenStatesBackend):
    """Channel option of both programs."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add the trainer's argument."""
        parser.add_argument(_OPTION, default="speculators.hidden", help="name of the channel")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add the engine's argument."""
        ChannelBackend.add_train_args(parser)

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ChannelTransfer:
        """Return the transfer for the trainer's loader."""
        return ChannelTransfer(args.hidden_states_channel)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Return the engine's start options."""
        return {
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "shmbus.engines.hidden_states",
            "kv_connector_extra_config": {"channel": args.hidden_states_channel},
        }
