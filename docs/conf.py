"""How Sphinx builds these pages: `make docs`. The reference is made of docstrings and of the
operators' schemas, so Sphinx imports collx. No GPU is needed."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import torch
from docutils import nodes
from docutils.parsers.rst import Directive

import collx

project = "collx"
release = collx.__version__
html_theme = "furo"
html_title = f"collx {release}"
html_static_path = ["page.css"]
html_css_files = ["page.css"]
html_theme_options = {
    "source_repository": "https://github.com/collx/collx",
    "source_branch": "main",
    "source_directory": "docs/",
}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
default_role = "py:obj"
highlight_language = "none"  # of a block that names no language
autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
python_maximum_signature_line_length = 76  # longer signatures have one parameter on each line
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # as text: a colon in it names no type


class Schemas(Directive):
    """`{schemas} NAME ...`: the schemas of operators with all their overloads, as the dispatcher
    has them. One argument stands on each line if the schema is longer than a line."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        schemas = [text for name in self.arguments[0].split() for text in schemas_of(name)]
        return [nodes.literal_block("", "\n\n".join(schemas), language="none")]


def schemas_of(packet: str, width: int = 76) -> list[str]:
    """The schemas of an operator; the default overload comes first."""
    operator = getattr(torch.ops.collx, packet)
    return [wrapped(str(getattr(operator, o)._schema), width) for o in operator.overloads()]


def wrapped(schema: str, width: int) -> str:
    if len(schema) <= width:
        return schema
    name, rest = schema.split("(", 1)
    arguments, result = rest.rsplit(") -> ", 1)
    whole = ",\n".join(argument.replace(" ", "\0") for argument in arguments.split(", "))
    lines = textwrap.wrap(whole, width, initial_indent="    ", subsequent_indent="    ")
    lines = [line.replace("\0", " ") for line in lines]
    return "\n".join([f"{name}(", *lines, f") -> {result}"])


def as_rest(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Keeps the code and tables of docstrings, which are indented after a blank line, and turns the
    paths of pages into links."""
    kept: list[str] = []
    before = 0  # indentation of the last line that was not blank
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            if indent > before and kept and not kept[-1].strip():
                kept += [" " * before + "::", ""]
            before = indent
        kept.append(re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line))
    lines[:] = kept


def setup(app: Any) -> None:
    app.add_directive("schemas", Schemas)
    app.connect("autodoc-process-docstring", as_rest, priority=100)  # ahead of napoleon
