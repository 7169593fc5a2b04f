"""Draws the pictures of the documentation: python docs/figures/pictures.py

Each operator is a row of OPERATORS: columns of cells, with one row of cells for each rank. "a0" is
part 0 of rank 0's tensor, "b" is rank 1's whole tensor, "Σ1" is part 1 of the sum, "·" is not read,
and a cell that starts with "=" is text. The arrows follow from the cells: a cell comes from equal
cells of the column before it, and a sum from its summands. The background is transparent, and all
colors are readable on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
GRAY, SUM = "#80868b", "#8b5cf6"
COLORS = {"a": "#3b82f6", "b": "#d9662b", "c": "#22a06b", "Σ": SUM}
WIDTH, HEIGHT, ROW, LEFT = 34, 26, 54, 70

Column = tuple[str, list[str]]
WHOLE, PARTS = ["a", "b", "c"], ["a0 a1 a2", "b0 b1 b2", "c0 c1 c2"]
ROWS = ["a0 b0 c0", "a1 b1 c1", "a2 b2 c2"]

OPERATORS: dict[str, list[Column]] = {
    "allreduce": [("input", WHOLE), ("result", ["Σ"] * 3)],
    "reducescatter": [("input", PARTS), ("result", ["Σ0", "Σ1", "Σ2"])],
    "allgather": [("input", WHOLE), ("result", ["a b c"] * 3)],
    "broadcast": [("input, root 0", ["a", "·", "·"]), ("result", ["a"] * 3)],
    "reduce": [("input", WHOLE), ("result, root 0", ["Σ", "b", "c"])],
    "gather": [("input", WHOLE), ("result, root 0", ["a b c", "=0 =0 =0", "=0 =0 =0"])],
    "scatter": [("input, root 0", ["a0 a1 a2", "· · ·", "· · ·"]), ("result", ["a0", "a1", "a2"])],
    "alltoall": [("input", PARTS), ("result", ROWS)],
    "alltoallv": [
        ("input", ["a0 a1 a1 a2", "b0 b2 b2", "c0 c0 c1"]),
        ("result", ["a0 b0 c0 c0", "a1 a1 c1", "a2 b2 b2"]),
    ],
    "barrier": [("call", WHOLE), ("return", ["a b c"] * 3)],
    "epilogue": [("input", WHOLE), ("sum", ["Σ"] * 3), ("result", ["=f(Σ,e)"] * 3)],
    "allreduce_rmsnorm": [
        ("input", WHOLE),
        ("sum", ["Σ"] * 3),
        ("results", ["=norm(Σ+r) =Σ+r"] * 3),
    ],
    "reducescatter_rmsnorm": [
        ("input", PARTS),
        ("sum", ["Σ0", "Σ1", "Σ2"]),
        ("results", [f"=norm(Σ{i}+r{i}) =Σ{i}+r{i}" for i in range(3)]),
    ],
    "allreduce_layernorm": [
        ("input", WHOLE),
        ("sum", ["Σ"] * 3),
        ("results", ["=layernorm(Σ+r) =Σ+r"] * 3),
    ],
    "oneshot": [("input", WHOLE), ("slots", ["a b c"] * 3), ("result", ["Σ"] * 3)],
    "twoshot": [
        ("input", PARTS),
        ("slots", ROWS),
        ("reduced part", ["Σ0", "Σ1", "Σ2"]),
        ("result", ["Σ0 Σ1 Σ2"] * 3),
    ],
}
REGION = [
    ("header", "poison word; notes of failure; mailboxes of checked mode", "peers and owner"),
    ("barriers", "epoch and flags of each block", "owner and peers"),
    ("tiles", "epoch and busy mark of each tile", "owner"),
    ("slots", "two for each peer, for even and odd uses", "the sending peer"),
    ("channels", "slots of one-way collectives; counts; done words", "the sending peer"),
    ("lanes", "rings of four slots; counters sent and consumed", "the sending peer"),
    ("staging", "the rank's input, which peers read", "owner"),
    ("results", "the part that the rank has reduced, which peers read", "owner"),
]


def text(
    x: float, y: float, words: str, color: str = GRAY, size: int = 13, at: str = "middle"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{at}">'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, words: str, color: str) -> str:
    filled = f'fill="{color}"' if color != GRAY else f'fill="none" stroke="{GRAY}"'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="4" {filled}/>'
        + text(x + width / 2, y + 18, words, "#fff" if color != GRAY else GRAY)
    )


def arrow(x0: float, y0: float, x1: float, y1: float, color: str) -> str:
    middle = (x0 + x1) / 2
    return (
        f'<path d="M{x0:g} {y0:g}C{middle:g} {y0:g} {middle:g} {y1:g} {x1 - 5:g} {y1:g}" '
        f'fill="none" stroke="{color}" stroke-width="1.6" opacity=".85"/>'
        f'<path d="M{x1:g} {y1:g}l-7 -3.5v7z" fill="{color}"/>'
    )


def save(name: str, width: float, height: float, title: str, parts: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" font-family="sans-serif" role="img"><title>{escape(title)}</title>'
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text("\n".join([head, *parts, "</svg>"]) + "\n")


def size_of(cell: str) -> float:
    return max(WIDTH, 8.2 * len(cell.removeprefix("=")) + 8)


def sources(cell: str, rank: int, before: list[list[str]]) -> list[int]:
    """Ranks whose cells of the column before make this cell."""
    if cell.startswith("="):
        return [rank] if any(c.startswith("Σ") for c in before[rank]) else []
    alike = {
        r: [
            c
            for c in cells
            if c == cell or (cell[0] == "Σ" and c[0] in "abc" and c[1:] == cell[1:])
        ]
        for r, cells in enumerate(before)
    }
    wanted = 3 if cell[0] == "Σ" and not any(cell in cells for cells in before) else 1
    if len(alike[rank]) >= wanted:
        return [rank]
    return [r for r, cells in alike.items() if cells]


def columns(name: str, stages: list[Column]) -> None:
    """One column of cells after the other, one row for each rank."""
    parts, x = [], float(LEFT)
    parts += [text(LEFT - 14, 52 + ROW * r, f"rank {r}", at="end") for r in range(3)]
    before: list[list[str]] = []
    ends: list[float] = []
    for heading, rows in stages:
        cells = [row.split() for row in rows]
        width = max(sum(size_of(c) + 4 for c in row) - 4 for row in cells)
        parts.append(text(x, 18, heading, at="start"))
        arrows: dict[tuple[int, int], str] = {}
        for rank, row in enumerate(cells):
            y, at = 34.0 + ROW * rank, x
            for cell in row:
                color = COLORS.get(cell[0], SUM if "Σ" in cell else GRAY)
                parts.append(box(at, y, size_of(cell), cell.removeprefix("="), color))
                at += size_of(cell) + 4
                for source in sources(cell, rank, before) if before else []:
                    made_of_sum = any(c.startswith("Σ") for c in before[source])
                    arrows[source, rank] = SUM if made_of_sum else COLORS["abc"[source]]
        for (source, rank), color in arrows.items():
            shift = 5 * (source - 1)
            y0, y1 = 47 + ROW * source, 47 + ROW * rank + shift
            parts.append(arrow(ends[source] + 4, y0, x - 4, y1, color))
        before = cells
        ends = [x + sum(size_of(c) + 4 for c in row) - 4 for row in cells]
        x += max(width, 8 * len(heading)) + 100
    save(name, x - 90, 180, f"{name}: " + ", then ".join(heading for heading, _ in stages), parts)


def region() -> None:
    parts = [text(100, 18, "region of a rank"), text(590, 18, "written by", at="start")]
    for i, (name, what, writer) in enumerate(REGION):
        y = 30 + i * (HEIGHT + 6)
        parts.append(box(40, y, 120, name, SUM if "peer" in writer else COLORS["a"]))
        parts += [text(176, y + 18, what, at="start"), text(590, y + 18, writer, at="start")]
    save("region", 730, 40 + len(REGION) * (HEIGHT + 6), "the parts of a region", parts)


def ring(name: str, slots: list[str], sends: str, tells: str) -> None:
    """Slots at the receiver; the sender writes into them, and the receiver reports its progress."""
    width = 96 * len(slots) + 20
    parts = [
        box(10, 60, 90, "sender", COLORS["a"]),
        box(290 + width, 60, 90, "receiver", COLORS["b"]),
    ]
    parts.append(arrow(104, 68, 186, 68, COLORS["a"]) + text(145, 58, sends, COLORS["a"], 12))
    for i, slot in enumerate(slots):
        empty = slot == "free"
        parts.append(box(200 + 96 * i, 60, 90, slot, GRAY if empty else COLORS["a"]))
    parts.append(text(190 + width / 2, 44, "slots in the receiver's region"))
    parts.append(
        arrow(186 + width, 73, 284 + width, 73, GRAY) + text(235 + width, 58, "reads", GRAY, 12)
    )
    y = 112
    parts.append(
        f'<path d="M{335 + width} 92V{y}H55V95" fill="none" stroke="{COLORS["b"]}" '
        'stroke-width="1.6"/>'
        f'<path d="M55 90l-4 8h8z" fill="{COLORS["b"]}"/>'
    )
    parts.append(text(195 + width / 2, y + 18, tells, COLORS["b"], 12))
    save(name, 390 + width, 140, f"{name}: slots between two ranks", parts)


def main() -> None:
    for name, stages in OPERATORS.items():
        columns(name, stages)
    region()
    ring("lane", ["chunk 4", "chunk 5", "chunk 6", "free"], "push, sent = 7", "consumed = 4")
    ring("channel", ["message 6", "message 7"], "push", "done = 6: message 8 may replace message 6")


if __name__ == "__main__":
    main()
