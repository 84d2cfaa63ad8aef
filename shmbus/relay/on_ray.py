"""The relay on Ray: an actor beside each bus, a coordinating actor, and calls to introduce them.

Invariants:

- An actor's arguments are names and numbers, and a restart needs no saved state.
- Ray carries endpoints and drivers' questions; messages and blocks use direct connections.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import re
import resource
import socket
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from shmbus import errors
from shmbus.base.arguments import check_choice, check_flag, check_period
from shmbus.relay.coordinator_party import RelayNote
from shmbus.relay.direct import Direct, Endpoint
from shmbus.relay.host import Host, PartyPlan, check_keep, check_specs, make_policy
from shmbus.relay.weights_party import WeightsNote
from shmbus.segment.names import bus_names

try:
    import ray
except ImportError as error:
    raise ImportError(
        "shmbus.relay carries records by Ray, which is not installed; install the extra on every "
        "node: pip install 'shmbus[ray]'"
    ) from error

_log = logging.getLogger("shmbus.relay")

#: Ray's namespace of every relay; an actor's name contains the relay's.
NAMESPACE: Final = "shmbus"
#: A share of a resource of at least 1: room for up to 1000 actors.
_A_LITTLE: Final = 0.001
#: Calls waiting for a starting actor; further calls are lost, and repeated.
_MOST_PENDING: Final = 10_000
#: Seconds until an unconnected actor gets this actor's endpoint again.
_INTRODUCE_S: Final = 0.5
#: Seconds until a silent coordinator is asked again.
_ASK_AGAIN_S: Final = 0.5
#: Seconds for a connection to a cluster's head.
_REACH_S: Final = 5.0
#: Seconds for an actor's answer.
_ANSWER_S: Final = 10.0
#: The limit for a caller without a timeout.
_LONGEST_ANSWER_S: Final = 86_400.0
_PREFIX: Final = "relay"
_COORDINATOR: Final = "coordinator"
#: Address prefix of actors with weights; a bus's name contains no colon.
_WEIGHTS: Final = "weights:"
#: Prefix of the resource that Ray gives a single node.
_OWN: Final = "node:"
#: Seconds for actors to begin, and seconds after which a reason counts as lasting.
_BEGIN_S: Final = 60.0
_LACKS_S: Final = 3.0
_LOOK_S: Final = 0.1
#: New objects until a cycle collection: the records of a full bus.
_GC_THRESHOLDS: Final = (100_000, 20, 100)


class RelayActor:
    """A Ray actor beside a bus."""

    def __init__(self, plan: bytes) -> None:
        made = _as_it_is(msgspec.json.decode(plan, type=PartyPlan))
        # Cycle collection over many long-lived objects without cycles took a tenth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        # Two connections a peer: 1,000 nodes exceed a shell's usual 1,024 descriptors.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._actors: dict[str, Any] = {}
        self._next_introduction_s: dict[str, float] = {}
        host = ray.util.get_node_ip_address()
        self._direct = Direct(made.address, host, self._introduce, self._take)
        self._host = Host(made, self._direct)
        self._host.start()

    def _take(self, packed: list[bytes], payload: bytes | memoryview) -> None:
        self._host.deliver(packed, payload)

    def _introduce(self, to: str) -> None:
        """Send a named actor this endpoint, at most every 0.5 s: it connects in return."""
        now_s = time.monotonic()
        if now_s < self._next_introduction_s.get(to, 0.0):
            return
        self._next_introduction_s[to] = now_s + _INTRODUCE_S
        try:
            # A handle survives restarts, and needs nothing from Ray's head.
            if to not in self._actors:
                self._actors[to] = ray.get_actor(to, namespace=NAMESPACE)
            meet = self._actors[to].meet.options(enable_task_events=False)
            meet.remote(tuple(self._direct.endpoint))
        except (ValueError, ray.exceptions.RayError):
            self._actors.pop(to, None)  # not running now

    def meet(self, endpoint: tuple[Any, ...]) -> None:
        """Learn another actor's endpoint."""
        self._direct.learn(Endpoint(*endpoint))

    def describe(self) -> dict[str, Any]:
        """Describe the actor with its node and plan."""
        plan = msgspec.json.encode(self._host.plan).decode()
        node = ray.get_runtime_context().get_node_id()
        return {**self._host.describe(), "plan": plan, "node": node}

    def change_peers(self, address: str, joins: bool) -> bool:
        """Take on a peer, or forget a peer that will not come back."""
        return self._host.change_peers(address, joins)


def _named(relay: str) -> list[str]:
    """Return addresses of a relay's actors, excluding relays with a longer name."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in listed if each["namespace"] == NAMESPACE]
    ours, end = f"{_PREFIX}.{relay}.", f".{_COORDINATOR}"
    others = [
        each.removesuffix(_COORDINATOR)
        for each in names
        if each.startswith(ours) and each.endswith(end) and each != ours + _COORDINATOR
    ]
    return sorted(n for n in names if n.startswith(ours) and not n.startswith(tuple(others)))


def _as_it_is(plan: PartyPlan) -> PartyPlan:
    """Return the plan of a coordinator, or of the weights, with peers that joined or left since."""
    if plan.kind not in ("coordinator", "weights"):
        return plan
    prefix = plan.address.removesuffix(_COORDINATOR)
    if plan.kind == "weights":
        prefix = plan.address[: plan.address.index(_WEIGHTS)]
    named = _named(prefix[len(_PREFIX) + 1 : -1])
    mirrors = [each for each in named if each.startswith(prefix + _WEIGHTS)]
    if plan.kind == "weights":
        mirrors = [each for each in mirrors if each != plan.address]
        return msgspec.structs.replace(plan, mirrors=mirrors)
    gone = {*plan.sources, *plan.sinks}.difference(named)
    if gone:
        _log.warning("relay: %s goes on without %s", plan.address, ", ".join(sorted(gone)))
    sinks = [each for each in plan.sinks if each in named]
    sources = [each for each in named if each not in {*sinks, *mirrors, plan.address}]
    return msgspec.structs.replace(plan, sources=sources, sinks=sinks)


class _Place(NamedTuple):
    """A bus on a node, and Ray's names of the node."""

    bus: str
    resource: str
    #: Ray's number of the node.
    node_id: str = ""

    @property
    def node(self) -> str:
        """Name of the node within addresses and files, unique by resource."""
        text = re.sub(r"[^A-Za-z0-9_.-]", "-", self.resource)
        own = self.resource.startswith(_OWN)
        if own or (text == self.resource and not text.startswith(_OWN[:-1] + "-")):
            return text
        return f"{text}-{zlib.crc32(self.resource.encode()):08x}"

    @property
    def name(self) -> str:
        return f"{self.bus}@{self.node}"

    def address(self, relay: str, kind: str = "") -> str:
        return f"{_PREFIX}.{relay}.{kind}{self.name}"


def _probe(name: str) -> bool:
    return name in bus_names()


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _own_resource(node: dict[str, Any]) -> str:
    """Return the resource that Ray gives this node alone."""
    found = [
        each
        for each in node["Resources"]
        if each.startswith(_OWN) and not each.startswith(f"{_OWN}__")
    ]
    return str(found[0])


def _places(spec: str) -> list[_Place]:
    """Find the nodes of a bus: by the named resource, or by the bus's presence."""
    bus, _, resource = spec.partition("@")
    nodes = _nodes()
    if resource:
        having = [node for node in nodes if resource in node["Resources"]]
        if len(having) == 1:
            return [_Place(bus, resource, having[0]["NodeID"])]
        return [_Place(bus, _own_resource(node), node["NodeID"]) for node in having]
    probe = ray.remote(num_cpus=0, max_retries=0)(_probe)
    places = [_Place(bus, _own_resource(node), node["NodeID"]) for node in nodes]
    asked = [probe.options(resources={each.resource: _A_LITTLE}).remote(bus) for each in places]
    asked_of = zip(places, asked, strict=True)
    return [place for place, answer in asked_of if ray.get(answer, timeout=_ANSWER_S)]


def _find_all(what: str, specs: Sequence[str]) -> list[_Place]:
    found: list[_Place] = []
    for spec in specs:
        places = _places(spec)
        if not places:
            names = ", ".join(str(node["NodeManagerHostname"]) for node in _nodes())
            raise errors.BusNotFoundError(
                f"relay: no node has the {what} {spec!r}; asked were {names}. Create it there "
                "first, or name nodes by a resource: NAME@RESOURCE"
            )
        found += places
    return found


def _check_places(places: Sequence[_Place]) -> None:
    """Refuse a bus named twice: a bus allows a single relay, and records would go in circles."""
    found = Counter((each.bus, each.node_id or each.resource) for each in places)
    double = [each for each in places if found[each.bus, each.node_id or each.resource] > 1]
    if double:
        bus, node, _ = double[0]
        raise ValueError(
            f"relay: bus {bus!r} at {node} is named twice; expected each bus once, as a source or "
            "as a trainer's: give the trainer a bus of its own"
        )


def _check_circles(coordinator: str, sources: Sequence[_Place], sinks: Sequence[_Place]) -> None:
    """Refuse a relay whose groups would come back through running relays."""
    onward: dict[str, set[str]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        address = actor["name"]
        if actor["namespace"] != NAMESPACE or not address.endswith(f".{_COORDINATOR}"):
            continue
        plan = None if address == coordinator else _plan_of(address)
        if plan is None:
            continue
        prefix = address.removesuffix(_COORDINATOR)
        sinks_of = {each.removeprefix(prefix) for each in plan.sinks}
        for each in plan.sources:
            onward.setdefault(each.removeprefix(prefix), set()).update(sinks_of)
    reached: set[str] = set()
    found = {each.name for each in sinks}
    while found:
        reached |= found
        found = set().union(*(onward.get(each, set()) for each in found)) - reached
    circle = sorted(reached.intersection(each.name for each in sources))
    if circle:
        raise ValueError(
            f"relay: groups would come back to {circle[0]!r}, the source, through relays that run "
            "from the trainer's bus: stop one of them, or name another bus"
        )


def _plan_of(address: str) -> PartyPlan | None:
    """Return an actor's plan; None without an actor, or of an actor just ended."""
    try:
        actor = ray.get_actor(address, namespace=NAMESPACE)
        runs = ray.get(actor.describe.remote(), timeout=_ANSWER_S)["plan"]
    except (ValueError, ray.exceptions.RayError):
        return None
    return msgspec.json.decode(runs, type=PartyPlan)


def start(
    source: str | Sequence[str],
    trainers: Sequence[str],
    *,
    release: str = "acknowledged",
    weights: bool = False,
    keep: str | None = None,
    keep_sync: float = 1.0,
    address: str | None = None,
    **policy: Any,
) -> Relay:
    """Start a relay, as `shmbus.relay.start` says."""
    sources = check_specs("source", [source] if isinstance(source, str) else source)
    sinks = check_specs("trainers", trainers)
    check_choice("release", release, ("acknowledged", "put"))
    weights = check_flag("weights", weights)
    directory, keep_sync = check_keep(keep, keep_sync, release)
    stash_policy = make_policy(policy)
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address: expected a str or None, got {type(address).__name__}")
    _connect(address)
    from_places = _find_all("rollout workers' bus", sources)
    to_places = _find_all("trainer's bus", sinks)
    _check_places([*from_places, *to_places])
    name = sources[0].partition("@")[0]
    coordinator = f"{_PREFIX}.{name}.{_COORDINATOR}"
    _check_circles(coordinator, from_places, to_places)
    plans = [
        (place, PartyPlan("source", place.address(name), coordinator, place.bus))
        for place in from_places
    ]
    trainers_of = Counter(place.bus for place in to_places)
    for place in to_places:
        node = place.node if trainers_of[place.bus] > 1 else ""
        plan = PartyPlan(
            "sink", place.address(name), coordinator, place.bus, release, keep=directory,
            keep_sync_s=keep_sync, node=node,
        )  # fmt: skip
        plans.append((place, plan))
    mirrored = _plan_weights(name, from_places, to_places[0]) if weights else []
    mirrors = [plan.address for _, plan in mirrored if plan.kind == "mirror"]
    lead = PartyPlan(
        "coordinator", coordinator, coordinator, "", release,
        sorted(place.address(name) for place in from_places),
        [place.address(name) for place in to_places], stash_policy, sorted(mirrors),
    )  # fmt: skip
    plans += mirrored
    for plan in (lead, *(plan for _, plan in plans if plan.kind == "sink")):  # a sink keeps
        _require_same(name, plan)
    for place, plan in plans:
        _start_actor(plan, {place.resource: _A_LITTLE})
    _start_actor(lead, {to_places[0].resource: _A_LITTLE})
    relay = Relay(name, [plan.address for _, plan in plans] + [coordinator])
    relay.require_begun()
    return relay


def _plan_weights(
    name: str, from_places: Sequence[_Place], trainer: _Place
) -> list[tuple[_Place, PartyPlan]]:
    """Plan a mirror of a trainer's pool beside each rollout workers' bus."""
    source = trainer.address(name, _WEIGHTS)
    mirrors = [
        (place, PartyPlan("mirror", place.address(name, _WEIGHTS), source, place.bus))
        for place in from_places
    ]
    addresses = [plan.address for _, plan in mirrors]
    lead = PartyPlan("weights", source, source, trainer.bus, mirrors=addresses)
    return [*mirrors, (trainer, lead)]


def _require_same(name: str, plan: PartyPlan) -> None:
    """Raise BusBusyError if this relay already runs with another plan."""
    theirs = _plan_of(plan.address)
    if theirs is None:
        return
    ours, runs = (msgspec.json.encode(each).decode() for each in (plan, theirs))
    # The sources list the nodes with mirrors.
    same = bool(theirs.mirrors) == bool(plan.mirrors)
    if not same or msgspec.structs.replace(theirs, mirrors=plan.mirrors) != plan:
        raise errors.BusBusyError(
            f"relay {name!r} runs already, with different buses or options: {runs}; expected "
            f"{ours}. After a node came or left: shmbus relay {name} --join or --forget ADDRESS. "
            f"Else end the relay first: shmbus relay {name} --stop. Unreleased samples stay in "
            "the sources' rings"
        )


def _connect(address: str | None) -> None:
    """Connect this process to a cluster; ConnectionError without one."""
    if ray.is_initialized():
        return
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    advice = (
        "start one by `ray start --head`, or give HOST:PORT of its head, as shmbus relay takes by "
        "--ray"
    )
    try:
        if named != "auto" and "://" not in named:
            host, _, port = named.rpartition(":")
            if not port.isdecimal():
                raise ValueError("no HOST:PORT")
            # Ray itself would wait for minutes for a cluster that is not there.
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
            advice = (
                "the port answers: give this process the head's token (RAY_AUTH_MODE=token, "
                "~/.ray/auth_token) and version of Ray"
            )
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
    except (OSError, OverflowError, ValueError) as error:
        said = "none runs on this node" if named == "auto" else str(error)
        raise ConnectionError(
            f"expected a Ray cluster at {named!r}, got: {said}; {advice}"
        ) from error


def _start_actor(plan: PartyPlan, resources: dict[str, float]) -> None:
    kind = ray.remote(RelayActor)
    kind.options(
        name=plan.address, namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        max_restarts=-1, max_task_retries=0, max_pending_calls=_MOST_PENDING, num_cpus=0,
        resources=resources,
    ).remote(msgspec.json.encode(plan))  # fmt: skip


def find(name: str, address: str | None = None) -> Relay:
    """Return the running relay of this bus name."""
    _connect(address)
    found = _named(name)
    if not found:
        raise errors.BusNotFoundError(
            f"relay: none of bus {name!r} runs in this cluster; start it: shmbus relay {name} "
            "--trainer NAME"
        )
    return Relay(name, found)


def _answer_s(timeout: float) -> float:
    """Check seconds for an answer; Ray takes no infinite number of them."""
    return min(check_period("timeout", timeout), _LONGEST_ANSWER_S)


class Relay:
    """A running relay on a Ray cluster, seen from a driver."""

    def __init__(self, name: str, addresses: list[str]) -> None:
        self.name = name
        self.addresses = addresses
        self._prefix = f"{_PREFIX}.{name}."
        self._coordinator = self._prefix + _COORDINATOR
        self._carrying = [each for each in addresses if each.startswith(self._prefix + _WEIGHTS)]

    def describe(self, timeout: float = _ANSWER_S) -> list[dict[str, Any]]:
        """Describe every actor; "error" gives the reason for an idle actor."""
        timeout = _answer_s(timeout)
        asked: dict[str, Any] = {}
        said: list[dict[str, Any]] = []
        for address in self.addresses:
            try:
                actor = ray.get_actor(address, namespace=NAMESPACE)
                asked[address] = actor.describe.remote()
            except (ValueError, ray.exceptions.RayError) as error:
                said.append({"address": address, "error": str(error).splitlines()[0]})
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout)
        for address, answer in asked.items():
            try:
                said.append(ray.get(answer, timeout=0.1))
            except ray.exceptions.RayError as error:
                said.append({"address": address, "error": type(error).__name__})
        return said

    def ledgers(self, timeout: float = _ANSWER_S) -> list[dict[str, Any]]:
        """Return the ledger of each bus of the relay, within `timeout` seconds in total.

        Each entry contains "address", "kind" and "bus"; "ledger", None without an answer;
        "balanced", the result of the check; and "error".
        """
        said = {each["address"]: each for each in self.describe(timeout)}
        found = []
        for address in self.addresses:
            if address == self._coordinator or address in self._carrying:
                continue
            each = said[address]
            ledger = each.get("ledger")
            found.append(
                {
                    "address": address,
                    "kind": each.get("kind", ""),
                    "bus": each.get("bus", ""),
                    "ledger": ledger,
                    "balanced": ledger is not None and ledger["balanced"],
                    "error": each.get("error", "" if ledger else "its bus is not there"),
                }
            )
        return found

    def status(self, timeout: float = _ANSWER_S) -> RelayNote:
        """Return the coordinator's note; DaemonUnavailableError after `timeout` seconds."""
        timeout = _answer_s(timeout)
        deadline = time.monotonic() + timeout
        why = "it has just begun"
        while (left := deadline - time.monotonic()) > 0:
            try:
                actor = ray.get_actor(self._coordinator, namespace=NAMESPACE)
                said = ray.get(actor.describe.remote(), timeout=left)
                if "relay" in said:
                    return msgspec.convert(said["relay"], RelayNote)
            except (ValueError, ray.exceptions.RayError) as error:
                why = type(error).__name__
            time.sleep(_ASK_AGAIN_S)
        raise self._unavailable(timeout, why)

    def weights(self, timeout: float = _ANSWER_S) -> WeightsNote | None:
        """Return the nodes' progress with the trainer's weights; None without weights in the plan.

        DaemonUnavailableError if the weights publisher does not answer within `timeout` seconds.
        """
        if not self._carrying:
            return None
        why = "it does not answer"
        for each in self.describe(timeout):
            if "weights" in each:
                return msgspec.convert(each["weights"], WeightsNote)
            if each.get("kind") == "weights":
                why = each.get("error", why)
        raise errors.DaemonUnavailableError(
            f"relay {self.name!r} carries no weights now: {why}. It begins by itself, once there "
            "are some"
        )

    def _unavailable(self, timeout: float, why: str) -> errors.DaemonUnavailableError:
        return errors.DaemonUnavailableError(
            f"relay {self.name!r}: its coordinator does not answer within {timeout:g} s ({why}); "
            "Ray starts it again by itself, so ask again; a relay that was stopped is started by "
            "shmbus.relay.start"
        )

    def require_begun(self) -> None:
        """Wait for all actors beside buses; DaemonUnavailableError names late actors."""
        deadline_s = time.monotonic() + _BEGIN_S
        lasting_s = math.inf
        while True:
            late = [
                each
                for each in self.describe()
                if not each.get("begun") and each["address"] not in self._carrying
            ]
            if not late:
                return
            now_s = time.monotonic()
            # An ending predecessor holds the bus for a moment.
            lasting = all("error" in each and "kind" in each for each in late)
            lasting_s = min(lasting_s, now_s + _LACKS_S) if lasting else math.inf
            if now_s >= min(deadline_s, lasting_s):
                break
            time.sleep(_LOOK_S)
        why = "; ".join(f"{each['address']}: {each.get('error', 'no answer')}" for each in late)
        raise errors.DaemonUnavailableError(
            f"relay {self.name!r}: {len(late)} of {len(self.addresses)} actors have not begun: "
            f"{why}. They begin by themselves once they can; or end the relay: shmbus relay "
            f"{self.name} --stop"
        )

    def _ask(self, address: str, method: str, *args: object) -> Any:
        """Return an actor's answer; DaemonUnavailableError without an answer."""
        try:
            actor = ray.get_actor(address, namespace=NAMESPACE)
            return ray.get(getattr(actor, method).remote(*args), timeout=_ANSWER_S)
        except (ValueError, ray.exceptions.RayError) as error:
            raise self._unavailable(_ANSWER_S, type(error).__name__) from error

    def _lead(self) -> str:
        """Return the address of the actor beside the trainer's weights, or ""."""
        if not self._carrying:
            return ""
        said = self._ask(self._coordinator, "describe")
        plan = msgspec.json.decode(said["plan"], type=PartyPlan)
        leads = {self._weights_of(sink) for sink in plan.sinks}
        return next((each for each in self._carrying if each in leads), "")

    def _weights_of(self, address: str) -> str:
        """Return the address of the weights' actor on the node of a source or a sink."""
        return self._prefix + _WEIGHTS + address.removeprefix(self._prefix)

    def join(self, source: str | None = None) -> list[str]:
        """Take on new nodes: a source, and with weights a mirror.

        `source` names the bus as for `start`; None means the relay's. Returns the addresses of the
        new actors. BusNotFoundError if no further node has the bus.
        """
        (spec,) = check_specs("source", [source or self.name])
        lead = self._lead()
        here = {(each.get("bus"), each.get("node")) for each in self.describe()}
        found = _find_all("rollout workers' bus", [spec])
        places = [each for each in found if (each.bus, each.node_id) not in here]
        if not places:
            raise errors.BusNotFoundError(
                f"relay {self.name!r}: no further node has the bus {spec!r}; create the bus on the "
                "new node first, as on the others"
            )
        joined = []
        for place in places:
            address = place.address(self.name)
            _start_actor(
                PartyPlan("source", address, self._coordinator, place.bus),
                {place.resource: _A_LITTLE},
            )
            self._ask(self._coordinator, "change_peers", address, True)
            joined.append(address)
            if lead:
                mirror = self._weights_of(address)
                _start_actor(
                    PartyPlan("mirror", mirror, lead, place.bus), {place.resource: _A_LITTLE}
                )
                self._ask(lead, "change_peers", mirror, True)
                self._carrying.append(mirror)
                joined.append(mirror)
        self.addresses += joined
        Relay(self.name, joined).require_begun()
        return joined

    def forget(self, address: str) -> None:
        """Go on without a source, a sink or a mirror of a lost node.

        A source goes with its node's mirror; announced records that no sink had fetched count as
        lost. Groups of a sink not yet acknowledged by its trainer go to another sink, so the sink's
        bus must not come back. KeyError for an unknown peer, DaemonUnavailableError without an
        answer.
        """
        lead, gone = self._lead(), list[str]()
        mirror = address if address in self._carrying else self._weights_of(address)
        if mirror != address and self._ask(self._coordinator, "change_peers", address, False):
            gone.append(address)
        if mirror in self._carrying and mirror != lead:
            # A dead lead begins again with the mirrors of living actors.
            with contextlib.suppress(errors.DaemonUnavailableError):
                self._ask(lead, "change_peers", mirror, False)
            self._carrying.remove(mirror)
            gone.append(mirror)
        if not gone:
            raise KeyError(f"relay {self.name!r} has no peer {address!r}; status() names them")
        for each in gone:
            self._kill(each)

    def _kill(self, address: str) -> None:
        try:
            ray.kill(ray.get_actor(address, namespace=NAMESPACE), no_restart=True)
        except (ValueError, ray.exceptions.RayError):
            return  # already gone

    def stop(self) -> None:
        """End the relay. Unreleased records stay in their source's ring, for the next relay."""
        for address in self.addresses:
            self._kill(address)
