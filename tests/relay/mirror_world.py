"""Mirrors and the trainer's node in simulated time, with decisions of the real machines."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from typing import Any

from shmbus.relay.distribution import Distribution, Hop
from shmbus.relay.messages import MirrorState, PiecesGone, PiecesWanted, Transfer
from shmbus.relay.mirror_party import Mirror

SOURCE = "weights"
ROUND_S, HELLO_S = 0.05, 1.0
PIECES = 200


class Node:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.pure = Mirror()
        self.sequence = 0
        self.done: Transfer | None = None
        self.told_s = -HELLO_S

    def say(self) -> None:
        """Report its progress to the trainer's node."""
        self.told_s = self.world.now_s
        pure = self.pure
        state = MirrorState(
            self.name, self.name, "p" if self.sequence else "", self.sequence, self.sequence,
            self.done, pure.getting, pure.upstream, pure.count, "", 0,
        )  # fmt: skip
        self.world.send(self.name, SOURCE, state)

    def take(self, sender: str, message: Any) -> None:
        pure, now_s = self.pure, self.world.now_s
        match message:
            case Hop():
                if message.transfer.base not in (0, self.sequence):
                    self.say()
                    return
                if message.transfer != pure.getting:
                    pure.begin(message.transfer, self.world.pieces(message.transfer))
                self.ask(pure.attach(message.upstream, now_s))
                self.say()
            case PiecesWanted():
                pure.asked(sender, message)
                for number in pure.due(sender, self.done, PIECES):
                    self.world.piece(self.name, sender, message.transfer, number)
            case PiecesGone() if message.transfer == pure.getting and pure.upstream == SOURCE:
                pure.end()
                self.say()
            case (Transfer() as transfer, int() as number) if pure.lacks(transfer, number):
                for to, each in pure.take(number, now_s):
                    self.world.piece(self.name, to, transfer, each)
                self.ask(pure.ask())
                if pure.is_whole:
                    self.sequence, self.done = transfer.sequence, transfer
                    self.world.finished[self.name, transfer.sequence] = now_s
                    pure.end()
                    self.say()

    def ask(self, wanted: list[PiecesWanted]) -> None:
        for message in wanted:
            self.world.send(self.name, self.pure.upstream, message)

    def round(self) -> None:
        self.ask(self.pure.round(self.world.now_s))
        if self.pure.getting is not None or self.world.now_s - self.told_s >= HELLO_S:
            self.say()


class World:
    """A trainer's node and its mirrors, in simulated seconds."""

    def __init__(self, names: list[str], seed: int, *, loss: float = 0.0, rate: float = 400.0):
        self.rng = random.Random(seed)
        self.loss, self.now_s = loss, 0.0
        self.rate: dict[str, float] = defaultdict(lambda: rate)
        self.names = names
        self.pure = Distribution(SOURCE, names, 1)
        self.nodes = {name: Node(self, name) for name in names}
        self.stopped: dict[str, float] = {}
        self.kept: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        self.here: set[Transfer] = set()
        self.newest = 0
        self.sent: Counter[int] = Counter()
        self.finished: dict[tuple[str, int], float] = {}
        self._busy_s: dict[str, float] = defaultdict(float)
        self._events: list[tuple[float, int, str, str, Any]] = []
        self._numbers = itertools.count()
        self._next_round_s = 0.0

    def pieces(self, transfer: Transfer) -> int:
        """Return the number of a transfer's pieces: a patch has few."""
        return PIECES // 20 if transfer.base else PIECES

    def send(self, sender: str, to: str, message: Any, after_s: float = 0.0) -> None:
        """Have a message come, twice, or never."""
        for _ in range(2 if self.rng.random() < self.loss / 2 else 1):
            if self.rng.random() < self.loss:
                continue
            due_s = self.now_s + after_s + self.rng.uniform(0.0005, 0.003)
            heapq.heappush(self._events, (due_s, next(self._numbers), sender, to, message))

    def piece(self, sender: str, to: str, transfer: Transfer, number: int) -> None:
        """Have a piece come, as soon as its sender's link is free."""
        self.sent[sender] += 1
        free_s = max(self._busy_s[sender], self.now_s) + 1.0 / self.rate[sender]
        self._busy_s[sender] = free_s
        self.send(sender, to, (transfer, number), free_s - self.now_s)

    def publish(self, *, patch: bool = False) -> None:
        self.newest += 1
        whole = Transfer("p", self.newest, 0)
        base = self.newest - 1 if patch else 0
        self.here |= {whole, whole._replace(base=base)}
        self.pure.publish(whole, PIECES, base, PIECES // 20, self.now_s)

    def kill(self, name: str) -> None:
        """Have a mirror begin anew, empty."""
        self.nodes[name] = Node(self, name)
        self.kept.pop(name, None)

    def _take(self, sender: str, to: str, message: Any) -> None:
        if to in self.stopped:
            self.kept[to].append((sender, message))
        elif to != SOURCE:
            self.nodes[to].take(sender, message)
        elif isinstance(message, MirrorState):
            self.pure.hear(message, self.now_s)
        elif message.transfer not in self.here:
            self.send(SOURCE, sender, PiecesGone(message.transfer))
        else:
            for number in message.pieces:
                self.piece(SOURCE, sender, message.transfer, number)

    def _round(self) -> None:
        for name, until_s in list(self.stopped.items()):
            if until_s <= self.now_s:
                del self.stopped[name]
                for sender, message in self.kept.pop(name, []):
                    self.nodes[name].take(sender, message)
        for name, node in self.nodes.items():
            if name not in self.stopped:
                node.round()
        for transfer in [each for each in self.here if not self.pure.keeps(each, self.now_s)]:
            self.here.discard(transfer)
            self.pure.let_go(transfer)
        for hop in self.pure.round(self.now_s):
            assert hop.upstream != hop.mirror
            self.send(SOURCE, hop.mirror, hop)

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if self._events and self._events[0][0] <= self._next_round_s:
                self.now_s, _, sender, to, message = heapq.heappop(self._events)
                self._take(sender, to, message)
            else:
                self.now_s = self._next_round_s
                self._next_round_s += ROUND_S
                self._round()

    def run_until_all_have(self, version: int, most_s: float = 120.0) -> None:
        until_s = self.now_s + most_s
        while self.now_s < until_s:
            if all(node.sequence >= version for node in self.nodes.values()):
                return
            self.run(0.05)
        there = {name: node.sequence for name, node in self.nodes.items()}
        raise AssertionError(f"after {most_s:g} s: {there}, expected {version}")
