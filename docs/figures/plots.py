"""Draws the plots of docs/guide/performance.md from its tables: python docs/figures/plots.py

overlap.svg       how much a matrix product slows down beside an all-gather
collectives_W.svg the time of every collective except the all-reduce over the size, for W ranks

Both need matplotlib. The second also needs collx, for the bytes that cross a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "guide" / "performance.md"
GRAY, OURS, PEER = "#80868b", "#e4572e", "#3b82f6"  # readable on white and on black
WIRE_GBS = 360  # of a link in one direction, as on the page
RANKS = (2, 4)


class Row(NamedTuple):
    name: str
    slower: float
    """Percent by which the product takes longer."""
    alone: float
    """Microseconds of the all-gather without the product."""


def overlap_rows(text: str) -> dict[int, list[Row]]:
    """Returns the rows of the table of all-gathers beside a product, by number of ranks."""
    head = re.search(r"^\| all-gather \| (.*) \|\n\|[-: |]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert head is not None, f"{PAGE} has no table of all-gathers beside a product"
    ranks = [int(number) for number in re.findall(r"product, (\d+) ranks", head[1])]
    found: dict[int, list[Row]] = {number: [] for number in ranks}
    for line in head[2].splitlines():
        name, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        for place, number in enumerate(ranks):
            _, slower, alone = cells[3 * place : 3 * place + 3]
            if alone:
                row = Row(name.replace("`", ""), float(slower.rstrip(" %")), float(alone))
                found[number].append(row)
    return found


def draw_overlap(file: Path, found: dict[int, list[Row]]) -> None:
    """Draws a panel for each number of ranks. Lower and further left is better."""
    pyplot = plotting()
    figure, panels = pyplot.subplots(1, len(found), figsize=(10, 4), layout="constrained")
    for axes, (ranks, points) in zip(panels, found.items(), strict=True):
        for name, slower, alone in points:
            axes.plot(alone, slower, "o", color=PEER if name == "NCCL" else OURS)
            axes.annotate(
                name,
                (alone, slower),
                xytext=(6, -12 if name == "copy_engine" else 4),
                textcoords="offset points",
                color=GRAY,
                fontsize="small",
            )
        axes.set_xlim(0, 1.35 * max(point.alone for point in points))
        axes.margins(y=0.1)
        axes.axhline(0, color=GRAY, linewidth=0.8)
        style(axes, f"{ranks} ranks")
        axes.set_xlabel("all-gather of 128 MiB alone, microseconds", color=GRAY)
        axes.set_ylabel("product slower by, %", color=GRAY)
    save(file, figure)


class Point(NamedTuple):
    nbytes: int
    collx: float
    """Microseconds of the faster form."""
    peer: float
    """Microseconds of the fastest form of another library."""


def collective_points(text: str, ranks: int) -> dict[str, list[Point]]:
    """Returns the points of the tables of a number of ranks, by collective."""
    table = re.compile(
        rf"^<!-- table: (\w+), {ranks} ranks, cuda, bfloat16, brief -->\n(.*?)\n\n(?!\|)",
        re.MULTILINE | re.DOTALL,
    )
    found: dict[str, list[Point]] = {}
    for op, lines in table.findall(text):
        head, _, *body = [line.strip("| ").split(" | ") for line in lines.strip().splitlines()]
        ours = [place for place, name in enumerate(head) if name.startswith("collx")]
        peer = head.index("best peer")
        found[op] = [
            Point(
                size(row[0]),
                min(microseconds(row[place]) for place in ours),
                microseconds(row[peer]),
            )
            for row in body
        ]
    del found["allreduce"]  # benchmarks/figures.py draws it with each peer
    return found


def size(cell: str) -> int:
    number, unit = cell.split()
    return int(number) << {"Ki": 10, "Mi": 20}[unit]


def microseconds(cell: str) -> float:
    return float("inf") if cell == "-" else float(cell.replace(",", ""))


def draw_collectives(file: Path, found: dict[str, list[Point]], ranks: int) -> None:
    """Draws a panel for each collective: collx, the best peer and the wire limit. Lower is
    better."""
    from collx._bench.ops import OPS

    pyplot = plotting()
    figure, panels = pyplot.subplots(2, 4, figsize=(12, 5.5), sharex=True, layout="constrained")
    for axes, (op, points) in zip(panels.flat, found.items(), strict=True):
        sizes = [point.nbytes for point in points]
        limits = [OPS[op].bytes_on_link(nbytes, ranks) / WIRE_GBS / 1e3 for nbytes in sizes]
        axes.loglog(sizes, [point.collx for point in points], color=OURS, label="collx")
        axes.loglog(sizes, [point.peer for point in points], color=PEER, label="best peer")
        axes.loglog(sizes, limits, "--", color=GRAY, label=f"wire limit, {WIRE_GBS} GB/s")
        axes.set_ylim(bottom=1)
        axes.set_xticks([1 << 10, 1 << 15, 1 << 20, 1 << 25], ["1K", "32K", "1M", "32M"])
        axes.minorticks_off()
        style(axes, op)
    for axes in panels[-1]:
        axes.set_xlabel("bytes", color=GRAY)
    for axes in panels[:, 0]:
        axes.set_ylabel("microseconds", color=GRAY)
    panels[0, 0].legend(fontsize="small", labelcolor=GRAY, framealpha=0)
    save(file, figure)


def plotting() -> Any:
    """Returns matplotlib.pyplot, which then writes equal files for equal figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "collx"
    return pyplot


def style(axes: Any, title: str) -> None:
    axes.set_title(title, color=GRAY, fontsize="medium")
    axes.tick_params(colors=GRAY)
    axes.grid(alpha=0.3, color=GRAY)
    for edge in axes.spines.values():
        edge.set_color(GRAY)


def save(file: Path, figure: Any) -> None:
    figure.savefig(file, transparent=True, metadata={"Date": None})
    plotting().close(figure)


def main(folder: Path) -> None:
    text = PAGE.read_text()
    draw_overlap(folder / "overlap.svg", overlap_rows(text))
    for ranks in RANKS:
        file = folder / f"collectives_{ranks}.svg"
        draw_collectives(file, collective_points(text, ranks), ranks)


if __name__ == "__main__":
    main(FOLDER)
