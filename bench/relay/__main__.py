"""Measure what was named, or all of it, and print it: ``python -m bench.relay [PART...]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from bench import command
from bench.fitness import TWO, Need
from bench.relay.bounds import RECORD, ray_bounds, tcp
from bench.relay.cluster import cluster
from bench.relay.hop import hop
from bench.relay.parts import parts as core_parts
from bench.relay.skew import skew
from bench.relay.transfer_queue import transfer_queue
from bench.relay.work import work

PARTS = ("bounds", "ray", "direct", "transfer_queue", "skew", "parts", "work")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def _ratios(said: dict[str, Any]) -> dict[str, float]:
    """Compare each way of the relay with its bounds, where both were measured.

    `..._bound_gb_per_s` is what these processors could carry were there no work on heads, no
    message and no idle moment: only the transport's own bytes, and the core's part of a hop.
    """
    found: dict[str, float] = {}
    for transport in ("ray", "direct"):
        hopped = said.get(f"relay_by_{transport}")
        if "a_record" in said and "tcp_gb_per_s" in said:
            core_s = sum(said["a_record"][transport].values()) / RECORD * 1e3
            bound = (os.cpu_count() or 1) / (core_s + said[f"{transport}_bytes_cpu_s_per_gb"])
            found |= {
                f"{transport}_core_s_per_gb": core_s,
                f"{transport}_bound_gb_per_s": bound,
                f"{transport}_bound_to_ray_blocks": bound / said["ray_blocks_gb_per_s"],
                f"{transport}_bound_to_tcp": bound / said["tcp_gb_per_s"],
            }
        if hopped and "tcp_gb_per_s" in said:
            found |= {
                f"{transport}_to_ray_blocks": hopped["gb_per_s"] / said["ray_blocks_gb_per_s"],
                f"{transport}_to_put_each": hopped["per_s"] / said["ray_put_each_per_s"],
                f"{transport}_to_tcp": hopped["gb_per_s"] / said["tcp_gb_per_s"],
            }
        if hopped and "per_s" in said.get("transfer_queue", {}):
            found[f"{transport}_to_transfer_queue"] = (
                hopped["per_s"] / said["transfer_queue"]["per_s"]
            )
    return found


@command.orderly("relay")
def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is named")
    parts = parser.parse_args().parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if command.refused(Need(processors=TWO), "relay"):
        sys.exit(1)
    said: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    if "parts" in parts:
        said["a_record"] = core_parts()
    if "work" in parts:
        said["work"] = work()
    with cluster() as made:
        if "bounds" in parts:
            said |= ray_bounds(made)
            rate, spent = tcp()
            said |= {"tcp_gb_per_s": rate / 1e9, "direct_bytes_cpu_s_per_gb": spent}
        for transport in ("ray", "direct"):
            if transport in parts:
                said[f"relay_by_{transport}"] = hop(made, transport=transport)
        if "transfer_queue" in parts:
            said["transfer_queue"] = transfer_queue(made)
        if "skew" in parts:
            said["skew"] = skew()
    said["ratios"] = _ratios(said)
    sys.stdout.write(json.dumps(_rounded(said), indent=1) + "\n")


if __name__ == "__main__":
    main()
