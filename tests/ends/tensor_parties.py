"""Parties with weights and tensors: publisher, subscriber, sender, receiver.

Invariant: elements of a version or a step equal its number: a torn version or step shows.
"""

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import torch
from bus_parties import Party, all_of
from endings import Held, Task

from shmbus import BusNotFoundError, PeerGoneError, WaitTimeoutError
from shmbus.tensors import ChannelClosedError, TensorChannel
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

WAIT_S = 10.0
ELEMENTS, SLOTS = 1000, 4
SPECS = {"a": ("int64", (None,))}


class TensorParty(Party):
    def prepare(self, task: Task) -> None:
        pass

    def press(self, task: Task, label: str) -> list[str]:
        return []


# --- weights


def model() -> torch.nn.Module:
    module = torch.nn.Module()
    for name in ("a", "b"):
        value = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float32))
        module.register_parameter(name, value)
    return module


class Publishing:
    def __init__(self, name: str, **options: Any) -> None:
        self.model = model()
        self.publisher = WeightPublisher(
            name, ModuleSource(self.model), carrier="shm", timeout=WAIT_S, **options
        )

    def publish(self, version: int) -> None:
        publish(self.publisher, self.model, version)


def publish(publisher: WeightPublisher, source: torch.nn.Module, version: int) -> None:
    with torch.no_grad():
        for each in source.parameters():
            each.fill_(version)
    publisher.publish(version=version)


def check_weights(weights: Any) -> int:
    for name in ("a", "b"):
        assert bool((weights[name] == weights.version).all()), f"version {weights.version} is torn"
    return int(weights.version)


class PublisherParty(TensorParty):
    """A WeightPublisher; the other side holds the previous version."""

    ALONE = True

    def prepare(self, task: Task) -> None:
        before = Publishing(task.name, slots=SLOTS, keep=True)
        before.publish(1)
        before.publisher.close()

    def meet(self, task: Task) -> Any:
        subscriber = WeightSubscriber(task.name)
        self.weights = [*getattr(self, "weights", []), subscriber.latest(timeout=WAIT_S)]
        return subscriber

    def live(self, task: Task) -> Held:
        made = Publishing(task.name, slots=SLOTS)
        held = Held(self, task, made.publisher, [made.model])
        held.newest = 1000 * task.life  # type: ignore[attr-defined]
        task.say(life=task.life)
        if task.held == "version":
            self._publish(held)
        return held

    def _publish(self, held: Held) -> None:
        held.newest += 1  # type: ignore[attr-defined]
        publish(held.handle, held.things[0], held.newest)  # type: ignore[attr-defined]
        held.task.say(newest=held.newest)  # type: ignore[attr-defined]

    def touch(self, held: Held) -> None:
        if held.task.held == "version":
            self._publish(held)

    def wait(self, held: Held) -> None:
        # torch aborts a process that ends with a daemon thread in torch.
        while held.task.held == "version" and self.how != "teardown":
            self._publish(held)
        signal.pause()

    def call_for(self, held: Held) -> Callable[[], Any]:
        held.newest += 1  # type: ignore[attr-defined]
        version = held.newest  # type: ignore[attr-defined]
        return lambda: (publish(held.handle, held.things[0], version), version)[1]

    def was_called(self, held: Held, done: Any) -> None:
        held.task.say(newest=done)

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        newest = max([1, *(said.get("newest", 1) for said in facts)])
        with WeightSubscriber(task.name) as subscriber:
            if self.how in ("close", "with"):
                # A publisher's orderly end removes its weights.
                self._is_gone(subscriber)
            else:
                with subscriber.latest(timeout=0.5) as weights:
                    found = check_weights(weights)
                    assert newest <= found, f"version {found} is there, and not {newest}"
        with WeightSubscriber(task.name) as subscriber:
            after = Publishing(task.name, slots=SLOTS)
            for version in range(10_000, 10_000 + 2 * SLOTS):
                after.publish(version)
            with subscriber.latest(timeout=0.5) as weights:
                assert check_weights(weights) == version
            after.publisher.close()

    def _is_gone(self, subscriber: WeightSubscriber) -> None:
        try:
            with subscriber.latest(timeout=0.0) as weights:
                raise AssertionError(f"version {weights.version} is there after close()")
        except WaitTimeoutError:
            pass


class SubscriberParty(TensorParty):
    """A WeightSubscriber; the other side publishes."""

    OUTLIVED = True

    def meet(self, task: Task) -> Any:
        made = Publishing(task.name, keep=True)
        made.publish(1)
        return made.publisher

    def live(self, task: Task) -> Held:
        subscriber = WeightSubscriber(task.name)
        weights = subscriber.latest(timeout=WAIT_S)
        assert check_weights(weights) == 1
        things: list[Any] = []
        if task.held == "version":
            things.append(weights)
        elif task.held == "views":
            things += [weights["a"], weights["b"]]
            weights.close()
        else:
            weights.close()
        return Held(self, task, subscriber, things)

    def touch(self, held: Held) -> None:
        if held.task.held == "version":
            check_weights(held.things[0])
        for each in held.things if held.task.held == "views" else ():
            assert bool((each == 1).all()), "a view has changed"

    def wait(self, held: Held) -> None:
        held.handle.wait(newer_than=1_000_000)

    def call_for(self, held: Held) -> Callable[[], Any]:
        return lambda: held.handle.latest(timeout=0.0)

    def was_called(self, held: Held, done: Any) -> None:
        check_weights(done)
        held.things.append(done)

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        with WeightSubscriber(task.name) as subscriber:
            with subscriber.latest(timeout=WAIT_S) as weights:
                assert check_weights(weights) == 1
            after = Publishing(task.name)
            # More versions than slots: a slot still held by the dead would block.
            for version in range(2, 9):
                after.publish(version)
                with subscriber.latest(timeout=WAIT_S) as weights:
                    assert check_weights(weights) == version
            after.publisher.close()


# --- channels


def step_of(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((ELEMENTS,), number, dtype=torch.int64)}


def check_step(item: Any) -> int:
    assert bool((item["a"] == item.step).all()), f"step {item.step} is torn"
    return int(item.step)


def create(name: str) -> Any:
    return TensorChannel.create(name, slots=SLOTS, carrier="host", specs=SPECS, timeout=WAIT_S)


def open_channel(name: str) -> Any:
    return TensorChannel.open(name, specs=SPECS, timeout=WAIT_S)


def drain(name: str) -> list[int]:
    """Receive and acknowledge the remaining steps of an ended sender."""
    found: list[int] = []
    try:
        receiver = open_channel(name)
    except BusNotFoundError:
        return found  # both sides left an empty channel
    with receiver:
        while True:
            try:
                with receiver.recv(timeout=0.2) as item:
                    found.append(check_step(item))
            except (ChannelClosedError, PeerGoneError, WaitTimeoutError):
                return found


def use_anew(name: str) -> None:
    with create(name) as sender, open_channel(name) as receiver:
        for _ in range(2 * SLOTS):
            number = sender.next_step
            sender.send(step_of(number))
            with receiver.recv() as item:
                assert check_step(item) == number


class SenderParty(TensorParty):
    """The sending side; the other side holds a step."""

    ALONE = True
    MEETS_LATER = True

    def meet(self, task: Task) -> Any:
        receiver = open_channel(task.name)
        self.items = [
            *getattr(self, "items", []),
            *([receiver.recv()] if task.held == "step" else []),
        ]
        return receiver

    def live(self, task: Task) -> Held:
        held = Held(self, task, create(task.name), [])
        held.sent = []  # type: ignore[attr-defined]
        if task.held == "step":
            self._send(held)
        return held

    def _send(self, held: Held) -> bool:
        number = held.handle.next_step
        try:
            held.handle.send(step_of(number), timeout=0.0)
        except (WaitTimeoutError, ChannelClosedError, PeerGoneError):
            return False  # no free slot, or the other side ended
        held.sent.append(number)  # type: ignore[attr-defined]
        held.task.say(sent=held.sent)  # type: ignore[attr-defined]
        return True

    def touch(self, held: Held) -> None:
        if held.task.held == "step":
            self._send(held)

    def wait(self, held: Held) -> None:
        while held.task.held == "step" and self._send(held):
            pass
        # After the other side's end, errors are expected.
        with contextlib.suppress(ChannelClosedError, PeerGoneError):
            held.handle.send(step_of(held.handle.next_step))
        signal.pause()

    def call_for(self, held: Held) -> Callable[[], Any]:
        number = held.handle.next_step
        step = step_of(number)

        def call() -> int:
            try:
                held.handle.send(step, timeout=0.0)
            except (ChannelClosedError, PeerGoneError, WaitTimeoutError):
                return -1
            return number

        return call

    def was_called(self, held: Held, done: Any) -> None:
        if done >= 0:
            held.sent.append(done)  # type: ignore[attr-defined]
            held.task.say(sent=held.sent)  # type: ignore[attr-defined]

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        sent = sorted(all_of(facts, "sent"))
        found = drain(task.name)
        assert found == sorted(found) and set(sent) <= set(found), f"sent {sent}, came {found}"
        more = set(found) - set(sent)
        # A call cut short may have sent its step.
        assert len(more) <= (2 if self.how in INTERRUPTED else 0), f"sent {sent}, came {found}"
        use_anew(task.name)


#: Ends possible between a step's sending and its report.
INTERRUPTED = ("SIGTERM", "SIGINT", "SIGKILL", "teardown", "malloc")


class ReceiverParty(TensorParty):
    """The receiving side; the other side sent four steps."""

    ALONE = True
    OUTLIVED = True

    def meet(self, task: Task) -> Any:
        sender = create(task.name)
        for _ in range(SLOTS):
            sender.send(step_of(sender.next_step))
        return sender

    def live(self, task: Task) -> Held:
        held = Held(self, task, open_channel(task.name), [])
        with held.handle.recv() as item:
            acked = [check_step(item)]
        task.say(acked=acked)
        if task.held != "nothing":
            item = held.handle.recv()
            assert check_step(item) == acked[0] + 1
            held.things += [item] if task.held == "step" else [item["a"]]
        return held

    def touch(self, held: Held) -> None:
        if held.task.held == "step":
            check_step(held.things[0])

    def wait(self, held: Held) -> None:
        item = held.handle.recv()
        check_step(item)
        signal.pause()

    def call_for(self, held: Held) -> Callable[[], Any]:
        return lambda: held.handle.recv(timeout=0.0)

    def was_called(self, held: Held, done: Any) -> None:
        check_step(done)

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        acked = all_of(facts, "acked")
        found = drain(task.name)
        assert found == sorted(set(range(SLOTS)) - acked), f"acknowledged {acked}, came {found}"
        use_anew(task.name)


TENSOR_PARTIES: dict[str, type[Party]] = {
    "publisher": PublisherParty,
    "subscriber": SubscriberParty,
    "sender": SenderParty,
    "receiver": ReceiverParty,
}
