"""Registrations: the trainer, its environments, and the step. Pure state, kept for a successor.

Statuses and arithmetic follow the API server of Atropos 0.4.0, with two differences:

- A repeated registration of a trainer brings new numbers; in Atropos the first ones stay for ever.
- An unknown environment gets an error answer; Atropos' server fails with an internal error.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from shmbus.data.encoding import decodable
from shmbus.gateway import settings
from shmbus.http.access import Refusal
from shmbus.peers.atropos_queue import Availability

#: The least weight reported to an environment, against starvation; from Atropos.
MIN_WEIGHT: Final = 0.01


#: A whole number of a registration: arithmetic with floats, and a successor, can take these.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
#: A finite number: a successor reads no other.
Weight = Annotated[float, msgspec.Meta(ge=-(2.0**63), le=2.0**63)]
#: A share of each batch.
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Registration(msgspec.Struct, kw_only=True):
    """A trainer's registration. `reads_bus`, a shmbus extension: it reads groups without HTTP."""

    wandb_group: str
    wandb_project: str
    batch_size: Integer
    max_token_len: Integer
    checkpoint_dir: str
    save_checkpoint_interval: Integer
    starting_step: Integer
    num_steps: Integer
    reads_bus: bool = False


#: A group on the bus: instance id and round.
GroupKey: TypeAlias = tuple[str, int | None]
#: The name of an environment without a name.
_UNNAMED: Final = "environment"


class NewEnvironment(msgspec.Struct, kw_only=True):
    """An environment's registration."""

    max_token_length: Integer
    #: None is the default of atroposlib's BaseEnv; its own server refuses None.
    desired_name: str | None
    weight: Weight
    group_size: Integer
    min_batch_allocation: Share | None = None


class Environment(NewEnvironment, kw_only=True):
    """A registered environment."""

    connected: bool = True


@decodable
class _State(msgspec.Struct, kw_only=True):
    registration: Registration | None = None
    #: After a reset, the length of the last trainer's contexts; as in Atropos.
    max_token_len: int = -1
    was_registered: bool = False
    step: int = 0
    started: bool = False
    environments: list[Environment] = []
    #: Groups of each batch given to a trainer and not acknowledged.
    given: list[list[GroupKey]] = []


class Registry:
    """Registrations of a bus; `stored` is a predecessor's state."""

    def __init__(self, stored: bytes | None = None) -> None:
        self.state = _State() if stored is None else msgspec.json.decode(stored, type=_State)
        #: None if outdated.
        self._shares: _Shares | None = None
        #: Number of changes of the quotas.
        self.changes = 0

    # -- the trainer ----------------------------------------------------------------------------

    @property
    def registered(self) -> bool:
        """True after a trainer's registration since the last reset."""
        return self.state.registration is not None

    @property
    def batch_size(self) -> int:
        """Sequences of a batch; -1 without a trainer."""
        found = self.state.registration
        return -1 if found is None else found.batch_size

    @property
    def reads_bus(self) -> bool:
        """True if the trainer reads the bus itself."""
        found = self.state.registration
        return found is not None and found.reads_bus

    def register(self, registration: Registration, *, again: bool) -> dict[str, Any]:
        """Register a trainer, `again` after given batches: a restart, not an additional process."""
        _check_names(registration.wandb_group, registration.wandb_project)
        _check_names(registration.checkpoint_dir)
        if registration.batch_size < 1:
            raise Refusal(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"batch_size: expected 1 or more sequences, got {registration.batch_size}; "
                "register with the sequences of one batch",
            )
        state = self.state
        if state.registration is None or again:
            state.step = registration.starting_step
        state.registration = registration
        self._change()
        state.was_registered = True
        state.max_token_len = registration.max_token_len
        state.started = state.started or registration.reads_bus
        return {"uuid": uuid.uuid4().int}

    def reset(self) -> None:
        """Forget trainer and environments."""
        self._change()
        kept = self.state
        self.state = _State(max_token_len=kept.max_token_len, was_registered=kept.was_registered)

    def wandb_info(self) -> dict[str, Any]:
        """Answer ``/wandb_info``."""
        found = self.state.registration
        if found is None:
            return {"group": None, "project": None}
        return {"group": found.wandb_group, "project": found.wandb_project}

    def info(self) -> dict[str, Any]:
        """Answer ``/info``."""
        return {"batch_size": self.batch_size, "max_token_len": self.state.max_token_len}

    # -- environments ---------------------------------------------------------------------------

    def register_env(self, new: NewEnvironment) -> dict[str, Any]:
        """Register an environment, once the trainer has started."""
        state = self.state
        found = state.registration
        if not state.started or found is None:
            return {"status": "wait for trainer to start"}
        name = _UNNAMED if new.desired_name is None else new.desired_name
        _check_names(name)
        if not 1 <= new.group_size <= settings.MAX_GROUP_SIZE:
            raise Refusal(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"group_size: expected 1 to {settings.MAX_GROUP_SIZE}, which a group of a bus may "
                f"have, got {new.group_size}; register with the sequences of one group",
            )
        if len(state.environments) >= settings.MAX_ENVS:
            raise Refusal(
                HTTPStatus.INSUFFICIENT_STORAGE,
                f"environments: expected at most {settings.MAX_ENVS} of one trainer, got one more; "
                "reset the data before the next run",
            )
        same = sum(each.desired_name == name for each in state.environments)
        self._change()
        env_id = len(state.environments)
        state.environments.append(
            Environment(**{**msgspec.structs.asdict(new), "desired_name": name})
        )
        return {
            "status": "success",
            "env_id": env_id,
            "wandb_name": f"{name}_{same}",
            "checkpoint_dir": found.checkpoint_dir,
            "starting_step": state.step,
            "checkpoint_interval": found.save_checkpoint_interval,
            "num_steps": found.num_steps,
        }

    def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Answer ``/disconnect-env``."""
        if not 0 <= env_id < len(self.state.environments):
            return {"status": "failure", "error": self._unknown(env_id)}
        self.state.environments[env_id].connected = False
        self._change()
        return {"status": "success"}

    def _unknown(self, env_id: int) -> str:
        count = len(self.state.environments)
        known = f"one of 0 to {count - 1}" if count else "one that has registered; none has"
        return f"env_id: expected {known}, got {env_id}; register by POST /register-env first"

    def group_size(self, env_id: int | None) -> int | None:
        """Return an environment's registered group size; None without a registration."""
        if env_id is None or not 0 <= env_id < len(self.state.environments):
            return None
        return self.state.environments[env_id].group_size

    def minimums(self) -> dict[int, float]:
        """Return the least share of each batch, by environment."""
        return self._all_shares().minimums

    def quotas(self) -> dict[int, int]:
        """Return the same in sequences."""
        return {env: int(self.batch_size * least) for env, least in self.minimums().items()}

    def _all_shares(self) -> _Shares:
        if self._shares is None:
            connected = {n: env for n, env in enumerate(self.state.environments) if env.connected}
            self._shares = _Shares(connected)
        return self._shares

    def _change(self) -> None:
        self._shares = None
        self.changes += 1

    def status_env(self, env_id: int, available: Availability) -> dict[str, Any]:
        """Answer ``/status-env``."""
        environments = self.state.environments
        if not 0 <= env_id < len(environments):
            raise Refusal(HTTPStatus.NOT_FOUND, self._unknown(env_id))
        env = environments[env_id]
        shares = self._all_shares()
        weight = env.max_token_length * env.weight / shares.total if shares.total else 0.0
        queue, own, env.group_size = available.of(env_id, env.group_size)
        return {
            "current_step": self.state.step,
            "queue_size": queue,
            "unallocated_fraction": shares.unallocated,
            "self_queue_size": own,
            "max_group_size": available.largest,
            "env_weight": max(MIN_WEIGHT, weight),
        }


class _Shares:
    """Weights of connected environments, and their least shares."""

    def __init__(self, connected: Mapping[int, Environment]) -> None:
        self.total = sum(env.max_token_length * max(0.0, env.weight) for env in connected.values())
        self.minimums = {
            number: env.min_batch_allocation
            for number, env in connected.items()
            if env.min_batch_allocation is not None
        }
        self.unallocated = 1.0 - min(sum(self.minimums.values()), 1.0)


def _check_names(*names: str) -> None:
    for name in names:
        if len(name) > settings.NAME_CHARS:
            raise Refusal(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"a name: expected at most {settings.NAME_CHARS} characters, got {len(name)}; "
                "choose a shorter one",
            )
