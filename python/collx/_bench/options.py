"""Command line of the benchmark. Flags have the names and the meaning of those of nccl-tests."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from collx._arguments import (
    RankParser,
    columns,
    count,
    dtypes,
    factor,
    file,
    names,
    picture,
    positive,
    row_counts,
    size,
    size_list,
)
from collx._bench import cpu_peers, cuda_peers, norm_peers
from collx._bench.norm_problem import DTYPES as NORM_DTYPES
from collx._bench.op import Op
from collx._bench.ops import OPS
from collx._bench.ops_norm import NormOp
from collx._bootstrap.options import MAX_RANKS
from collx._extension import build
from collx._launch import default_ranks, started_ranks
from collx._tuning import DTYPES
from collx.ops.quantization import ROUNDINGS

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")
CPU_PEERS = (*cpu_peers.PEERS, norm_peers.UNFUSED, "mpi")
CUDA_PEERS = (*cuda_peers.PEERS, norm_peers.UNFUSED)
ROWS = {"cpu": [1, 16, 64, 128], "cuda": [1, 16, 64, 128, 512, 2048]}
FEW_ROWS = {"cpu": [1, 16], "cuda": [1, 64, 512]}  # with "all"
FACTOR = 4.0
HOST_BYTES = 1 << 12


@dataclass(frozen=True)
class Variant:
    """An operator with the options of one table."""

    op: Op
    dtype: str
    reduce_op: str
    rounding: str  # of a fused norm


def parser() -> argparse.ArgumentParser:
    p = RankParser(
        prog="python -m collx bench",
        description="Measures the operators of collx and of other libraries.",
    )
    p.add_argument(
        "ops",
        nargs="+",
        choices=(*OPS, "all"),
        metavar="OP",
        help=f"operators to measure, one after the other: {', '.join(OPS)}, or all",
    )
    p.add_argument(
        "--rows", type=row_counts, help="numbers of rows of the fused norms, with commas"
    )
    p.add_argument(
        "--cols", type=columns, default=8192, help="length of a row of the fused norms (8192)"
    )
    p.add_argument(
        "--rounding",
        type=names,
        default=["fp32"],
        help=f"of the fused norms: all, or with commas: {', '.join(ROUNDINGS)} (fp32)",
    )
    p.add_argument(
        *("-g", "--ngpus", "--ranks"),
        dest="ranks",
        type=count,
        help="processes to start, unless torchrun has started them (one for each GPU; on the CPU "
        "one for each core, at least 2 and at most 4)",
    )
    p.add_argument(
        *("-b", "--begin", "--minbytes"),
        type=size,
        default=1 << 10,
        help="smallest size (1K)",
    )
    p.add_argument(
        *("-e", "--end", "--maxbytes"),
        type=size,
        help="largest size (256M on CUDA, 64M on CPU)",
    )
    p.add_argument(
        *("-f", "--factor", "--stepfactor"),
        type=factor,
        help="factor from size to size (4); has precedence over -i",
    )
    p.add_argument("-i", "--stepbytes", type=size, help="bytes added from size to size, without -f")
    p.add_argument("--sizes", type=size_list, help="with commas, in place of -b, -e, -f and -i")
    p.add_argument(
        *("-n", "--iterations", "--iters"),
        type=count,
        default=0,
        help="calls in a graph or batch (100; above 1 MiB 20; above 16 MiB 8)",
    )
    p.add_argument(
        *("-w", "--warmup", "--warmup_iters"),
        type=count,
        default=5,
        help="untimed calls (5)",
    )
    p.add_argument(
        *("-c", "--check"),
        type=int,
        choices=(0, 1),
        default=1,
        help="1: check every result; 0: time calls without a check (1)",
    )
    p.add_argument(
        *("-d", "--dtype", "--datatype"),
        type=dtypes,
        help=f"all, or with commas: {', '.join(DTYPES)} (bfloat16 on CUDA, float32 on CPU)",
    )
    p.add_argument(
        *("-o", "--reduce-op", "--op"),
        type=names,
        default=["sum"],
        help=f"all, or with commas: {', '.join(REDUCE_OPS)} (sum)",
    )
    p.add_argument("-r", "--root", type=count, default=0, help="rank that sends or receives (0)")
    p.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda if there is a GPU and this build has kernels, otherwise cpu (auto)",
    )
    p.add_argument(
        "--peers",
        type=names,
        default=["all"],
        help=f"all, none, or with commas, on CUDA: {', '.join(CUDA_PEERS)}; on CPU: "
        f"{', '.join(CPU_PEERS)} (all)",
    )
    p.add_argument(
        "--algorithms", type=names, default=["auto"], help="auto, all, or names with commas (auto)"
    )
    p.add_argument("--symmetric", action="store_true", help="collx on symmetric tensors only")
    p.add_argument("--max-blocks", type=count, default=0, help="bound on collx's CUDA grid (none)")
    p.add_argument(
        "--format",
        choices=("table", "nccl"),
        default="table",
        help="one table, or lines as nccl-tests has them, out of place and in place",
    )
    p.add_argument("--json", type=file, help="file for the records")
    p.add_argument("--plot", type=picture, help="picture of time over size (.png, .svg, .pdf)")
    p.add_argument(
        "--wire-gbs", type=positive, help="link's GB/s, for the limit in the picture (360 on CUDA)"
    )
    p.add_argument(
        "--host-time", action="store_true", help="also time eager calls of all forms on the host"
    )
    p.add_argument(
        "--multicast",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow NVLink multicast in all libraries, and include collx's multicast algorithms in "
        "--algorithms all",
    )
    return p


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and completes the options. Exits with a usage message if they are inconsistent."""
    p = parser()
    options = p.parse_args(arguments)
    has_cuda = build.cuda is not None and torch.cuda.is_available()
    if options.device == "auto":
        options.device = "cuda" if has_cuda else "cpu"
    on_cuda = options.device == "cuda"
    if on_cuda and not has_cuda:
        p.error("--device: got cuda, but there is no GPU, or this build has no CUDA kernels")
    if options.end is None:
        options.end = max(options.begin, (256 << 20) if on_cuda else (64 << 20))
    if options.end < options.begin:
        p.error("-e is smaller than -b")
    if options.dtype is None:
        options.dtype = ["bfloat16" if on_cuda else "float32"]
    options.dtype = _choice(p, "--dtype", options.dtype, DTYPES)
    options.reduce_op = _choice(p, "--reduce-op", options.reduce_op, REDUCE_OPS)
    _choose_ranks(p, options)
    world = options.ranks
    if options.root >= world:
        p.error(f"--root {options.root}: there are {world} ranks")
    if options.wire_gbs is None and on_cuda:
        options.wire_gbs = 360.0
    if options.plot is not None and find_spec("matplotlib") is None:
        p.error("--plot needs matplotlib")
    options.rounding = _choice(p, "--rounding", options.rounding, ROUNDINGS)
    _choose_ops(p, options)
    options.peers = _choice(p, "--peers", options.peers, CUDA_PEERS if on_cuda else CPU_PEERS)
    for op in (OPS[name] for name in options.ops):
        if op.has_tensor:
            known = ("auto", *op.algorithms(multicast=True))
            _choice(p, f"--algorithms of {op.name}", options.algorithms, known)
    return options


def _choose_ranks(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    started = started_ranks()
    if options.ranks is None:
        options.ranks = started or default_ranks(options.device)
    most = MAX_RANKS[options.device]
    if not 1 <= options.ranks <= most:
        p.error(f"-g: got {options.ranks}; accepted on {options.device}: 1 to {most}")
    if started is not None and options.ranks != started:
        p.error(f"-g: got {options.ranks}; {started} ranks have been started")


def _choose_ops(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Sets the selected operators, and the numbers of rows of the fused norms."""
    everything = "all" in options.ops
    if everything:
        options.ops = [name for name, op in OPS.items() if _in_all(op, options)]
    options.ops = list(dict.fromkeys(options.ops))
    if options.rows is None:
        options.rows = (FEW_ROWS if everything else ROWS)[options.device]
    for name in options.ops:
        if not _variants(options, OPS[name]):
            given = ", ".join(options.dtype)
            if isinstance(OPS[name], NormOp):
                p.error(f"{name} of {given}: it takes {', '.join(NORM_DTYPES)}")
            p.error(f"avg of {given}: averages need a floating-point dtype")


def _in_all(op: Op, options: argparse.Namespace) -> bool:
    return not isinstance(op, NormOp) or (op.in_all and bool(_variants(options, op)))


def variants(options: argparse.Namespace) -> list[Variant]:
    """Returns the measured variants, in order."""
    return [variant for name in options.ops for variant in _variants(options, OPS[name])]


def _variants(options: argparse.Namespace, op: Op) -> list[Variant]:
    if isinstance(op, NormOp):
        fit = [dtype for dtype in options.dtype if dtype in NORM_DTYPES]
        return [Variant(op, dtype, "sum", how) for dtype in fit for how in options.rounding]
    fit = options.dtype if op.has_tensor else options.dtype[:1]
    return [
        Variant(op, dtype, reduce_op, "")
        for dtype in fit
        for reduce_op in (options.reduce_op if op.reduces else ["sum"])
        if not (reduce_op == "avg" and "int" in dtype)
    ]


def _choice(
    p: argparse.ArgumentParser, flag: str, given: list[str], known: Sequence[str]
) -> list[str]:
    if given == ["all"]:
        return list(known)
    if given == ["none"] and flag == "--peers":
        return []
    if not given:
        p.error(f"{flag}: got nothing; accepted: all, {', '.join(known)}")
    for name in given:
        if name not in known:
            p.error(f"{flag}: {name!r} is none of all, {', '.join(known)}")
    return given


def sizes(options: argparse.Namespace, variant: Variant, world: int) -> list[int]:
    """Returns the bytes of each case, ascending and without duplicates."""
    op = variant.op
    if not op.has_tensor:
        return [0]
    if isinstance(op, NormOp):
        return [rows * _row_bytes(options, variant) for rows in options.rows]
    asked = list(options.sizes or [])
    at = float(options.begin)
    while not options.sizes and at <= options.end:
        asked.append(int(at))
        adds = options.stepbytes is not None and options.factor is None
        at = at + options.stepbytes if adds else at * (options.factor or FACTOR)
    return sorted({whole_parts(options, variant, world, nbytes) for nbytes in asked})


def whole_parts(options: argparse.Namespace, variant: Variant, world: int, nbytes: int) -> int:
    """Rounds `nbytes` down to whole elements (the same number for each rank if the tensor is
    divided), or to whole rows."""
    op = variant.op
    if not op.has_tensor:
        return 0
    unit: int = getattr(torch, variant.dtype).itemsize * (world if op.divided else 1)
    if isinstance(op, NormOp):
        unit = _row_bytes(options, variant)
    return max(unit, nbytes // unit * unit)


def _row_bytes(options: argparse.Namespace, variant: Variant) -> int:
    return int(options.cols * getattr(torch, variant.dtype).itemsize)
