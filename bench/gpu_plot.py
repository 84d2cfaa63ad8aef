"""The picture of a run of `bench.gpu`: made of its result, and nothing else."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

__all__ = ["plot"]


def plot(result: dict[str, Any], path: Path, share: float) -> None:
    """Draw rates and processor time by batch with the share that is wanted, and attention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, loads, times) = pyplot.subplots(1, 3, figsize=(12, 3.4))
    for transport in ("gather", "pinned", "copy"):
        rows = [row for row in result["transfer"] if row["what"] == transport]
        tokens = [row["tokens_per_batch"] / 1e3 for row in rows]
        rates.plot(tokens, [row["gb_per_s"] for row in rows], marker="o", label=transport)
        loads.plot(tokens, [row["cpu_us_per_record"] for row in rows], marker="o", label=transport)
    copies = [row["gb_per_s"] for row in result["transfer"] if row["what"].startswith("pinned h")]
    if copies:
        limit = statistics.mean(copies)
        rates.axhline(limit, color="0.6", label="pinned copy")
        rates.axhline(share * limit, color="C3", linestyle=":", label="target")
    rates.set(xlabel="thousand tokens a batch", ylabel="GB/s to the device", xscale="log", ylim=0)
    loads.set(xlabel="thousand tokens a batch", ylabel="processor us a record")
    loads.set(xscale="log", yscale="log")
    compared = [row for row in result["attention"] if "time_of_native" in row]
    for number, row in enumerate(compared):
        low, middle, high = row["time_of_native_quartiles"]
        spread = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        times.bar(number, middle, yerr=spread, color="C0", capsize=4)
        times.hlines(row["targets"][0], number - 0.4, number + 0.4, color="C3", linestyle=":")
    names = [row["what"].removeprefix("attention, ") for row in compared]
    times.set_xticks(range(len(compared)), names, fontsize=8)
    times.set(ylabel="time of SDPA over native")
    for axes in (rates, loads):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
