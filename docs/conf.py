"""How Sphinx builds these pages, with a reference made of docstrings and of the operators' schemas:
`make docs`. It imports collx, and needs no GPU."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
from docutils import nodes
from docutils.parsers.rst import Directive

import collx

project = "collx"
release = collx.__version__
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "Collectives as PyTorch operators"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
default_role = "py:obj"
autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_custom_sections = ["Returns"]  # as text: a colon in it names no type


class Schemas(Directive):
    """The schemas of all operators, as the dispatcher has them."""

    def run(self) -> list[nodes.Node]:
        names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("collx::"))
        lines: list[str] = []
        for name in names:
            packet, _, overload = name.removeprefix("collx::").partition(".")
            schema = getattr(getattr(torch.ops.collx, packet), overload or "default")._schema
            lines += textwrap.wrap(str(schema), 100, subsequent_indent="    ")
        return [nodes.literal_block("", "\n".join(lines), language="none")]


def keep_blocks(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Code and tables of docstrings, which are indented behind a blank line, stay as they are."""
    kept: list[str] = []
    before = 0  # indentation of the last line that was not blank
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            if indent > before and kept and not kept[-1].strip():
                kept += [" " * before + "::", ""]
            before = indent
        kept.append(line)
    lines[:] = kept


def setup(app: Any) -> None:
    app.add_directive("schemas", Schemas)
    app.connect("autodoc-process-docstring", keep_blocks, priority=100)  # ahead of napoleon
