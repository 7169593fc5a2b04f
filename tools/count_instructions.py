"""Instructions that an eager call on the CPU executes, in a world of one: a table, one call a line.

    python tools/count_instructions.py --save before.json
    python tools/count_instructions.py --against before.json
    python tools/count_instructions.py allreduce_ x.add_

Valgrind's tool callgrind counts them. Counts compare on one machine, with the same versions of
Python and PyTorch. --against FILE adds the earlier counts and a ratio to each line, and ends with 1
if a count has grown by more than --tolerance percent. Messages are small (4 KiB, or four rows of
the norm), so that the host work of a call dominates the count.

One process under callgrind counts all calls, through the bindings that
torch.utils.benchmark.Timer.collect_callgrind uses. That function starts a process for each call and
instruments it from its first instruction: 260 seconds a call, most of which is the import of
PyTorch. Here callgrind instruments the calls alone: 90 seconds for all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CALLS = {
    "x.add_": "x.add_(y)",
    "allreduce_": "collx.allreduce_(x, group=comm)",
    "allreduce out=": "collx.allreduce(x, group=comm, out=y)",
    "allreduce": "collx.allreduce(x, group=comm)",
    "allgather": "collx.allgather(x, group=comm)",
    "torch.ops allreduce.out": "torch.ops.collx.allreduce.out(x, 'sum', name, out=y)",
    "allreduce_rmsnorm fp8 out=": (
        "collx.allreduce_rmsnorm(rows, weight, 1e-6, group=comm, residual=residual, "
        "quantization='fp8', out=results)"
    ),
}
EMPTY = "pass"  # the loop alone, which is subtracted
NUMBER = 100  # calls of a measurement
REPEATS = 4  # measurements of a call, of which the smallest counts
PROGRAMS = ("valgrind", "callgrind_control")
SUMMARY = re.compile(r"^summary: (\d+)$", re.MULTILINE)


def values() -> dict[str, Any]:
    """What the calls name."""
    import torch
    import torch.distributed as dist

    import collx

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm = collx.init(device="cpu")
    rows = torch.ones(4, 64, dtype=torch.bfloat16)
    weight, residual = torch.ones(64, dtype=torch.bfloat16), torch.zeros_like(rows)
    return {
        "torch": torch,
        "collx": collx,
        "comm": comm,
        "name": comm.name,
        "x": torch.ones(1024),
        "y": torch.ones(1024),
        "rows": rows,
        "weight": weight,
        "residual": residual,
        "results": collx.allreduce_rmsnorm(
            rows, weight, 1e-6, group=comm, residual=residual, quantization="fp8"
        ),
    }


def make_calls(names: Iterable[str]) -> list[Callable[[], None]]:
    """Functions that make NUMBER calls each; the first one makes none."""
    known = values()
    made = []
    for statement in [EMPTY, *(CALLS[name] for name in names)]:
        found = dict(known)
        exec(f"def calls():\n  for _ in range({NUMBER}):\n    {statement}", found)
        made.append(found["calls"])
    return made


def fill_free_lists() -> None:
    """Takes the free blocks of the C heap, so that malloc takes the same path in every process.
    How many there are, and where, differs from one process to another."""
    malloc = ctypes.CDLL(None).malloc
    for size in range(16384, 0, -16):
        for _ in range(8):
            malloc(size)


def run_calls(names: list[str]) -> None:
    """Under callgrind: writes a file of counts for each measurement."""
    import torch

    calls = make_calls(names)
    for call in calls:
        call()
    command = ["callgrind_control", "--instr=on", str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)
    gc.collect()
    gc.disable()
    fill_free_lists()
    for _ in range(REPEATS):
        for call in calls:
            torch._C._valgrind_toggle()
            call()
            torch._C._valgrind_toggle_and_dump_stats()


def counts_of(measurements: list[int], names: list[str]) -> dict[str, int]:
    """Instructions of one call, from the measurements of all calls in turn, the empty one first."""
    turn = len(names) + 1
    least = [min(measurements[place::turn]) for place in range(turn)]
    return {
        name: round((count - least[0]) / NUMBER)
        for name, count in zip(names, least[1:], strict=True)
    }


def count(names: list[str]) -> dict[str, int]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        named = " and ".join(missing)
        raise SystemExit(f"{named} not found: install valgrind to count instructions")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        command = [
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"),
            *("--collect-atstart=no", "--instr-atstart=no"),
            *(sys.executable, __file__, "--inside", *names),
        ]
        # Dictionaries of names take the same time in every process.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise SystemExit(f"counting failed:\n{done.stderr.strip()}")
        files = [Path(f"{out}.{i + 1}") for i in range(REPEATS * (len(names) + 1))]
        found = [SUMMARY.search(file.read_text()) for file in files]
    return counts_of([int(match[1]) for match in found if match is not None], names)


def versions() -> dict[str, str]:
    import torch

    return {"python": platform.python_version(), "torch": str(torch.__version__)}


def table(counts: dict[str, int], before: dict[str, int] | None) -> str:
    width = max(map(len, counts), default=0)
    lines = [f"{'call':{width}}  instructions"]
    if before is not None:
        lines[0] += "  before  ratio"
    for name, number in counts.items():
        line = f"{name:{width}}  {number:12}"
        if before is not None and name in before:
            line += f"  {before[name]:6}  {number / before[name]:5.3f}"
        lines.append(line)
    return "\n".join(lines)


def grown(counts: dict[str, int], before: dict[str, int], tolerance: float) -> list[str]:
    """Calls that execute more instructions than before, by more than `tolerance` percent."""
    return [
        name
        for name, number in counts.items()
        if name in before and number > before[name] * (1 + tolerance / 100)
    ]


def report(
    counts: dict[str, int], made_with: dict[str, str], against: Path | None, tolerance: float
) -> int:
    if against is None:
        print(table(counts, None))
        return 0
    earlier = json.loads(against.read_text())
    before: dict[str, int] = earlier["instructions"]
    print(table(counts, before))
    if earlier["versions"] != made_with:
        print(f"versions differ: {earlier['versions']} before, {made_with} now")
    more = grown(counts, before, tolerance)
    if more:
        print(f"more than {tolerance:g} % above {against}: {', '.join(more)}")
    return 1 if more else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Counts the instructions of eager calls on the CPU with callgrind."
    )
    parser.add_argument("calls", nargs="*", metavar="CALL", help=f"some of: {', '.join(CALLS)}")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the counts as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a saved file")
    parser.add_argument("--tolerance", type=float, default=2, metavar="PERCENT")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.calls or list(CALLS)
    unknown = [name for name in names if name not in CALLS]
    if unknown:
        parser.error(f"no such call: {', '.join(unknown)}; accepted: {', '.join(CALLS)}")
    if options.inside:
        run_calls(names)
        return 0
    counts, made_with = count(names), versions()
    status = report(counts, made_with, options.against, options.tolerance)
    if options.save is not None:
        written = {"versions": made_with, "instructions": counts}
        options.save.write_text(json.dumps(written, indent=2) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
