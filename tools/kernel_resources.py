"""Prints a table of registers, stack and instructions of every kernel in a module or object files.

    python tools/kernel_resources.py --code python/collx/_torch*/libcollx.so > before.txt

`stack` is the local memory of a thread: spilled registers, and arrays that have an address. `code`
is the number of instructions. It requires the disassembler, which is slow (--code). --spills only
prints kernels with a stack. The status is 1 in these cases:

    --stackless PATTERN     a kernel with a matching name has a stack
    --least N               a kernel has fewer registers (--small PATTERN excludes kernels)
    --most N PATTERN        a kernel with a matching name has more registers
    --confine WORD PATTERN  an instruction that contains WORD is in a kernel with another name, or
                            in none (with --code)

cuobjdump is part of CUDA and of Triton, which is installed with PyTorch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

FUNCTION = re.compile(r"^\s*Function (?P<name>\w+):\s*$")
USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)")
ARCHITECTURE = re.compile(r"^arch = (?P<arch>\w+)")
LISTED = re.compile(r"^\s*Function : (?P<name>\w+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s")


class Kernel(NamedTuple):
    arch: str
    name: str
    registers: int
    stack: int
    shared: int


def tool(name: str) -> str | None:
    """Returns a program of the CUDA toolkit: on the path, or the one of Triton."""
    found = shutil.which(name)
    triton = find_spec("triton")
    if found is None and triton is not None and triton.submodule_search_locations:
        own = Path(triton.submodule_search_locations[0], "backends", "nvidia", "bin", name)
        found = str(own) if own.exists() else None
    return found


def cuobjdump(option: str, path: Path) -> str:
    program = tool("cuobjdump")
    if program is None:
        raise SystemExit("cuobjdump was not found: it is part of CUDA, and of Triton")
    done = subprocess.run([program, option, str(path)], capture_output=True, text=True)
    if "does not contain device code" in done.stderr:
        raise SystemExit(f"{path} has no CUDA code: it was built without CUDA")
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return done.stdout


def kernels(path: Path) -> list[Kernel]:
    """Returns the resources of each kernel of a file, as the assembler recorded them."""
    found, arch, name = [], "", ""
    for line in cuobjdump("--dump-resource-usage", path).splitlines():
        if match := ARCHITECTURE.match(line):
            arch = match["arch"]
        elif match := FUNCTION.match(line):
            name = match["name"]
        elif name and (match := USAGE.search(line)):
            found.append(Kernel(arch, name, *(int(n) for n in match.groups())))
            name = ""
    return found


def code(path: Path) -> dict[tuple[str, str], list[str]]:
    """Returns the instructions of each kernel, by architecture and name."""
    listings: dict[tuple[str, str], list[str]] = {}
    arch, listing = "", []
    for line in cuobjdump("-sass", path).splitlines():
        if match := ARCHITECTURE.match(line):
            arch = match["arch"]
        elif match := LISTED.match(line):
            listing = listings.setdefault((arch, match["name"]), [])
        elif INSTRUCTION.match(line):
            listing.append(line)
    return listings


def readable(names: list[str]) -> list[str]:
    """Returns the names as in the source, as far as c++filt can demangle them."""
    if shutil.which("c++filt") is None or not names:
        return names
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    long = done.stdout.splitlines()
    short = [
        re.sub(r"^void |\(anonymous namespace\)::|\(collx::\w+\)|collx::(cuda::)?", "", n)
        for n in long
    ]
    return [name.partition("(")[0] for name in short]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--code", action="store_true", help="count instructions, too")
    parser.add_argument("--spills", action="store_true", help="kernels with a stack alone")
    parser.add_argument("--stackless", metavar="PATTERN", help="kernels that may have no stack")
    parser.add_argument("--least", type=int, default=0, help="registers that each has to have")
    parser.add_argument("--small", metavar="PATTERN", help="kernels that may have fewer")
    parser.add_argument(
        "--most", nargs=2, metavar=("N", "PATTERN"), help="registers that some may have at most"
    )
    parser.add_argument(
        "--confine", nargs=2, metavar=("WORD", "PATTERN"), help="instructions of some kernels alone"
    )
    asked = parser.parse_args()
    word, pattern = asked.confine or ("", "")
    most, bounded = asked.most or ("0", "")
    confined = False
    tables = {path: kernels(path) for path in asked.files}
    wrong = []
    print(f"{'regs':>4} {'stack':>5} {'shared':>6} {'code':>6}  arch    kernel")
    for path, table in tables.items():
        found = [k for k in table if k.stack > 0 or not asked.spills]
        listings = code(path) if asked.code and found else {}
        rows = sorted(zip(readable([k.name for k in found]), found, strict=True))
        for name, k in rows:
            listing = listings.get((k.arch, k.name), [])
            count = len(listing) if listings else "-"
            if word and any(word in line for line in listing):
                confined = True
                if not re.search(pattern, name):
                    wrong.append(f"{name} may have no {word}")
            print(f"{k.registers:>4} {k.stack:>5} {k.shared:>6} {count:>6}  {k.arch:7} {name}")
            if asked.stackless and k.stack > 0 and re.search(asked.stackless, name):
                wrong.append(f"{name} may have no stack")
            small = asked.small is not None and re.search(asked.small, name)
            if k.registers < asked.least and not small:
                wrong.append(f"{name} has less than {asked.least} registers")
            if asked.most and re.search(bounded, name) and k.registers > int(most):
                wrong.append(f"{name} has more than {most} registers")
    if word and not confined:
        wrong.append(f"no kernel has any {word}")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
