"""The two doors to a channel of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmbus._arguments import check_flag, known_device
from shmbus.channel.sender import DEFAULT_TIMEOUT_S
from shmbus.tensors.config import Carrier, choose_carrier
from shmbus.tensors.group import ChannelGroup
from shmbus.tensors.receiver import TensorReceiver
from shmbus.tensors.sender import TensorSender


class TensorChannel:
    """Named tensors of a step, from one process to one other on the same machine."""

    @staticmethod
    def create(
        name: str,
        *,
        slots: int | None = None,
        carrier: str | Carrier = "auto",
        device: str | None = None,
        max_bytes: int | str | None = None,
        specs: Mapping[str, Any] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        label: str = "",
    ) -> TensorSender:
        """Create a channel, or go on where its last sender has ended.

        Parameters
        ----------
        name : str
            As a bus is named, such as "run1.hidden".
        slots : int, optional
            Steps that may be on their way, 1 to 8; 2 where nothing is said.
        carrier : "auto" | "host" | "memfd" | "cuda" | Carrier
            Which memory; "auto" is "cuda" where a CUDA device is given, and "host" elsewhere.
        device : str, optional
            Where the tensors are, such as "cuda:0"; the CPU where nothing is said.
        max_bytes : int | str, optional
            Bytes that a step may have; "16GiB" where nothing is said.
        specs : mapping of name to (dtype, shape), optional
            What is sent; the first step says it where this does not.
        timeout : float
            Seconds that a wait lasts where nothing else is said.
        label : str
            For messages; the script's name by default.

        Returns
        -------
        TensorSender

        Raises
        ------
        TypeError, ValueError
            An argument is none, or belongs to another carrier.
        DeviceMismatchError
            This process does not see the device.
        BusBusyError
            Another living process sends.
        LayoutMismatchError
            What is there is no channel of this version.
        CapacityError
            /dev/shm is full.
        """
        chosen = choose_carrier(carrier, slots=slots, device=device, max_bytes=max_bytes)
        return TensorSender(name, chosen, specs=specs, timeout=timeout, label=label)

    @staticmethod
    def open(
        name: str,
        *,
        specs: Mapping[str, Any],
        timeout: float = DEFAULT_TIMEOUT_S,
        wait: float = 0.0,
        label: str = "",
        device: str | None = None,
        views: bool = False,
    ) -> TensorReceiver:
        """Open a channel to receive, from the oldest step that was not acknowledged.

        Parameters
        ----------
        name : str
            Of the channel.
        specs : mapping of name to (dtype, shape)
            What is expected; None in a shape for a dimension that may vary.
        timeout : float
            Seconds that a wait lasts where nothing else is said.
        wait : float
            Seconds to wait for the channel to be created.
        label : str
            For messages; the script's name by default.
        device : str, optional
            Which CUDA device reads what comes by the carrier "cuda"; by default the sender's.
        views : bool
            Carriers "memfd" and "cuda": hand out views in place of copies. They must be gone when
            their step's context ends, which waits for the device's work; if not, that is an error.

        Returns
        -------
        TensorReceiver

        Raises
        ------
        TypeError, ValueError
            An argument is none.
        BusNotFoundError
            There is no such channel.
        BusBusyError
            Another living process receives.
        LayoutMismatchError
            What is there is no channel of this version.
        """
        check_flag("views", views)
        reading = None if device is None else known_device(device)
        return TensorReceiver(
            name,
            specs=specs,
            timeout=timeout,
            wait=wait,
            label=label,
            device=reading,
            views=views,
        )

    @staticmethod
    def group(
        name: str,
        *,
        senders: int,
        receivers: int,
        slices: Mapping[str, int] | None = None,
    ) -> ChannelGroup:
        """Say which ranks of an engine send to which of a trainer; every rank says the same.

        Equal counts are paired by rank. With more receivers each sender deals its steps among
        some of them, with more senders each receiver takes from some.

        Parameters
        ----------
        name : str
            Channels are called ``NAME.sender.receiver``, by ranks.
        senders, receivers : int
            How many; one is a multiple of the other.
        slices : mapping of str to int, optional
            Tensors of which each sender has a slice, and the dimension that joins them.

        Returns
        -------
        ChannelGroup
            ``sender(rank, ...)`` and ``receiver(rank, specs=...)`` take the options of `create`
            and `open`.
        """
        return ChannelGroup(
            name, senders, receivers, slices, TensorChannel.create, TensorChannel.open
        )
