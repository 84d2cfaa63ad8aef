"""Receiving tensors.

Invariants: a step is acknowledged when its context ends without an exception, and only then. Its
tensors are views; those that outlive the context keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from shmbus._near_names import UnknownNameError
from shmbus.channel import ChannelReceiver, Message
from shmbus.tensors.agreement import Agreement
from shmbus.tensors.places import (
    Places,
    channel_form,
    decode_meta,
    decode_places,
    head_of,
)
from shmbus.tensors.readers import StepReader
from shmbus.tensors.specs import Statement, TensorSpec, acked_step_of, parse_specs
from shmbus_ext._core import ChannelForm

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StepItem", "TensorReceiver"]

#: Bytes of a refusal that are stated: a statement has 64 KiB, most of it for specs.
_REFUSED_BYTES = 2000

#: Heads that are kept: of each slot's buffer, where steps are alike, with as many again.
_HEADS: Final = 16


class StepItem(Mapping[str, torch.Tensor]):
    """A step's tensors by their names; as a context, its end acknowledges the step.

    Parameters
    ----------
    channel : ChannelReceiver
        Which received it.
    step : int
        Which.
    tensors : dict of Tensor
        Views of its memory, or copies.
    meta : dict
        Of the sender.
    finish : callable
        What has to be done before its slot is given back.
    """

    def __init__(
        self,
        channel: ChannelReceiver,
        step: int,
        tensors: dict[str, torch.Tensor],
        meta: dict[str, Any],
        finish: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._tensors = tensors
        self._finish = finish
        self._open = True
        self.step = step
        self.meta = meta

    def ack(self) -> None:
        """Acknowledge the step, once; its slot may be written again.

        Raises
        ------
        ChannelError
            A view of exported memory is still there; the step comes again.
        """
        if self._open:
            self._open = False
            self._tensors = {}
            try:
                self._finish()
            except BaseException:
                self._channel.drop()
                raise
            self._channel.ack()

    def drop(self) -> None:
        """Give the step back without an acknowledgement: it comes again."""
        if self._open:
            self._open = False
            self._tensors = {}
            self._channel.drop()

    def __getitem__(self, name: str) -> torch.Tensor:
        if not self._open:
            raise KeyError(
                f"{name!r}: step {self.step} is over; take its tensors inside of its context"
            )
        if name not in self._tensors:
            what = f"step {self.step} of channel {self._channel.name!r}"
            raise UnknownNameError(what, name, self._tensors)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<StepItem {self.step} of {self._channel.name!r}: {', '.join(self._tensors)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.ack()
        else:
            self.drop()


class TensorReceiver:
    """The receiving side; `TensorChannel.open` makes it.

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
        For messages.
    device : torch.device, optional
        Which CUDA device reads memory of a CUDA carrier; by default the one that has it.
    views : bool
        Whether its tensors, and those of a memfd, are views instead of copies.
    """

    def __init__(
        self,
        name: str,
        *,
        specs: Mapping[str, Any],
        timeout: float,
        wait: float,
        label: str,
        device: torch.device | None = None,
        views: bool = False,
    ) -> None:
        expected = Statement(parse_specs(specs))
        self._channel = ChannelReceiver(name, timeout=timeout, wait=wait, label=label)
        self._reader = StepReader(self._channel, device=device, views=views)
        try:
            self._agreement = Agreement(self._channel, "receiver")
            self._agreement.state(expected)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        self._item: StepItem | None = None
        # Heads of late, with what was read of them: the next step's is one of them, as a rule.
        self._last: tuple[bytes, int | None] = b"", None
        # How the last steps looked, and for which statement of the sender.
        self._alike: tuple[ChannelForm, int] | None = None
        self._heads: dict[bytes, tuple[Places, dict[str, TensorSpec]]] = {}

    @property
    def name(self) -> str:
        """Return the channel's name."""
        return self._channel.name

    @property
    def acked_step(self) -> int:
        """Return the last acknowledged step."""
        return self._channel.acked_step

    def recv(self, timeout: float | None = None, *, step: int | None = None) -> StepItem:
        """Wait for the oldest step that was not acknowledged.

        Parameters
        ----------
        timeout : float, optional
            Seconds.
        step : int, optional
            Which one is expected, to be sure.

        Returns
        -------
        StepItem
            A context; leaving it acknowledges, an exception in it does not.

        Raises
        ------
        SpecMismatchError
            What is sent is not what is expected; the sender gets it too.
        StepSkippedError, StepFailedError
            The step comes without tensors, and why; the next call has the next step.
        DeviceMismatchError
            The tensors are on a device that this process does not see, or cannot read.
        StepOrderError
            `step` was acknowledged already, or is not the next.
        WaitTimeoutError, PeerGoneError, ChannelClosedError
            Nothing came, and why.
        DamagedError
            What came is not what was sent.
        """
        if self._item is not None:
            self._item.drop()
        message = self._channel.receive(step=step, timeout=timeout, form=self._alike)
        if message.tensors is None:
            self._item = self._open_step(message)
        else:
            meta = decode_meta(message.meta, "meta of a step") if message.meta else {}
            self._item = StepItem(self._channel, message.step, message.tensors, meta, _nothing)
        return self._item

    def _open_step(self, message: Message) -> StepItem:
        what = f"channel {self.name!r}, step {message.step}"
        head = head_of(message.meta)
        places, specs = self._heads.get(head, (None, None))
        if places is None or specs is None:
            places = decode_places(head, what)
            specs = {place.name: TensorSpec(place.dtype, place.shape) for place in places.tensors}
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            self._heads[head] = places, specs
        meta = decode_meta(message.meta[len(head) :], what)
        self._agreement.check()
        found = self._agreement.differences_of(specs)
        if found:
            self._channel.drop()
            assert self._agreement.own is not None
            text = f"step {message.step}: {'; '.join(found)}"[:_REFUSED_BYTES]
            self._agreement.state(Statement(self._agreement.own.specs, refused=text))
            raise self._agreement.mismatch([text])
        try:
            tensors, finish = self._reader.open(message, places)
        except BaseException:
            self._channel.drop()  # it comes again, unless it was acknowledged as lost
            raise
        self._expect_alike(message, places, head)
        return StepItem(self._channel, message.step, tensors, meta, finish)

    def _expect_alike(self, message: Message, places: Places, head: bytes) -> None:
        """Have the next step received in one call, where two like it have come."""
        last = head, self._agreement.agreed
        if last != self._last:
            self._last, self._alike = last, None
        elif self._alike is None and message.memory is not None and places.buffer is None:
            form = channel_form(places.tensors, message.memory.bytes, head)
            if form is not None and last[1] is not None:
                self._alike = form, last[1]

    def state_dict(self) -> dict[str, int]:
        """Return the last acknowledged step, for a checkpoint.

        Returns
        -------
        dict
            With "acked_step".
        """
        return {"acked_step": self._channel.acked_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after a checkpoint's last acknowledged step.

        Parameters
        ----------
        state : mapping
            Of `state_dict`. Earlier steps that come again are acknowledged unseen; a later one
            than the next raises StepOrderError.
        """
        self._channel.resume_after(acked_step_of(state))

    def close(self, reason: str = "") -> None:
        """Leave the channel; a step that is not acknowledged stays for a successor.

        Parameters
        ----------
        reason : str
            For the sender.
        """
        try:
            self._channel.close(reason)
        finally:
            self._reader.close()

    def __repr__(self) -> str:
        return f"<TensorReceiver over {self._channel!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")


def _nothing() -> None:
    """Nothing has to be done."""
