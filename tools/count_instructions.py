"""Counts the instructions of eager calls on the CPU, with one rank. Prints one line for each call.

    python tools/count_instructions.py                  # compared with tools/instructions.json
    python tools/count_instructions.py --rewrite        # writes that file
    python tools/count_instructions.py --save before.json
    python tools/count_instructions.py --against before.json
    python tools/count_instructions.py allreduce_ x.add_

Valgrind's tool callgrind counts the instructions. Counts are only comparable for the same compiler,
C library, Python, PyTorch and vector instructions. With others, the script prints a message and
compares nothing. The status is 1 if a count has grown by more than --tolerance percent. Messages
are small (4 KiB, or four rows of the norm), so that the host work of a call dominates the count.

One process under callgrind counts all calls, through the bindings that
torch.utils.benchmark.Timer.collect_callgrind uses. That function starts a process for each call and
instruments it from its first instruction. This takes 260 seconds per call, mostly for the import of
PyTorch. Here callgrind only instruments the calls, which takes 90 seconds for all of them.
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
GOLDEN = Path(__file__).with_name("instructions.json")
EMPTY = "pass"  # measures the loop, which is subtracted
NUMBER = 100  # calls per measurement
REPEATS = 4  # measurements of a call; the smallest one is used
PROGRAMS = ("valgrind", "callgrind_control")
SUMMARY = re.compile(r"^summary: (\d+)$", re.MULTILINE)


def values() -> dict[str, Any]:
    """Returns the variables of the calls."""
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
    """Returns functions that make NUMBER calls each. The first one makes none."""
    known = values()
    made = []
    for statement in [EMPTY, *(CALLS[name] for name in names)]:
        found = dict(known)
        exec(f"def calls():\n  for _ in range({NUMBER}):\n    {statement}", found)
        made.append(found["calls"])
    return made


def fill_free_lists() -> None:
    """Allocates the free blocks of the C heap, so that malloc takes the same path in every process.
    Their number and their positions differ between processes."""
    malloc = ctypes.CDLL(None).malloc
    for size in range(16384, 0, -16):
        for _ in range(8):
            malloc(size)


def run_calls(names: list[str]) -> None:
    """Runs under callgrind, and writes a file of counts for each measurement."""
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
    """Returns the instructions of each call. `measurements`: alternating measurements of all calls,
    the empty one first."""
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
        # A fixed hash seed makes the cost of dictionaries the same in every process.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise SystemExit(f"counting failed:\n{done.stderr.strip()}")
        files = [Path(f"{out}.{i + 1}") for i in range(REPEATS * (len(names) + 1))]
        found = [SUMMARY.search(file.read_text()) for file in files]
    return counts_of([int(match[1]) for match in found if match is not None], names)


def versions() -> dict[str, str]:
    """Returns the versions of what the counts depend on, besides the sources of collx."""
    import torch

    from collx._extension import extension

    compilers = re.findall(
        rb"(?:GCC: |clang version )[\x20-\x7e]+", Path(extension.__file__).read_bytes()
    )
    return {
        "compiler": " and ".join(sorted({found.decode() for found in compilers})),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [
        f"{name} {now.get(name)} instead of {before.get(name)}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


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
    """Returns a line for each call whose number of instructions has grown by more than `tolerance`
    percent."""
    return [
        f"{name}: {number:,} instructions, {100 * number / before[name] - 100:.1f} % more than "
        f"{before[name]:,}; accepted: {tolerance:g} % more"
        for name, number in counts.items()
        if name in before and number > before[name] * (1 + tolerance / 100)
    ]


def report(
    counts: dict[str, int], made_with: dict[str, str], against: Path, tolerance: float
) -> int:
    """Prints the table and returns the exit status."""
    earlier = json.loads(against.read_text())
    before: dict[str, int] = earlier["instructions"]
    others = differing(earlier["versions"], made_with)
    if others:
        print(table(counts, None))
        print(f"not compared with {against}, whose counts hold for others: {', '.join(others)}")
        return 0
    print(table(counts, before))
    more = grown(counts, before, tolerance)
    if more:
        print("\n".join([f"more than in {against}:", *more]))
        print("If the change is worth it, --rewrite writes the new counts.")
    return 1 if more else 0


def save(file: Path, counts: dict[str, int], made_with: dict[str, str]) -> None:
    written = {"versions": made_with, "instructions": counts}
    file.write_text(json.dumps(written, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Counts the instructions of eager calls on the CPU with callgrind."
    )
    parser.add_argument("calls", nargs="*", metavar="CALL", help=f"some of: {', '.join(CALLS)}")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the counts as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", default=GOLDEN)
    parser.add_argument("--tolerance", type=float, default=3, metavar="PERCENT")
    parser.add_argument("--rewrite", action="store_true", help=f"write {GOLDEN.name}")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.calls or list(CALLS)
    unknown = [name for name in names if name not in CALLS]
    if unknown:
        parser.error(f"no such call: {', '.join(unknown)}; accepted: {', '.join(CALLS)}")
    if options.rewrite and options.calls:
        parser.error("--rewrite takes all calls, so that the file has counts of one build")
    if options.inside:
        run_calls(names)
        return 0
    counts, made_with = count(names), versions()
    if options.save is not None:
        save(options.save, counts, made_with)
    if options.rewrite:
        save(GOLDEN, counts, made_with)
        print(table(counts, None))
        return 0
    return report(counts, made_with, options.against, options.tolerance)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
