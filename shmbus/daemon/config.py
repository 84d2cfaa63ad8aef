"""Settings of ``shmbus serve``: flags override the environment.

``--group-timeout 60`` and ``SHMBUS_GROUP_TIMEOUT=60`` mean the same. In the environment a near miss
of a setting raises an error; foreign variables may share the prefix (container platforms make
SHMBUS_SERVICE_HOST from a service's name).
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from shmbus.base import limits
from shmbus.base.arguments import check_backoff, check_count, parse_size
from shmbus.base.near_names import near
from shmbus.data.schema import parse
from shmbus.segment.creation import Bounds, check_bounds
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

#: Seconds for leases to end after SIGTERM: an optimizer step, and less than systemd's 90.
_DRAIN_TIMEOUT_S = 30.0


class ConfigError(ValueError):
    """A wrong setting; the message names its source and the expected value."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of ``shmbus serve``."""

    capacity: str | None = None
    max_producers: int | None = None
    max_lead: int | None = None
    max_lead_versions: int | None = None
    request_capacity: str | None = None
    schema: str | None = None
    group_timeout: float = limits.GROUP_TIMEOUT_S
    on_timeout: Literal["wait", "drop", "partial"] = "drop"
    max_policy_lag: int | None = None
    skip_zero_variance: bool = False
    duplicate: Literal["drop", "error"] = "drop"
    max_stash_bytes: str | None = None
    on_overflow: Literal["wait", "drop", "partial"] = "wait"
    sample_retries: int = 0
    retry_timeout: float = limits.RETRY_TIMEOUT_S
    retry_backoff: str = ",".join(f"{each:g}" for each in limits.RETRY_BACKOFF_S)
    on_failure: Literal["drop", "partial"] = "drop"
    drain_timeout: float = _DRAIN_TIMEOUT_S
    unlink_on_exit: bool = False
    restore: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    http: str | None = None
    http_token_file: str | None = None
    web: int | None = None
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        """Check bounds beyond the types."""
        for name in self.__struct_fields__:
            _check_bounds(name, getattr(self, name))

    def bounds(self) -> Bounds:
        """Return a new bus's bounds besides its space."""
        return check_bounds(self.request_capacity, self.max_lead, self.max_lead_versions)

    def declared(self) -> _core.DeclaredSchema | None:
        """Return the bus's declared schema; None without a declaration."""
        return None if self.schema is None else _parse_schema(self.schema)

    def policy(self) -> StashPolicy:
        """Return the settings of the stash."""
        size = self.max_stash_bytes
        return StashPolicy(
            group_timeout_s=None if math.isinf(self.group_timeout) else self.group_timeout,
            on_timeout=self.on_timeout,
            max_policy_lag=self.max_policy_lag,
            skip_zero_variance=self.skip_zero_variance,
            max_stash_bytes=None if size is None else parse_size(size),
            on_overflow=self.on_overflow,
            sample_retries=self.sample_retries,
            retry_timeout_s=self.retry_timeout,
            retry_backoff_s=_parse_backoff(self.retry_backoff),
            on_failure=self.on_failure,
        )


#: By setting: the placeholder of its flag's value, and its help; "" for a flag with a few choices.
_FLAGS = {
    "capacity": (
        "SIZE",
        "bytes for records, if the bus is created (default 256MiB, or half of what /dev/shm "
        "has free where that is less)",
    ),
    "max_producers": (
        "N",
        "producers attached at once, if the bus is created (default 64, or as many as have room)",
    ),
    "max_lead": ("GROUPS", "groups that may be begun and not delivered yet, if the bus is created"),
    "max_lead_versions": (
        "N",
        "policy versions that producers may be ahead of the trainer, if the bus is created",
    ),
    "request_capacity": ("SIZE", "bytes for requests, if the bus is created"),
    "schema": (
        "JSON",
        'fields of samples as JSON, such as \'{"tokens": "int32"}\', if the bus is created; one'
        " that is there must have them",
    ),
    "group_timeout": ("SECONDS", "seconds that a group may stay incomplete; inf for no limit"),
    "on_timeout": (
        "",
        "action for a group at its --group-timeout: wait, drop, deliver the samples put",
    ),
    "max_policy_lag": ("N", "versions that a group's oldest sample may be behind"),
    "skip_zero_variance": ("", "drop complete groups whose scores are all equal"),
    "duplicate": ("", "a second sample of an index: drop it, or also raise an error"),
    "max_stash_bytes": ("SIZE", "ring bytes that incomplete groups may occupy"),
    "on_overflow": ("", "action for the oldest incomplete groups above --max-stash-bytes"),
    "sample_retries": ("N", "most further requests for a failed sample"),
    "retry_timeout": ("SECONDS", "seconds for an answer to a request for a failed sample"),
    "retry_backoff": (
        "FIRST,MOST",
        "seconds before a sample that failed is requested again: first, and at most",
    ),
    "on_failure": ("", "action for a group with a sample that failed for good"),
    "drain_timeout": ("SECONDS", "seconds that leased groups have to end after SIGTERM"),
    "unlink_on_exit": ("", "remove the bus at a clean exit"),
    "restore": ("DIR", "a snapshot to create a missing bus from"),
    "metrics_port": ("PORT", "serve Prometheus metrics and /healthz at this port, such as 9464"),
    "metrics_host": ("HOST", "the address of that port"),
    "http": (
        "HOST:PORT",
        "serve a gateway for Atropos there (extra gateway; see docs/gateway.md)",
    ),
    "http_token_file": ("FILE", "a file with the token that its clients send"),
    "web": ("PORT", "serve a page that shows the bus at this port (extra web; see docs/page.md)"),
    "log_format": ("", "one JSON object a line, or text"),
    "log_level": ("", "the least that is logged"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, with the value None by default."""
    for field in msgspec.structs.fields(Settings):
        flag = _flag(field.name)
        metavar, text = _FLAGS[field.name]
        if field.type is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            shown = "" if field.default is None else f" (default {field.default})"
            metavar = metavar or "{" + ",".join(get_args(field.type)) + "}"
            parser.add_argument(flag, default=None, help=text + shown, metavar=metavar)


_PREFIX = "SHMBUS_"
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}
_ABOVE_0 = ("group_timeout", "retry_timeout")


#: HOST:PORT, also with an IPv6 address, in brackets or not.
_ADDRESS = re.compile(r"[^\s/]+:([0-9]{1,5})")
#: Flags without an effect unless the second setting is given.
_NEEDS = (
    ("metrics_host", "metrics_port"),
    ("http_token_file", "http"),
    ("on_overflow", "max_stash_bytes"),
)


def _check_bounds(name: str, value: Any) -> None:
    if value is None:
        return
    if name in ("capacity", "max_stash_bytes"):
        parse_size(value)
    elif name in ("request_capacity", "max_lead", "max_lead_versions"):
        check_bounds(**{name: value})
    elif name == "schema":
        _parse_schema(value)
    elif name == "retry_backoff":
        _parse_backoff(value)
    elif name in ("max_policy_lag", "sample_retries"):
        check_count(name, value, 0)
    elif name == "drain_timeout" and not value >= 0:
        raise ValueError(f"{name}: expected 0 or more, got {value}")
    elif name in ("metrics_host", "restore") and not value:
        raise ValueError(f"{name}: expected a value, got ''; leave it out for the default")
    elif name in _ABOVE_0 and not value > 0:
        raise ValueError(f"{name}: expected more than 0, got {value}")
    elif name == "http" and not ((found := _ADDRESS.fullmatch(value)) and int(found[1]) <= 65535):
        raise ValueError(f"{name}: expected HOST:PORT, such as 127.0.0.1:8000, got {value!r}")
    elif name in ("metrics_port", "web") and not 0 <= value <= 65535:
        raise ValueError(f"{name}: expected 0 to 65535, got {value}")
    elif name == "max_producers" and not 1 <= value <= _core.MAX_PRODUCERS:
        raise ValueError(f"{name}: expected 1 to {_core.MAX_PRODUCERS}, got {value}")
    elif name == "http_token_file" and (os.path.isdir(value) or not os.access(value, os.R_OK)):
        raise ValueError(f"{name}: expected a file that may be read, got {value!r}")


def _parse_backoff(value: str) -> tuple[float, float]:
    try:
        return check_backoff("retry_backoff", [float(each) for each in value.split(",")])
    except (TypeError, ValueError):
        raise ValueError(
            f'retry_backoff: expected "FIRST,MOST" in seconds, such as "0.5,30", got {value!r}'
        ) from None


def _parse_schema(value: str) -> _core.DeclaredSchema:
    """Read a schema from JSON: lists for tuples, "..." for any shape."""
    try:
        given = msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"schema: expected JSON of names to dtypes, got {value!r}: {error}"
        ) from error
    if not isinstance(given, Mapping):
        raise ValueError(
            f'schema: expected names to dtypes, such as {{"tokens": "int32"}}, got {value!r}'
        )
    fields: dict[str, Any] = {}
    for name, spec in given.items():
        if isinstance(spec, list):
            shape = [tuple(each) if isinstance(each, list) else each for each in spec[1:]]
            fields[name] = (*spec[:1], *(... if each == "..." else each for each in shape))
        else:
            fields[name] = spec
    try:
        return parse(fields)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _converted(source: str, name: str, value: Any) -> Any:
    kind = _TYPES[name]
    try:
        found = msgspec.convert(value, kind, strict=False)
        _check_bounds(name, found)
    except ValueError as error:
        what = f"{source}: {name} = {value!r}: {error}"
        if get_origin(kind) is Literal:
            what += f"; expected one of {', '.join(get_args(kind))}"
        raise ConfigError(what) from error
    return found


def _check_environment(environment: Mapping[str, str]) -> None:
    """Refuse a variable that nearly matches a setting, instead of a silent pass."""
    known = {_PREFIX + name.upper() for name in _TYPES}
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or variable in known:
            continue
        meant = near(variable[len(_PREFIX) :].lower(), tuple(_TYPES))
        if meant:
            raise ConfigError(
                f"{variable}: unknown setting; did you mean {_PREFIX}{meant[0].upper()}? "
                "Correct or unset the variable"
            )


def load(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Put the settings together."""
    _check_environment(environment)
    values: dict[str, Any] = {}
    for name in _TYPES:
        variable = _PREFIX + name.upper()
        if variable in environment:
            values[name] = _converted(variable, name, environment[variable])
        if flags.get(name) is not None:
            values[name] = _converted(_flag(name), name, flags[name])
    for name, needed in _NEEDS:
        if flags.get(name) is not None and needed not in values:
            raise ConfigError(f"{_flag(name)}: expected with {_flag(needed)}; add {_flag(needed)}")
    try:
        return Settings(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
