"""Tests that _C.pyi and the compiled module have the same names, parameters and defaults."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import collx
from collx._extension import extension

STUB = ast.parse((Path(collx.__file__).parent / "_C.pyi").read_text())


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def stub_parameters(node: ast.FunctionDef) -> list[str]:
    """Returns the names in order: keyword-only names follow "*", and names with a default end in
    "="."""
    given = node.args
    first = len(given.args) - len(given.defaults)
    words = [a.arg + ("=" if i >= first else "") for i, a in enumerate(given.args)]
    words += ["*"] if given.kwonlyargs else []
    both = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return words + [a.arg + ("=" if default else "") for a, default in both]


def module_parameters(function: Any) -> list[str]:
    """Returns the same for a signature of pybind11: name(self: type, *, name: type = default) ->
    type."""
    signature = re.match(r"\w+\((?P<all>.*)\) ->", function.__doc__.splitlines()[0])
    assert signature is not None, function.__doc__
    words = []
    depth, start, text = 0, 0, signature["all"] + ","
    for at, letter in enumerate(text):
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            words.append(text[start:at].strip())
            start = at + 1
    return [w.split(":")[0] + ("=" if " = " in w else "") for w in words if w]


def pairs() -> Iterator[tuple[str, ast.FunctionDef, Any]]:
    """Yields every function and method of the stub, and the module's object with the same name."""
    for name, node in declared(STUB.body).items():
        if isinstance(node, ast.FunctionDef):
            yield name, node, getattr(extension, name)
        elif isinstance(node, ast.ClassDef):
            for method, inner in declared(node.body).items():
                if isinstance(inner, ast.FunctionDef):
                    yield f"{name}.{method}", inner, getattr(getattr(extension, name), method)


def test_the_stub_has_the_names_of_the_module() -> None:
    assert public(declared(STUB.body)) == public(vars(extension))


def test_the_stub_has_the_names_of_each_class() -> None:
    for name, node in declared(STUB.body).items():
        if isinstance(node, ast.ClassDef):
            members = vars(getattr(extension, name))
            assert public(declared(node.body)) == public(members), name
            values = {n for n, v in declared(node.body).items() if isinstance(v, ast.AnnAssign)}
            assert values == {n for n in public(members) if inspect.isdatadescriptor(members[n])}


def test_the_stub_has_the_parameters_of_every_function() -> None:
    seen = {name: (stub_parameters(node), module_parameters(f)) for name, node, f in pairs()}
    assert len(seen) > 10
    assert {n: stub for n, (stub, _) in seen.items()} == {n: real for n, (_, real) in seen.items()}
