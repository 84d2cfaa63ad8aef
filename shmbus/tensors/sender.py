"""Sending tensors.

Invariants: a step is checked whole before a byte of it is written; each tensor is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from shmbus._arguments import check_int64, is_text
from shmbus.tensors.agreement import Agreement
from shmbus.tensors.config import Carrier
from shmbus.tensors.places import StepForm, encode_meta
from shmbus.tensors.specs import (
    SpecMismatchError,
    Statement,
    acked_step_of,
    is_there,
    parse_specs,
    specs_of,
    unsendable,
)
from shmbus.tensors.writers import SendAlike, open_writer
from shmbus.weights.seen import comparer_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TensorSender"]


class TensorSender:
    """The sending side; `TensorChannel.create` makes it.

    Parameters
    ----------
    name : str
        Of the channel.
    carrier : HostCarrier | MemfdCarrier | CudaCarrier
        Which memory, how many slots.
    specs : mapping, optional
        What is sent; the first step says it where this does not.
    timeout : float
        Seconds that a wait lasts where nothing else is said.
    label : str
        For messages.
    """

    def __init__(
        self,
        name: str,
        carrier: Carrier,
        *,
        specs: Mapping[str, Any] | None,
        timeout: float,
        label: str,
    ) -> None:
        self.carrier = carrier
        declared = None if specs is None else Statement(parse_specs(specs))
        self._channel, self._writer = open_writer(name, carrier, timeout=timeout, label=label)
        self._agreement = Agreement(self._channel, "sender")
        # Of the last step: what was checked and computed for it holds for those that are like it.
        self._form: StepForm | None = None
        self._form_key: list[tuple[str, torch.dtype, torch.Size]] = []
        self._form_names: list[str] = []
        # Compares all tensors of a step in one call, once two like each other have come.
        self._form_guard: Callable[..., bool] | None = None
        # Sends a step like the last one in one call, where the carrier has such a thing.
        self._alike: tuple[bytes, SendAlike] | None = None
        self._alike_since: int | None = None
        if declared is not None:
            try:
                self._agreement.state(declared)
            except BaseException as error:
                self.close(f"{type(error).__name__}: {error}")
                raise

    @property
    def name(self) -> str:
        """Return the channel's name."""
        return self._channel.name

    @property
    def next_step(self) -> int:
        """Return the step that is sent next."""
        self._writer.settle()
        return self._channel.next_step

    @property
    def acked_step(self) -> int:
        """Return the last step that the receiver has acknowledged."""
        return self._channel.acked_step

    @property
    def growths(self) -> int:
        """Return how often a slot got more memory."""
        return self._writer.growths

    def send(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copy a step's tensors into a slot and send them; they may be changed afterwards.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            Contiguous, not empty, with memory, on the carrier's device; of a CUDA device they may
            be changed on the stream that is current now. A step may have a meta alone.
        step : int, optional
            Which step it is, to be sure.
        meta : mapping, optional
            What MessagePack can hold, of at most 16 MiB.
        timeout : float, optional
            Seconds to wait for a slot.

        Returns
        -------
        int
            The step.

        Raises
        ------
        ValueError, TypeError
            A tensor cannot be sent; the message names it. Nothing was sent.
        SpecMismatchError
            The step is not what was agreed, or the receiver expects something else.
        StepOrderError
            Another step is next.
        WaitTimeoutError, PeerGoneError, ChannelClosedError
            No slot became free, and why.
        CapacityError
            The memory is full, or the step is larger than `max_bytes`.
        """
        if step is not None and type(step) is not int:
            step = check_int64("step", step)
        if timeout is not None:
            self._channel.require_timeout(timeout)
        extra = encode_meta(meta)
        alike = self._alike
        if alike is not None:
            head, send = alike
            sent = send(tensors, head + extra if extra else None, step)
            if sent is not None:
                return sent
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"channel {self.name!r}: expected tensors by name, got {type(tensors).__name__}; "
                "nothing was sent"
            )
        number = self._writer.next_step
        if step is not None and step != number:
            self._writer.settle()
            self._channel.check_step(step)
        undeclared = self._agreement.own is None
        try:
            self._send(dict(tensors), number, extra, timeout)
        except SpecMismatchError:
            raise  # both sides are held to what has contradicted each other
        except BaseException:
            if undeclared:
                self._agreement.forget_own()
            raise
        return number

    def _send(
        self,
        tensors: dict[str, torch.Tensor],
        number: int,
        extra: bytes,
        timeout: float | None,
    ) -> None:
        form = self._form if self._is_like_the_last(tensors) else None
        self._agreement.check()
        if form is None or not self._agreement.has_passed(form.specs):
            self._alike = None
            form = self._agreed_form(tensors, number)
        elif self._alike is None or self._alike_since != self._agreement.agreed:
            # The second of its kind: there will be more.
            self._alike_since = self._agreement.agreed
            self._alike = self._writer.alike(form, self._alike_since, self._form_guard)
        self._writer.write(tensors, form, extra, timeout)

    def _is_like_the_last(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a step can be sent as the last one was: it has the same tensors to look at."""
        guard = self._form_guard
        if guard is not None and [*tensors] == self._form_names and guard(*tensors.values()):
            return all(map(is_there, tensors.values()))
        key = self._form_key
        device = self._writer.device
        if len(key) != len(tensors):
            return False
        tensor: Any  # whatever the caller gave
        for (name, tensor), (known, dtype, shape) in zip(tensors.items(), key, strict=True):
            if not (
                name == known
                and isinstance(tensor, torch.Tensor)
                and tensor.dtype is dtype
                and tensor.shape == shape
                and tensor.device == device
                and tensor.is_contiguous()
                and is_there(tensor)
            ):
                return False
        if guard is None:
            self._form_guard = comparer_of([*tensors.values()])
        return True

    def _agreed_form(self, tensors: Mapping[str, torch.Tensor], step: int) -> StepForm:
        """Check a step against what was agreed."""
        self._check_tensors(tensors, step)
        specs = specs_of(tensors)
        if self._agreement.own is None:
            self._agreement.state(Statement(specs, exact=False))
            self._agreement.check()
        found = self._agreement.differences_of(specs)
        if found:
            raise self._agreement.mismatch([f"step {step}: {each}" for each in found])
        self._form = StepForm(specs)
        self._form_key = [(name, each.dtype, each.shape) for name, each in tensors.items()]
        self._form_names, self._form_guard = [*tensors], None
        return self._form

    def skip(self, *, reason: str, step: int | None = None, timeout: float | None = None) -> int:
        """Say that a step has no tensors: the receiver gets StepSkippedError for it.

        Parameters
        ----------
        reason : str
            Its first 159 bytes are kept.
        step, timeout
            As for `send`.

        Returns
        -------
        int
            The step.
        """
        self._writer.settle()
        return self._channel.skip(reason, step=step, timeout=timeout)

    def fail(self, *, reason: str, step: int | None = None, timeout: float | None = None) -> int:
        """Say that a step could not be made: the receiver gets StepFailedError for it.

        Parameters
        ----------
        reason : str
            Its first 159 bytes are kept.
        step, timeout
            As for `send`.

        Returns
        -------
        int
            The step.
        """
        self._writer.settle()
        return self._channel.fail(reason, step=step, timeout=timeout)

    def state_dict(self) -> dict[str, int]:
        """Return the last acknowledged step, for a checkpoint.

        Returns
        -------
        dict
            With "acked_step".
        """
        return {"acked_step": self._channel.acked_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after a checkpoint's last acknowledged step; `next_step` says with which.

        Parameters
        ----------
        state : mapping
            Of `state_dict`, of either side.

        Raises
        ------
        ChannelError
            A living receiver has steps on their way which the checkpoint does not know.
        """
        self._writer.settle()
        self._channel.resume_after(acked_step_of(state))

    def close(self, reason: str = "") -> None:
        """End the channel; the receiver gets what is on its way, and then ChannelClosedError.

        Memory of this process's own goes with it: without a reason, the receiver is waited for
        first, up to the channel's timeout.

        Parameters
        ----------
        reason : str
            For the receiver.
        """
        try:
            self._writer.close(drain=not reason)
        finally:
            self._channel.close(reason)

    def __repr__(self) -> str:
        return f"<TensorSender over {self._channel!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"channel {self.name!r}, step {step}: expected texts as names, got {name!r}; "
                    "nothing was sent"
                )
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"channel {self.name!r}, step {step}: {name!r}: expected a tensor, got "
                    f"{type(tensor).__name__}; nothing was sent"
                )
            problem = unsendable(tensor, self._writer.device)
            if not is_text(name):
                problem = "expected a name that UTF-8 can encode"
            if problem:
                raise ValueError(
                    f"channel {self.name!r}, step {step}, tensor {name!r}: {problem}; nothing was "
                    "sent, and the channel stays usable"
                )
