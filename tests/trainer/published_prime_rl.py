"""Types and file transport of prime-rl at 559b447 and 0f59b24, which the adapter meets."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import msgspec

STRUCT = {"array_like": True, "gc": False, "omit_defaults": True}

RoutedExperts = msgspec.defstruct(
    "RoutedExperts", [("data", bytes), ("shape", list[int]), ("dtype", str)], **STRUCT
)
SamplingMask = msgspec.defstruct("SamplingMask", [("ids", bytes), ("counts", bytes)], **STRUCT)
PayloadSegment = msgspec.defstruct(
    "PayloadSegment",
    [("field", str), ("file", str), ("offset", int), ("pos", int), ("rows", int), ("dtype", str),
     ("shape", list[int])],
    array_like=True, gc=False, frozen=True,
)  # fmt: skip

_FLOATS = list[float] | None
_OLD: list[Any] = [
    ("input_ids", list[int]), ("loss_mask", list[bool]), ("advantages", list[float]),
    ("inference_logprobs", list[float]), ("position_ids", list[int]),
    ("sequence_lengths", list[int]), ("temperatures", list[float]), ("env_names", list[str]),
    ("seq_lens", list[int]), ("ref_logprobs", _FLOATS, None),
    ("routed_experts", RoutedExperts | None, None), ("mm_refs", dict[str, bytes] | None, None),
    ("mm_token_type_ids", list[int] | None, None), ("rl_weights", _FLOATS, None),
    ("ce_weights", _FLOATS, None), ("ref_kl_weights", _FLOATS, None),
]  # fmt: skip
_NEW = [
    *_OLD, ("sampling_mask", SamplingMask | None, None), ("trace_ids", list[str] | None, None),
    ("branch_indices", list[int] | None, None), ("payload", list[PayloadSegment] | None, None),
]  # fmt: skip

PUBLISHED = {
    "559b447": ("prime_rl.transports.rollouts", "micro_batch", _OLD),
    "0f59b24": ("prime_rl.transports.batch", "batch", _NEW),
}


@contextmanager
def installed(commit: str) -> Iterator[ModuleType]:
    """Have prime-rl's transport package of a commit, and a trainer that imported its factories."""
    package, middle, fields = PUBLISHED[commit]
    made = {name: ModuleType(name) for name in (
        "prime_rl", "prime_rl.transports", package, "prime_rl.trainer", "prime_rl.trainer.data",
    )}  # fmt: skip
    transport = made[package]
    vars(transport)["MicroBatch"] = msgspec.defstruct("MicroBatch", fields, **STRUCT)
    for end in ("sender", "receiver"):
        name = f"setup_{middle}_{end}"

        def factory(*arguments: Any) -> Any:
            raise AssertionError("prime-rl's own")

        for module in (transport, made["prime_rl.trainer.data"]):
            setattr(module, name, factory)
    for module in made.values():
        module.__path__ = []
    sys.modules |= made
    try:
        yield transport
    finally:
        for name in made:
            del sys.modules[name]
