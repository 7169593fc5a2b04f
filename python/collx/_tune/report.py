"""Reports the results as a text table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from collx._bench.units import size_name
from collx._tune.cases import BUILT_IN
from collx._tune.search import Found

_GRAY, _BUILT_IN, _TUNED = "#80868b", "#3b82f6", "#e4572e"  # readable on white and black
_HEAD = ("operator", "dtype", "tensors", "bytes", "built-in", "us", "choice", "us", "faster by")


def text(found: Sequence[Found]) -> str:
    """Returns a line for each case: the built-in choice, the choice of the table, and the gain."""
    rows = [_HEAD, *(_row(one) for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in ("bytes", "us", "faster by") else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        ).rstrip()
        for row in rows
    )


def _row(one: Found) -> tuple[str, ...]:
    kept = one.choice == BUILT_IN
    return (
        one.case.op,
        str(one.case.dtype).removeprefix("torch."),
        _tensors(one),
        size_name(one.case.nbytes),
        one.built_in,
        f"{one.built_in_us:.1f}",
        "-" if kept else str(one.choice),
        "-" if kept else f"{one.us:.1f}",
        "-" if kept else f"{100 * (1 - one.us / one.built_in_us):.0f} %",
    )


def _tensors(one: Found) -> str:
    return "symmetric" if one.case.symmetric else "ordinary"


def draw(file: Path, found: Sequence[Found], title: str) -> None:
    """Plots time over size, with a panel for each operator, dtype and kind of tensors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    def panel(one: Found) -> str:
        dtype = str(one.case.dtype).removeprefix("torch.")
        return f"{one.case.op}, {dtype}, {_tensors(one)} tensors"

    panels = [(name, list(group)) for name, group in groupby(found, key=panel)]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(6 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, group) in zip(grid.flat, panels, strict=False):
        sizes = [one.case.nbytes for one in group]
        axes.plot(
            sizes, [one.built_in_us for one in group], "o-", color=_BUILT_IN, label="built-in"
        )
        axes.plot(sizes, [one.us for one in group], "o-", color=_TUNED, label="tuned")
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds per call")
        axes.set_xticks(sizes, [size_name(size) for size in sizes])
        axes.set_ylim(bottom=min(one.us for one in group) / 2)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.tick_params(colors=_GRAY)
        axes.xaxis.label.set_color(_GRAY)
        axes.yaxis.label.set_color(_GRAY)
        axes.set_title(name, color=_GRAY, fontsize="medium")
        axes.legend(frameon=False, labelcolor=_GRAY, fontsize="small")
        axes.grid(alpha=0.3, color=_GRAY)
    figure.suptitle(title, color=_GRAY)
    figure.savefig(file, dpi=150, transparent=True)
    pyplot.close(figure)
