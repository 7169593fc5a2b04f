"""Draws the figures of the README from JSON files of the benchmark.

    python benchmarks/figures.py docs/figures/*.json

Writes FILE.svg for each FILE.json: latency over size, with one line for each library, which shows
its fastest form at each size, and a dashed line for the wire limit of one link. The background is
transparent and the text is gray, so a figure is readable on light and dark pages.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from collx._bench.plot import PEERS, Line, picture
from collx._bench.units import HOST_TIME

Records = list[dict[str, Any]]

# Labels by the prefix of the implementation's name. Each has the same color in every figure.
LIBRARIES = {
    "collx": "collx",
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "torch": "PyTorch symmetric memory",
    "nccl": "NCCL",
}
TITLES = {
    "allreduce": "All-reduce",
    "allreduce_residual_rmsnorm": "All-reduce + residual + RMSNorm",
    "allreduce_residual_rmsnorm_fp8": "All-reduce + residual + RMSNorm + FP8",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of one operator each")
    parser.add_argument("--wire-gbs", type=float, default=360, help="the link's GB/s")
    options = parser.parse_args()
    for file in options.files:
        records = [r for r in json.loads(file.read_text()) if r.get("us") is not None]
        records = [r for r in records if not r["op"].endswith(HOST_TIME) and r["op"] != "init"]
        drawn = [*lines(records), wire_limit(records, options.wire_gbs)]
        picture(file.with_suffix(".svg"), drawn, title(records), size=(7.2, 3.6))


def title(records: Records) -> str:
    (op,) = {record["op"] for record in records}
    first = records[0]
    return f"{TITLES.get(op, op)}, {first['dtype']}, {first['world']} ranks"


def lines(records: Records) -> list[Line]:
    """Returns one line for each library, collx first."""
    colors = dict(zip(LIBRARIES, ("", *PEERS), strict=False))
    found = []
    for start, label in LIBRARIES.items():
        mine = [r for r in records if r["impl"].startswith(start)]
        if mine:
            found.append(Line(label, fastest(mine), start == "collx", color=colors[start]))
    return found


def wire_limit(records: Records, gbs: float) -> Line:
    """Returns the line of the times that the bytes of a call take on the link."""
    limits = {r["bytes"]: r["busbw_gbs"] * r["us"] / gbs for r in records if r["busbw_gbs"]}
    return Line(f"wire limit, {gbs:g} GB/s", sorted(limits.items()), False, "--")


def fastest(records: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """Returns (bytes, microseconds) of the fastest form at each size."""
    best: dict[int, float] = {}
    for record in records:
        best[record["bytes"]] = min(record["us"], best.get(record["bytes"], record["us"]))
    return sorted(best.items())


if __name__ == "__main__":
    main()
