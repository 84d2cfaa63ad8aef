"""What a collector has counted of its deliveries, read from outside.

Invariant: the bounds are the core's; nothing is counted here.
"""

from __future__ import annotations

from typing import Final

from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.types import Histogram
from shmbus_ext import _core

__all__ = ["HISTOGRAMS", "read_histograms"]

#: Names of the core's figures, by their number.
HISTOGRAMS: Final = ("lag", "age", "length", "score", "solved")
assert len(HISTOGRAMS) == len(_core.FIGURE_BOUNDS)


def read_histograms(file: SegmentFile) -> tuple[list[Histogram], int]:
    """Read the histograms of a segment, and its count of useless groups."""
    buckets, sums, useless = file.figures()
    rows = zip(HISTOGRAMS, _core.FIGURE_BOUNDS, buckets, sums, strict=True)
    return [
        Histogram(name=name, bounds=list(bounds), buckets=counts, sum=total)
        for name, bounds, counts, total in rows
    ], useless
