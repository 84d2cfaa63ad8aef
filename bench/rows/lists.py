"""What Python lists cost a producer, beside NumPy's conversion of them, and what a schema costs.

A sample has 2,048 token ids, logprobs and a mask; the checks of a schema are measured on short
ones, so that no copy hides them. All calls take turns in one process, in an order of its own each
turn, in batches of whole groups that are taken and acknowledged between them, untimed; a figure is
the median of its batches. Nothing waits: these are costs of calls, not of a hop.
"""

from __future__ import annotations

import operator
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

import shmbus
from bench.bounds import Beside, Bound
from bench.processes import run_alone
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.sending import temporary_bus

__all__ = ["measure"]

TOKENS: Final = 2048
#: Puts of one batch, a group each time.
BATCH: Final = 16
WARM_UP: Final = 5
SEED: Final = 20261122
#: Of the arrays that a schema's checks are measured with.
SHORT: Final = 16
DTYPES: Final = {"tokens": np.int32, "logprobs": np.float32, "loss_mask": np.uint8}
SCHEMA: Final = {name: np.dtype(dtype).name for name, dtype in DTYPES.items()}


def measure(puts: int, capacity: str) -> list[Row]:
    """Measure so many puts of each kind; a row for a sample, for token ids, and for a schema."""
    batches = max(3, puts // BATCH)
    with temporary_bus(capacity) as name:
        ns: dict[str, list[float]] = run_alone(_batches, name, batches)
    median = {what: statistics.median(figures) for what, figures in ns.items()}
    return [_sample(median, ns), _ids(median, ns), _schema(median, ns)]


def _beside(name: str, values: Iterable[float], bounds: Iterable[float]) -> Beside:
    """Set each batch beside what its bound took in the same turn."""
    bound = Bound(name=name, unit="ns", sense="cost")
    return Beside(bound=bound, values=tuple(values), bounds=tuple((one,) for one in bounds))


def _sample(ns: dict[str, float], turns: dict[str, list[float]]) -> Row:
    value = ns["put lists"] / (ns["asarray"] + ns["put arrays"])
    converted = map(sum, zip(turns["asarray"], turns["put arrays"], strict=True))
    return Row(
        name="lists-sample",
        title=f"put of {TOKENS:,} tokens from lists, beside np.asarray and put",
        measured=f"{ns['put lists'] / 1e3:.2f} us, np.asarray {ns['asarray'] / 1e3:.2f} and put of "
        f"arrays {ns['put arrays'] / 1e3:.2f}",
        value=value,
        target=TARGETS["lists-sample"],
        bound=_beside("put of arrays", turns["put lists"], turns["put arrays"]),
        reference=_beside("np.asarray, and put of arrays", turns["put lists"], converted),
        figures={"ns": ns},
    )


def _ids(ns: dict[str, float], turns: dict[str, list[float]]) -> Row:
    converting = ns["put ids"] - ns["put id array"]
    each = map(operator.sub, turns["put ids"], turns["put id array"])
    return Row(
        name="lists-ids",
        title=f"converting {TOKENS:,} ints, beside one pass over the list (sum)",
        measured=f"{converting / 1e3:.2f} us, sum {ns['sum'] / 1e3:.2f}, np.asarray "
        f"{ns['asarray ids'] / 1e3:.2f}",
        value=converting / ns["sum"],
        target=TARGETS["lists-ids"],
        difference=True,
        bound=_beside("put of the array", turns["put ids"], turns["put id array"]),
        reference=_beside("sum of the list", each, turns["sum"]),
        figures={"ns": ns},
    )


def _schema(ns: dict[str, float], turns: dict[str, list[float]]) -> Row:
    value = (ns["put short by schema"] - ns["put short"]) / len(DTYPES)
    return Row(
        name="lists-schema",
        title="a schema's checks in put, each field",
        measured=f"{ns['put short by schema']:.0f} ns with, {ns['put short']:.0f} without",
        value=value,
        target=TARGETS["lists-schema"],
        difference=True,
        bound=_beside("put without", turns["put short by schema"], turns["put short"]),
        figures={"ns": ns},
    )


def _batches(start: Callable[[], None], name: str, batches: int) -> dict[str, list[float]]:
    rng = random.Random(SEED)
    lists: dict[str, list[Any]] = {
        "tokens": [rng.randrange(150_000) for _ in range(TOKENS)],
        "logprobs": [rng.gauss(-1, 1) for _ in range(TOKENS)],
        "loss_mask": [rng.getrandbits(1) for _ in range(TOKENS)],
    }
    arrays = {field: np.asarray(lists[field], dtype) for field, dtype in DTYPES.items()}
    short = {field: array[:SHORT] for field, array in arrays.items()}
    ids, id_array = {"tokens": lists["tokens"]}, {"tokens": arrays["tokens"]}
    with (
        shmbus.Producer(name) as plain,
        shmbus.Producer(name, schema=SCHEMA) as checked,
        shmbus.Consumer(name) as consumer,
    ):

        def puts(producer: shmbus.Producer, fields: dict[str, Any]) -> Callable[[int], None]:
            return lambda index: producer.put("a", group_size=BATCH, index=index, **fields)

        calls: dict[str, Callable[[int], object]] = {
            "put lists": puts(plain, lists),
            "put arrays": puts(plain, arrays),
            "put short": puts(plain, short),
            "put short by schema": puts(checked, short),
            "put ids": puts(plain, ids),
            "put id array": puts(plain, id_array),
            "asarray": lambda _: [np.asarray(lists[f], dtype) for f, dtype in DTYPES.items()],
            "asarray ids": lambda _: np.asarray(lists["tokens"], np.int32),
            "sum": lambda _: sum(lists["tokens"]),
        }
        found: dict[str, list[float]] = {what: [] for what in calls}
        start()
        for turn in range(batches + WARM_UP):
            for what, call in rng.sample(list(calls.items()), len(calls)):
                began = time.perf_counter_ns()
                for index in range(BATCH):
                    call(index)
                if turn >= WARM_UP:
                    found[what].append((time.perf_counter_ns() - began) / BATCH)
                consumer.ack(consumer.take(max_groups=1, timeout=0.0))
    return found
