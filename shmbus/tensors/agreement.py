"""Comparison of both sides' specs, stated in the segment.

Invariants:

- Every wait checks the specs first; a mismatch ends the wait on both sides, in any order of
  arrival.
- A dead process's statement never counts against a process started after its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from shmbus.base.arguments import check_int, is_text
from shmbus.base.closing import ClosedForReason
from shmbus.channel import ChannelError
from shmbus.channel.endpoint import Endpoint
from shmbus.errors import DamagedError
from shmbus.tensors.views import DTYPE_BYTES, has_memory

#: Limit of a dimension: above any memory, within every reader's integers.
_MOST_SIZE: Final = (1 << 63) - 1


class SpecMismatchError(ChannelError):
    """Mismatch of sent and expected tensors; both sides get the error, with both specs."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Dtype and shape of one tensor of a step."""

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        shape = ", ".join("*" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{shape}]"


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statement of one side in the segment."""

    specs: dict[str, TensorSpec]
    exact: bool = True
    refused: str = ""
    claim: int = 0


_STATEMENTS: Final = msgspec.msgpack.Decoder(Statement)


def parse_specs(specs: Mapping[Any, Any]) -> dict[str, TensorSpec]:
    """Check a user's specs."""
    if not isinstance(specs, Mapping):
        raise TypeError(f"specs: expected (dtype, shape) by name, got {type(specs).__name__}")
    parsed = {}
    for name, spec in specs.items():
        if not isinstance(name, str):
            raise TypeError(f"specs: expected names as str, got {name!r}")
        if not is_text(name):
            raise ValueError(f"specs: expected names that UTF-8 can encode, got {name!a}")
        dtype: Any
        shape: Any
        if isinstance(spec, TensorSpec):
            dtype, shape = spec.dtype, spec.shape
        else:
            try:
                dtype, shape = spec
            except (TypeError, ValueError):
                raise TypeError(f"specs[{name!r}]: expected (dtype, shape), got {spec!r}") from None
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"specs[{name!r}]: expected a dtype of torch, got {dtype!r}")
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"specs[{name!r}]: expected a shape, got {shape!r}")
        parsed[name] = TensorSpec(dtype, tuple(_parsed_size(name, size) for size in shape))
    return parsed


def _parsed_size(name: str, size: object) -> int | None:
    if size is None:
        return None
    try:
        return check_int("size", size, 0, _MOST_SIZE)
    except (TypeError, ValueError):
        raise ValueError(
            f"specs[{name!r}]: expected sizes from 0 on, or None for a variable size, got {size!r}"
        ) from None


def unsendable(tensor: torch.Tensor, device: torch.device) -> str:
    """Return the reason why a device cannot send a tensor; empty for a sendable tensor."""
    if torch.nn.parameter.is_lazy(tensor):
        return "expected a shape, got a parameter before its module's first forward pass"
    if tensor.device != device:
        return f"expected a tensor on the agreed device {str(device)!r}, got {str(tensor.device)!r}"
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else "one"
        return (
            f"expected a plain tensor, got {kind} of the layout {tensor.layout}; call to_dense(), "
            "or send its parts"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return f"expected one of the dtypes {', '.join(DTYPE_BYTES)}, got {dtype}"
    if not tensor.is_contiguous():
        return f"expected a contiguous tensor, got strides {tensor.stride()}"
    if tensor.numel() == 0:
        return f"expected elements, got shape {list(tensor.shape)}; use skip()"
    if not is_there(tensor):
        return (
            "expected a tensor with memory for all of its elements; its storage was freed or cut, "
            "as FSDP does between forward passes, or it stands for others, as in a transform of "
            "torch.func or FakeTensorMode"
        )
    return ""


def is_there(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor holds memory for every element, on its device."""
    try:
        return has_memory(tensor) and tensor.untyped_storage().device == tensor.device
    except NotImplementedError:  # torch's word for a tensor without a storage
        return False


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Return the specs of tensors."""
    return {
        name: TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def differences(sent: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> list[str]:
    """List the contradictions of two specs; a free dimension contradicts nothing."""
    found = [
        f"tensor {name!r} is expected ({expected[name]}) and not sent"
        for name in sorted(expected.keys() - sent.keys())
    ]
    found += [
        f"tensor {name!r} is sent ({sent[name]}) and not expected"
        for name in sorted(sent.keys() - expected.keys())
    ]
    for name in sorted(sent.keys() & expected.keys()):
        ours, theirs = sent[name], expected[name]
        fits = len(ours.shape) == len(theirs.shape) and all(
            a is None or b is None or a == b for a, b in zip(ours.shape, theirs.shape, strict=True)
        )
        if ours.dtype != theirs.dtype or not fits:
            found.append(f"tensor {name!r}: expected {theirs}, sent {ours}")
    return found


def step_differences(
    step: Mapping[str, TensorSpec], sender: Statement | None, receiver: Statement | None
) -> list[str]:
    """List the differences between a step and the agreement."""
    found: list[str] = []
    if receiver is not None:
        found += differences(step, receiver.specs)
    if sender is not None and not found:
        specs = sender.specs
        if not sender.exact:
            specs = {
                name: TensorSpec(spec.dtype, (None,) * len(spec.shape))
                for name, spec in specs.items()
            }
        found += differences(step, specs)
    return found


def show(specs: Mapping[str, TensorSpec]) -> str:
    """Show specs in an error."""
    return "{" + ", ".join(f"{name}: {spec}" for name, spec in sorted(specs.items())) + "}"


def size_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor without free dimensions."""
    return DTYPE_BYTES[spec.dtype] * math.prod(size or 0 for size in spec.shape)


def acked_step_of(state: object) -> int:
    """Return the step in a `state_dict`; raise TypeError or ValueError for anything else."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected what state_dict() returned, got {type(state).__name__}")
    if "acked_step" not in state:
        raise ValueError(f"state: expected 'acked_step' of state_dict(), got {sorted(state)}")
    return check_int("acked_step", state["acked_step"], -1, (1 << 63) - 2)


class Agreement:
    """Record of one side's comparisons with the peer."""

    def __init__(self, endpoint: Endpoint, side: str) -> None:
        self._endpoint = endpoint
        self._side = side
        self._other = "receiver" if side == "sender" else "sender"
        self._seen = 0
        self.own: Statement | None = None
        self.other: Statement | None = None
        alive, claims = endpoint.presence(self._other)
        # Claim number of a peer already gone at this side's start; 0 for none.
        self._gone_before = 0 if alive else claims
        # Claim number of the peer in the last reported mismatch.
        self._told = 0
        # Cache of earlier comparisons: both statements unchanged, and a step like the previous one.
        self._agreed = False
        self._passed: Mapping[str, TensorSpec] | None = None
        endpoint.on_wake = self.check

    @property
    def sender(self) -> Statement | None:
        """Return the sender's statement."""
        return self.own if self._side == "sender" else self.other

    @property
    def receiver(self) -> Statement | None:
        """Return the receiver's statement."""
        return self.own if self._side == "receiver" else self.other

    def state(self, statement: Statement) -> None:
        """Publish this side's specs in the segment."""
        _, claim = self._endpoint.presence(self._side)
        statement = msgspec.structs.replace(statement, claim=claim)
        if statement == self.own:
            return
        try:
            self._endpoint.state(msgspec.msgpack.encode(statement))
        except ValueError as error:
            raise ValueError(
                f"specs: {error}; give the {len(statement.specs)} tensors shorter names, or send "
                "several as one; nothing was sent"
            ) from error
        self.own = statement
        self._agreed, self._passed = False, None

    def forget_own(self) -> None:
        """Let the next step restate the specs: the step behind the old statement was never sent."""
        self.own = None
        self._agreed, self._passed = False, None

    def check(self) -> None:
        """Compare with the peer."""
        if self._endpoint.stated(self._other) != self._seen:
            version, data = self._endpoint.statement(self._other)
            if version == 0:
                return
            try:
                self.other = _STATEMENTS.decode(data)
            except msgspec.MsgspecError as error:
                raise DamagedError(
                    f"channel {self._endpoint.name!r}: invalid specs of the {self._other} ({error})"
                ) from error
            self._seen = version
            self._agreed, self._passed = False, None
        if self._agreed:
            return
        if self.other is None or self.own is None or self.sender is None or self.receiver is None:
            return
        found = [] if self.other.refused else differences(self.sender.specs, self.receiver.specs)
        if not (self.other.refused or found):
            self._agreed = True
            return
        if self._forget_the_gone():
            return
        self._told = self.other.claim
        if self.other.refused:
            raise SpecMismatchError(
                f"channel {self._endpoint.name!r}: the {self._other} has refused a step: "
                f"{self.other.refused}"
            )
        raise self.mismatch(found)

    def has_passed(self, step: Mapping[str, TensorSpec]) -> bool:
        """Return whether the previous passing step used exactly these specs."""
        return step is self._passed

    def differences_of(self, step: Mapping[str, TensorSpec]) -> list[str]:
        """List a step's differences from the agreed specs, on either side."""
        if step == self._passed:
            return []
        sender = self.own if self._side == "sender" else None
        found = step_differences(step, sender, self.receiver)
        if found and sender is not None and self.other is not None and self._forget_the_gone():
            found = step_differences(step, sender, self.receiver)
        if not found:
            self._passed = step
        return found

    def _forget_the_gone(self) -> bool:
        """Forget the peer's statement unless it binds this side."""
        assert self.other is not None
        claim = self.other.claim
        alive, newest = self._endpoint.presence(self._other)
        succeeded = claim != newest
        ended_before = claim == self._gone_before
        told_and_gone = claim == self._told and not alive
        if not (succeeded or ended_before or told_and_gone):
            return False
        self.other = None
        self._agreed, self._passed = False, None
        return True

    def mismatch(self, found: list[str]) -> SpecMismatchError:
        """Build the error with the differences and both specs."""
        sent = "nothing yet" if self.sender is None else show(self.sender.specs)
        expected = "nothing yet" if self.receiver is None else show(self.receiver.specs)
        return SpecMismatchError(
            f"channel {self._endpoint.name!r}: {'; '.join(found)}. The sender states {sent}, the "
            f"receiver {expected}; no step passes: correct one side and start it again"
        )


class TensorSide(ClosedForReason):
    """Common part of a channel's sides."""

    _channel: Endpoint

    @property
    def name(self) -> str:
        """Return the channel's name."""
        return self._channel.name

    @property
    def acked_step(self) -> int:
        """Return the last step acknowledged by the receiver."""
        return self._channel.acked_step

    def state_dict(self) -> dict[str, int]:
        """Return the last acknowledged step, for a checkpoint."""
        return {"acked_step": self.acked_step}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._channel!r}>"
