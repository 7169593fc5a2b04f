"""How Sphinx builds these pages: `make docs`. The reference is made of docstrings and of the
operators' schemas, so Sphinx imports collx. No GPU is needed."""

from __future__ import annotations

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
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 76  # longer signatures have one parameter on each line
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
    lines = textwrap.wrap(arguments, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"{name}(", *lines, f") -> {result}"])


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
