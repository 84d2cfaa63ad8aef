"""The two doors to a channel of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmbus.base.arguments import check_flag, known_device
from shmbus.channel.sender import DEFAULT_TIMEOUT_S
from shmbus.tensors.carrier_types import Carrier, choose_carrier
from shmbus.tensors.channel_group import ChannelGroup
from shmbus.tensors.tensor_receiver import TensorReceiver
from shmbus.tensors.tensor_sender import TensorSender


class TensorChannel:
    """Named tensors of a step, from one process to another process of the same machine.

    `create` returns the sending side, `open` the receiving side, `group` a sender to several ranks:
    docs/colocation.md has both sides of an example.
    """

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
        """Create a channel, or continue after its last sender's end.

        Parameters
        ----------
        name : str
            Name in the form of a bus name, for example "run1.hidden".
        slots : int, optional
            Steps in flight, 1 to 8; default 2.
        carrier : "auto" | "host" | "memfd" | "cuda" | Carrier
            Kind of memory; "auto" means "cuda" with a CUDA device, else "host".
        device : str, optional
            Device of the tensors, for example "cuda:0"; default CPU.
        max_bytes : int | str, optional
            Limit of a step's bytes; default "16GiB".
        specs : mapping of name to (dtype, shape), optional
            Sent tensors; by default the first step states them.
        timeout : float
            Default seconds of a wait.
        label : str
            Name in messages; default: the script's name.

        Returns
        -------
        TensorSender

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or belongs to another carrier.
        DeviceMismatchError
            This process does not see the device.
        BusBusyError
            Another living process sends.
        LayoutMismatchError
            The existing file is no channel of this version.
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
        """Open a channel to receive, from the oldest unacknowledged step.

        Parameters
        ----------
        name : str
            Name of the channel.
        specs : mapping of name to (dtype, shape)
            Expected tensors; None in a shape for a variable dimension.
        timeout : float
            Default seconds of a wait.
        wait : float
            Seconds to wait for the channel to be created.
        label : str
            Name in messages; default: the script's name.
        device : str, optional
            CUDA device for reading with the carrier "cuda"; default: the sender's.
        views : bool
            Carriers "memfd" and "cuda": hand out views in place of copies. Release them before the
            step's context ends; the context waits for the device's work and raises on a surviving
            view.

        Returns
        -------
        TensorReceiver

        Raises
        ------
        TypeError, ValueError
            An argument is invalid.
        BusNotFoundError
            The channel does not exist.
        BusBusyError
            Another living process receives.
        LayoutMismatchError
            The existing file is no channel of this version.
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
    def group(name: str, *, senders: int, receivers: int) -> ChannelGroup:
        """Map an engine's sending ranks to a trainer's receiving ranks.

        Every rank passes equal counts. Equal counts are paired by rank. With more receivers, a
        sender deals its steps among several; with more senders, a receiver takes from several.

        Parameters
        ----------
        name : str
            Channels are called ``NAME.sender.receiver``, by ranks.
        senders, receivers : int
            Counts of ranks; the larger count must be a multiple of the smaller.

        Returns
        -------
        ChannelGroup
            ``sender(rank, ...)`` and ``receiver(rank, specs=...)`` take the options of `create`
            and `open`.
        """
        return ChannelGroup(name, senders, receivers, TensorChannel.create, TensorChannel.open)
