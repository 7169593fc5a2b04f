"""Checks the order of the layers for includes in csrc/.

protocol <- cuda | cpu <- memory <- ops <- distributed <- bindings.

Within cuda, the order is: ptx <- arguments <- stages <- transports <- collectives <- the files
directly in cuda.
Only memory, ops, distributed and bindings may use Torch, and only bindings may use Python: the
library of operators loads without Python. protocol and cpu do not use CUDA either. The headers of
kernels that are compiled at run time (.cuh, and the headers that they include) must not include
standard headers, except under `#if !defined(__CUDACC_RTC__)` or in the #else of its opposite.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAY_INCLUDE = {
    "protocol": {"protocol"},
    "cuda": {"protocol", "cuda"},
    "cpu": {"protocol", "cpu"},
    "memory": {"protocol", "cpu", "memory"},
    "ops": {"protocol", "cuda", "cpu", "memory", "ops"},
    "distributed": {"ops", "distributed"},
    "bindings": {"protocol", "cuda", "cpu", "memory", "ops", "distributed", "bindings"},
}
# The folders of a part. Each may include itself and those before it. Files next to the folders may
# include all of them, and no folder may include these files.
LAYERS = {"cuda": ("ptx", "arguments", "stages", "transports", "collectives")}
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|Python\.h)\b")
CUDA = re.compile(r"^(cuda|cooperative_groups|cub|thrust|nv)")
PYTHON = re.compile(r"^(Python\.h|pybind11|torch/(extension\.h|csrc/(utils/pybind|Exceptions)\.h))")
NO_TORCH = {"protocol", "cuda", "cpu"}
NO_CUDA = {"protocol", "cpu", "memory"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?P<kind>[<"])(?P<name>[^>"]+)[>"]')


class Include(NamedTuple):
    line: int
    name: str
    quoted: bool
    host_only: bool  # not visible to the run-time compiler


def includes(path: Path) -> Iterator[Include]:
    """Yields the includes of one file, each with whether it is visible to the run-time compiler."""
    branches: list[bool | None] = []  # for each open #if: whether host only; None: other conditions
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"^\s*#\s*if", text):
            if "__CUDACC_RTC__" not in text:
                branches.append(None)
            else:
                branches.append("ifndef" in text or "!defined" in text.replace(" ", ""))
        elif re.match(r"^\s*#\s*else", text) and branches and branches[-1] is not None:
            branches[-1] = not branches[-1]
        elif re.match(r"^\s*#\s*endif", text) and branches:
            branches.pop()
        elif match := INCLUDE.match(text):
            yield Include(number, match["name"], match["kind"] == '"', True in branches)


def part_of(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0]


def layer_of(path: Path, root: Path) -> str:
    """Returns the layer of a file in a part with layers; "" for a file next to their folders."""
    part, *folders = path.relative_to(root).parts[:-1]
    return folders[0] if part in LAYERS and folders else ""


def is_below(part: str, layer: str, included: str) -> bool:
    """Whether the included layer precedes `layer` or is the same."""
    order = (*LAYERS[part], "")
    return included not in order or order.index(included) <= order.index(layer)


def direction_errors(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cpp", ".cu"):
            continue
        part = part_of(path, root)
        if part not in MAY_INCLUDE:
            yield f"{path}: {part} is no part of the tree"
            continue
        layer = layer_of(path, root)
        if layer and layer not in LAYERS[part]:
            yield f"{path}: {part}/{layer} is no part of the tree"
            continue
        for include in includes(path):
            where = f"{path}:{include.line}: {part} must not include"
            if include.quoted:
                target = (path.parent / include.name).resolve()
                if not target.is_file():
                    yield f"{path}:{include.line}: {include.name} is not there"
                elif (to := part_of(target, root.resolve())) not in MAY_INCLUDE[part]:
                    yield f"{where} {include.name}"
                elif part == to and part in LAYERS:
                    included = layer_of(target, root.resolve())
                    if not is_below(part, layer, included):
                        of = f"{path}:{include.line}: {part}/{layer}"
                        yield f"{of} must not include {include.name}"
            elif part in NO_TORCH and TORCH.match(include.name):
                yield f"{where} <{include.name}>: it knows no Torch"
            elif part != "bindings" and PYTHON.match(include.name):
                yield f"{where} <{include.name}>: it knows no Python"
            elif part in NO_CUDA and CUDA.match(include.name):
                yield f"{where} <{include.name}>: it knows no CUDA"


def run_time_errors(root: Path) -> Iterator[str]:
    waiting = sorted(root.rglob("*.cuh"))
    reached = set(waiting)
    while waiting:
        path = waiting.pop()
        for include in includes(path):
            if include.host_only:
                continue
            if not include.quoted:
                if not CUDA.match(include.name) or include.name.startswith(
                    ("cuda/", "cub", "thrust")
                ):
                    yield f"{path}:{include.line}: <{include.name}> is not there at run time"
                continue
            target = (path.parent / include.name).resolve()
            if target.is_file() and target not in reached:
                reached.add(target)
                waiting.append(target)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0] if arguments else Path(__file__).resolve().parent.parent / "csrc")
    errors = [*direction_errors(root), *run_time_errors(root)]
    print("\n".join(errors) or "includes go one way")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
