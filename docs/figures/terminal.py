"""Draws the output of a command as a picture.

    python -m collx doctor | python docs/figures/terminal.py "python -m collx doctor" doctor.svg

Reads the output from standard input. The first line of the picture is the command.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

CHARACTER, LINE, MARGIN = 7.8, 18, 16  # of a font of 13 pixels
PAPER, INK, COMMAND = "#1e2229", "#d6d9de", "#8bd5a0"
COLORS = {r"^\s*error\b": "#ff7b72", r"^\s*warning\b": "#e3b341", r"^\S": "#79c0ff"}


def picture(command: str, output: str) -> str:
    """SVG of a terminal: the command, then the lines of its output."""
    lines = [f"$ {command}", *output.rstrip("\n").split("\n")]
    width = max(len(line) for line in lines) * CHARACTER + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" font-family="monospace" font-size="13" role="img">'
        f"<title>{escape(command)}</title>",
        f'<rect width="{width:g}" height="{height}" rx="8" fill="{PAPER}"/>',
    ]
    for number, line in enumerate(lines):
        y = MARGIN + LINE * number + 13
        color = COMMAND if number == 0 else color_of(line)
        length = f'textLength="{len(line) * CHARACTER:g}" ' if line else ""
        parts.append(
            f'<text x="{MARGIN}" y="{y}" fill="{color}" {length}xml:space="preserve">'
            f"{escape(line)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def color_of(line: str) -> str:
    return next((color for start, color in COLORS.items() if re.search(start, line)), INK)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(sys.argv[1], sys.stdin.read()))
