"""Command line of `python -m collx tune`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from collx._arguments import RankParser, factor, file, names, picture, positive, size
from collx._bootstrap.options import MAX_RANKS
from collx._extension import build, extension
from collx._launch import started_ranks
from collx._tuning import DTYPES


@dataclass(frozen=True)
class Options:
    """The options of a run. Sizes are in bytes of the full tensor."""

    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    begin: int
    end: int
    factor: float
    symmetric: bool
    output: Path
    plot: Path | None
    ranks: int
    device: str
    seconds: float

    def sizes(self, unit: int) -> list[int]:
        """Returns the sizes in ascending order, rounded down to multiples of `unit` bytes."""
        return sorted({max(unit, size // unit * unit) for size in self._sizes()})

    def _sizes(self) -> Iterator[int]:
        size = float(self.begin)
        while size <= self.end:
            yield int(size)
            size *= self.factor


def parse(argv: Sequence[str]) -> Options:
    """Parses the options. Raises SystemExit with status 2 and a message if they are invalid."""
    parser = _parser()
    given = parser.parse_args(argv)
    cuda = build.cuda is not None and torch.cuda.is_available()
    device = given.device or ("cuda" if cuda else "cpu")
    if device == "cuda" and not cuda:
        parser.error("--device: got cuda, but there is no GPU, or this build has no CUDA kernels")
    _check_names(parser, "--ops", given.ops, extension.tunable_operators())
    dtypes = given.dtypes
    if dtypes is None:
        dtypes = ["bfloat16" if device == "cuda" else "float32"]
    _check_names(parser, "--dtypes", dtypes, DTYPES)
    if given.end < given.begin:
        parser.error("-e: the largest size is less than the smallest size")
    if given.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed")
    return Options(
        ops=tuple(dict.fromkeys(given.ops)),
        dtypes=tuple(dict.fromkeys(dtypes)),
        begin=given.begin,
        end=given.end,
        factor=given.factor,
        symmetric=given.symmetric,
        output=given.output,
        plot=given.plot,
        ranks=_ranks(parser, given.ranks, device),
        device=device,
        seconds=given.seconds,
    )


def _parser() -> argparse.ArgumentParser:
    p = RankParser(
        prog="python -m collx tune",
        description="Measures the algorithms on this machine, and writes the choices that are "
        'faster than those of algorithm="auto" to a file for collx.init(tuning=...). Starts its '
        "own ranks, or uses those of torchrun.",
    )
    p.add_argument("--ops", type=names, default=["allreduce"], help="operators, with commas")
    p.add_argument(
        "--dtypes", type=names, help="with commas (bfloat16 on GPUs, float32 on the CPU)"
    )
    p.add_argument("-b", "--begin", type=size, default=1 << 10, help="smallest size (1K)")
    p.add_argument("-e", "--end", type=size, default=64 << 20, help="largest size (64M)")
    p.add_argument("-f", "--factor", type=factor, default=4.0, help="between two sizes (4)")
    p.add_argument("--symmetric", action="store_true", help="measure symmetric tensors, too")
    p.add_argument("--output", type=file, default="tuning.json", help="(tuning.json)")
    p.add_argument("--plot", type=picture, help="picture of time over size (.png, .svg, .pdf)")
    p.add_argument("--ranks", type=int, help="number of ranks (all GPUs, or 2 on the CPU)")
    p.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="cuda if there is a GPU and this build has kernels, otherwise cpu",
    )
    p.add_argument(
        "--seconds", type=positive, default=0.5, help="duration of one measurement (0.5)"
    )
    return p


def _ranks(parser: argparse.ArgumentParser, given: int | None, device: str) -> int:
    started = started_ranks()
    if started is not None and given not in (None, started):
        parser.error(f"--ranks: got {given}; {started} ranks have been started")
    most = MAX_RANKS[device]
    if device == "cuda":
        most = min(most, torch.cuda.device_count())
    ranks = given if given is not None else started or (most if device == "cuda" else 2)
    if not 2 <= ranks <= most:
        parser.error(f"--ranks: got {ranks}; accepted on {device} of this machine: 2 to {most}")
    return ranks


def _check_names(
    parser: argparse.ArgumentParser, flag: str, given: Sequence[str], accepted: Sequence[str]
) -> None:
    unknown = [name for name in given if name not in accepted]
    if unknown or not given:
        parser.error(
            f"{flag}: got {', '.join(unknown) or 'nothing'}; accepted: {', '.join(accepted)}"
        )
