"""Finds candidates in Python functions. Mutants of code that runs at import would fail every
test."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.mutants.candidates import Candidate, numbered

COMPARISONS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),  # codespell:ignore notin
}
Change = tuple[str, str]  # the name of the mutation, the new text


def candidates(file: str, source: str) -> list[Candidate]:
    """Returns the candidates of one module."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(node: ast.stmt | ast.expr) -> str:
        return encoded[slice(*place(node))].decode()

    found = []
    for statement in statements(ast.parse(source)):
        whole = " ".join(text(statement).split())[:200]
        for node in own_nodes(statement):
            for mutation, new in changes(node, text):
                found.append(Candidate(file, statement.lineno, whole, mutation, *place(node), new))
    return numbered(found)


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements in the bodies of functions."""
    seen = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for child in function.body:
                for node in ast.walk(child):
                    if isinstance(node, ast.stmt) and node not in seen:
                        seen.add(node)
                        yield node


def own_nodes(statement: ast.stmt) -> Iterator[ast.stmt | ast.expr]:
    """Yields a statement and its expressions, without nested statements."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.stmt, ast.expr)):
            yield node
        if isinstance(node, (ast.JoinedStr, ast.FunctionDef, ast.ClassDef, ast.AnnAssign)):
            continue
        waiting += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]


def changes(node: ast.stmt | ast.expr, text) -> Iterator[Change]:  # type: ignore[no-untyped-def]
    """Yields the possible replacements of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        was, new = COMPARISONS[type(node.ops[0])]
        yield f"{was} -> {new}", f"({text(node.left)} {new} {text(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        was, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield f"{was} -> {new}", "(" + f" {new} ".join(f"({text(v)})" for v in node.values) + ")"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        was, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
        yield f"{was} -> {new}", f"({text(node.left)} {new} {text(node.right)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        flipped = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {flipped}", f"{flipped}"
    elif isinstance(node, ast.IfExp):
        yield (
            "negate the condition",
            (f"({text(node.body)} if not ({text(node.test)}) else {text(node.orelse)})"),
        )
    elif isinstance(node, ast.Return) and node.value is not None and text(node) != "return None":
        yield "return None", "return None"
    elif isinstance(node, (ast.Raise, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "leave out", "pass"


def rewritten(source: str, candidate: Candidate) -> str:
    """Returns the source of the module with one mutant."""
    encoded = source.encode()
    return (encoded[: candidate.start] + candidate.new.encode() + encoded[candidate.end :]).decode()
