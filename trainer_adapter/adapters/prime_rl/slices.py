"""What an orchestrator sends and to whom, as each of its channels states it.

Invariant: a trainer is refused only by what a living orchestrator has stated; a leftover of a run
before says nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shmbus.channel.lifecycle import living_statement

__all__ = ["Sent", "channel_name", "check_slice", "fields_of", "sent_of"]


class Sent(msgspec.Struct):
    """What an orchestrator sends.

    Attributes
    ----------
    ranks : int
        Data ranks.
    readers : int
        Trainer processes of each.
    fields : list of str
        Those of its MicroBatch, in order; empty where it does not say.
    """

    ranks: int
    readers: int
    fields: list[str] = []


def fields_of(micro_batch: object) -> list[str]:
    """Return the fields of prime-rl's MicroBatch, in order.

    Parameters
    ----------
    micro_batch : type

    Returns
    -------
    list of str

    Raises
    ------
    TypeError
        It is no msgspec.Struct.
    """
    if not isinstance(micro_batch, type) or not issubclass(micro_batch, msgspec.Struct):
        raise TypeError(
            f"micro_batch: expected prime-rl's MicroBatch, a msgspec.Struct, got {micro_batch!r}"
        )
    return list(micro_batch.__struct_fields__)


def sent_of(ranks: int, readers: int, micro_batch: type[Any] | None) -> bytes:
    """Return what an orchestrator states.

    Parameters
    ----------
    ranks, readers : int
    micro_batch : type, optional
        prime-rl's MicroBatch.

    Returns
    -------
    bytes
    """
    fields = [] if micro_batch is None else fields_of(micro_batch)
    return msgspec.msgpack.encode(Sent(ranks, readers, fields))


def channel_name(run: str, rank: int, reader: int) -> str:
    """Return the name of a trainer process's channel.

    Parameters
    ----------
    run : str
    rank, reader : int

    Returns
    -------
    str
    """
    return f"{run}.rank{rank}.{reader}"


def check_slice(run: str, rank: int, reader: int, micro_batch: type[Any]) -> None:
    """Refuse a trainer that the run's living orchestrator, if there is one, does not send to.

    Parameters
    ----------
    run : str
    rank, reader : int
        Of the trainer.
    micro_batch : type
        Of the trainer.

    Raises
    ------
    ValueError
        It sends to fewer ranks or readers, or micro batches with other fields.
    """
    stated = living_statement(channel_name(run, 0, 0))
    if not stated:
        return
    sent = msgspec.msgpack.decode(stated, type=Sent)
    if rank >= sent.ranks or reader >= sent.readers:
        raise ValueError(
            f"run {run!r}: this trainer asks for reader {reader} of data rank {rank}, and the "
            f"orchestrator sends to {sent.ranks} data ranks with {sent.readers} readers each, "
            "counted from 0; give both the same data-parallel size, and install(..., "
            "readers_per_rank=) the same number in all processes. Nothing was received"
        )
    own = fields_of(micro_batch)
    if sent.fields and sent.fields != own:
        other = sorted(set(sent.fields) ^ set(own))
        what = f"only one of the two has {', '.join(other)}" if other else "their order differs"
        raise ValueError(
            f"run {run!r}: the orchestrator's MicroBatch is not the trainer's: {what}; run both "
            "from one version of prime-rl. Nothing was received"
        )
