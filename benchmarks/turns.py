"""Measures two builds of collx alternately in one run on one machine, and prints their ratios.

    python benchmarks/turns.py OLD NEW --ranks 2

OLD and NEW are folders with a built package `collx`, such as `python` in a checkout. Each turn is a
run of `python -m collx bench` of one build without peers. Prints the medians of the turns, and
NEW / OLD. Ratios above --limit are marked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M"
ROWS = "1,8,16,64,128,256,512,2048"

Cell = tuple[str, str, int, str]  # op, implementation, bytes or rows, rounding


def main() -> int:
    parser = argparse.ArgumentParser(description="Two builds of collx by turns.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2, help="of each build (2)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=1.03, help="ratio above which it is marked")
    parser.add_argument("--sizes", default=SIZES, help=f"of the collectives ({SIZES})")
    parser.add_argument("--rows", default=ROWS, help=f"of the fused norms ({ROWS})")
    options = parser.parse_args()
    builds = (options.old.resolve(), options.new.resolve())
    times: tuple[dict[Cell, list[float]], dict[Cell, list[float]]] = ({}, {})
    for turn in range(options.turns):
        for build, found in zip(builds, times, strict=True):
            print(f"turn {turn + 1}: {build}", file=sys.stderr, flush=True)
            for cell, us in measured(build, options).items():
                found.setdefault(cell, []).append(us)
    for build in builds:
        compiled = sum(file.stat().st_size for file in (build / "collx").rglob("*.so"))
        print(f"{build}: {compiled / 2**20:.1f} MiB compiled")
    show(times[0], times[1], options.limit)
    return 0


def measured(build: Path, options: argparse.Namespace) -> dict[Cell, float]:
    """Runs one turn and returns its times."""
    bench = [sys.executable, "-m", "collx", "bench", f"--ranks={options.ranks}"]
    what = ["all", "--sizes", options.sizes, "--rows", options.rows]
    how = ["--rounding", "fp32,parity_weight", "--dtype", "bfloat16", "--device", options.device]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        others = ["--peers", "none", "--json", file.name]
        subprocess.run(
            [*bench, *what, *how, *others],
            env={**os.environ, "PYTHONPATH": f"{build}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        records = json.loads(Path(file.name).read_text())
    return {
        (r["op"], r["impl"], r["rows"] or r["bytes"], r["rounding"] or ""): r["us"] for r in records
    }


def show(old: dict[Cell, list[float]], new: dict[Cell, list[float]], limit: float) -> None:
    ratios = []
    for cell in old:
        before, after = statistics.median(old[cell]), statistics.median(new[cell])
        ratios.append(after / before)
        op, implementation, size, rounding = cell
        mark = "  <--" if ratios[-1] > limit else ""
        print(
            f"{op:<32} {implementation:<26} {rounding:<14} {size:>10} "
            f"{before:>10.2f} {after:>10.2f} {ratios[-1]:>6.3f}{mark}"
        )
    middle = statistics.median(ratios)
    above = sum(ratio > limit for ratio in ratios)
    print(f"{len(ratios)} cells, median ratio {middle:.3f}, {above} above {limit}")


if __name__ == "__main__":
    sys.exit(main())
