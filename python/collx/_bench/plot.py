"""Plots time over size."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from collx._bench.call import Kind
from collx._bench.op import Op
from collx._bench.runner import Results
from collx._bench.units import size_name

GRAY = "#80868b"  # readable on white and black, like the other colors
OURS, PEERS = "#e4572e", ("#3b82f6", "#a78bfa", "#22a06b", "#c99a00", "#d16ba5", "#17a2b8")


class Line(NamedTuple):
    label: str
    points: Sequence[tuple[int, float]]  # bytes, microseconds
    ours: bool
    style: str = "o-"
    color: str = ""  # by default the next color of PEERS


def draw(file: Path, op: Op, results: Results, wire_gbs: float | None) -> None:
    """Plots every row of a run. A dashed line shows the wire limit of `wire_gbs` (10^9 bytes/s)."""
    rows = [r for r in results.rows if r.record.us is not None and not r.record.is_host_time]
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        mine = [row for row in rows if row.label == label]
        points = sorted((row.record.bytes, row.record.us or 0.0) for row in mine)
        lines.append(Line(label, points, any(row.kind is Kind.OURS for row in mine)))
    title = op.name
    if rows:
        first = rows[0].record
        title = f"{first.op}, {first.dtype}, {first.world} ranks, {first.device}"
    if wire_gbs and rows:
        sizes = sorted({row.record.bytes for row in rows})
        limit = [
            op.bytes_on_link(nbytes, rows[0].record.world) / wire_gbs / 1e3 for nbytes in sizes
        ]
        label = f"wire limit, {wire_gbs:g} GB/s"
        lines.append(Line(label, list(zip(sizes, limit, strict=True)), False, "--"))
    picture(file, lines, title, size=(9, 6))


def picture(file: Path, lines: Sequence[Line], title: str, size: tuple[float, float]) -> None:
    """Plots all lines on logarithmic axes. The time axis starts at half of the shortest time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.rcParams["svg.hashsalt"] = "collx"  # makes the file reproducible
    figure, axes = pyplot.subplots(figsize=size)
    colors = itertools.cycle(PEERS)
    for line in lines:
        color = GRAY if line.style == "--" else OURS if line.ours else line.color or next(colors)
        weight = 2.6 if line.ours else 1.4
        axes.plot(*zip(*line.points, strict=True), line.style, label=line.label, color=color)
        axes.lines[-1].set(linewidth=weight, markersize=3.5)
    axes.set(xscale="log", yscale="log", ylabel="microseconds per call")
    axes.set_xlabel("bytes of the message on each rank")
    measured = [us for line in lines if line.style != "--" for _, us in line.points]
    if measured:
        axes.set_ylim(bottom=min(measured) / 2)
        axes.legend(frameon=False, labelcolor=GRAY, fontsize="small")
    sizes = sorted({nbytes for line in lines for nbytes, _ in line.points})
    shown = sizes[:: 1 + len(sizes) // 12]
    axes.set_xticks(shown, [size_name(nbytes) for nbytes in shown])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3, color=GRAY)
    axes.set_title(title, color=GRAY, fontsize="medium")
    axes.tick_params(colors=GRAY)
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color(GRAY)
    for edge in axes.spines.values():
        edge.set_color(GRAY)
    figure.tight_layout()
    metadata = {"Date": None} if file.suffix == ".svg" else None
    figure.savefig(file, dpi=150, transparent=True, metadata=metadata)
    pyplot.close(figure)
