"""Finds candidates in C++, and rewrites sources so that each candidate can be selected at run time.

The parser only handles brackets and the ends of statements. It relies on clang-format, which puts
spaces around binary operators, but not inside the brackets of templates. An expression E with two
candidates becomes

    (collx_mutant(7) ? (E, mutated) : collx_mutant(8) ? (E, mutated) : (E))

and a statement that can be removed becomes {if (!collx_mutant(9)) statement;}. The compiler rejects
some of them; build.py omits those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.mutants.candidates import Candidate, numbered

FOLDERS = ("cpu", "protocol", "memory", "ops", "distributed", "bindings")
MOST = 4  # maximum number of candidates per expression, because each copies the expression
SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
}
HIDDEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"\((.*?)\)\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'(?!\d)"
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
OPERATOR = re.compile(r'(?<=[^"\s] )(<=?|>=?|==|!=|&&|\|\||\+|-)(?= [^"\s])')
CONSTANT = re.compile(r"(?<![\w.<'])(?:\d+(?![\w.'>])|(?:true|false)\b)")
DECLARES = re.compile(
    r"\s*(template\b.*>\s*)?(inline )?(namespace|struct|class|union|enum|extern)\b"
)
HEAD = re.compile(r"\s*(else|do|try|case [^;]*?:(?!:)|default:|(?:if|while|for|switch) (?=\())")
TEMPLATE = re.compile(r"<[^<>()]*>")
NAME_ENDS = re.compile(r"[(=\[{?]| [-+*/%&|^]=")
CONTROL = re.compile(r"\s*(if|else|for|while|do|switch|try|catch|case|default)\b")
OPENS_CODE = re.compile(
    r"(\)|\]|\b(const|noexcept|override|else|do|try|mutable)|-> [\w:<>&*, ]+|:)\s*$"
)
NO_EXPRESSION = re.compile(
    r"(static_assert|using|typedef|goto|friend|break|continue|throw|co_\w+|delete|asm|public|private)"
    r"\b|[{#]"
)
ASSIGNS = re.compile(r" [-+*/%&|^]?= ")


def candidates(file: str, source: str) -> list[Candidate]:
    """Returns the candidates of one source."""
    text = HIDDEN.sub(hide, source)
    found = [
        c for start, end in statements(text) for c in of_statement(file, source, text, start, end)
    ]
    return numbered(found)


def hide(match: re.Match[str]) -> str:
    """Replaces a match with text of the same length without code. A string keeps its quotes."""
    was = match[0]
    if was.startswith("'"):
        return was[0] + "c" * (len(was) - 2) + was[-1]
    if was.endswith('"') and not was.lstrip().startswith(("#", "//", "/*")):
        return '"' + "s" * (len(was) - 2) + '"'
    return re.sub(r"[^\n]", " ", was)


def statements(text: str) -> Iterator[tuple[int, int]]:
    """Yields the ranges of the statements of functions, which end at `;`, and of the heads of
    blocks, which end at `{`."""
    code, start, depth = False, 0, 0
    outer: list[tuple[bool, int, int]] = []  # state to restore after each open brace
    for place, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "{":
            head = text[start:place]
            block = depth == 0 and (not code or not head.strip() or CONTROL.match(head) is not None)
            if block and code:
                yield start, place
            # A lambda or a braced value is inside of a statement, which continues after it.
            outer.append((code, -1 if block else start, depth))
            if DECLARES.match(head) and not head.rstrip().endswith(")"):
                code = False
            else:
                code = (code and block) or OPENS_CODE.search(head) is not None
            start, depth = place + 1, 0
        elif character == "}" and outer:
            code, resumed, depth = outer.pop()
            start = place + 1 if resumed < 0 else resumed
        elif character == ";" and depth == 0:
            if code:
                yield start, place
            start = place + 1


def of_statement(file: str, source: str, text: str, start: int, end: int) -> Iterator[Candidate]:
    """Yields the candidates of the statement, or head of a block, text[start:end]."""
    line = source.count("\n", 0, start + len(text[start:end]) - len(text[start:end].lstrip())) + 1
    whole = " ".join(re.sub(r"//[^\n]*", "", source[start:end]).split())[:200]

    def candidate(mutation: str, at: int, to: int, new: str) -> Candidate:
        return Candidate(file, line, whole, mutation, at, to, new)

    rest = start
    while True:  # conditions before the statement
        head = HEAD.match(text, rest, end)
        if head is None:
            break
        rest = head.end()
        if head[1] in ("if ", "while ", "for ", "switch "):
            close = closing(text, rest)
            if head[1] != "switch " and (span := condition(text, rest + 1, close, head[1])):
                yield candidate("negate the condition", *span, f"!({source[slice(*span)]})")
                yield from mutated(candidate, source, text, *span)
            rest = close + 1
    rest += len(text[rest:end]) - len(text[rest:end].lstrip())
    body = text[rest:end]
    if not body or NO_EXPRESSION.match(body):
        return
    if body.startswith("return"):
        yield from mutated(candidate, source, text, rest + 7, end)
        return
    name = NAME_ENDS.split(TEMPLATE.sub("", body), maxsplit=1)[0].strip()
    if (
        name != "auto"
        and text[end : end + 1] == ";"
        and re.fullmatch(r"[*+\-]*[\w:.]+(->\w+)*[+\-]*", name)
    ):
        yield candidate("leave out", rest, end + 1, "")
    if re.fullmatch(r"[A-Z_0-9]+", name):  # a macro that checks its first argument
        comma = first_comma(text, rest + len(name) + 1, end)
        yield candidate("negate the condition", *comma, f"!({source[slice(*comma)]})")
        yield from mutated(candidate, source, text, *comma)
    elif assignment := ASSIGNS.search(body):
        yield from mutated(candidate, source, text, rest + assignment.end(), end)
    elif " " not in name:
        yield from mutated(candidate, source, text, rest, end)


def closing(text: str, place: int) -> int:
    """Returns the position of the bracket that closes the one at `place`."""
    depth = 0
    for at in range(place, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return len(text)


def condition(text: str, start: int, end: int, kind: str) -> tuple[int, int] | None:
    """Returns the range of the condition within the brackets of `if`, `while` or `for`."""
    inside = text[start:end]
    if "{" in inside or (ASSIGNS.search(inside) and ";" not in inside):
        return None
    if kind != "for ":
        return (start, end) if ";" not in inside else None
    parts = inside.split(";")
    if len(parts) != 3 or not parts[1].strip():
        return None
    return start + len(parts[0]) + 2, start + len(parts[0]) + 1 + len(parts[1])


def first_comma(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the range of the first argument of a call whose arguments begin at `start`."""
    depth = 0
    for at in range(start, end):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text[at], 0)
        if depth < 0 or (depth == 0 and text[at] == ","):
            return start, at
    return start, end


def mutated(make, source: str, text: str, start: int, end: int) -> Iterator[Candidate]:  # type: ignore[no-untyped-def]
    """Yields the candidates within one expression."""
    if "{" in text[start:end] or has_comma(text[start:end]) or "//" in source[start:end]:
        return
    found = [(m, SWAPS[m[0]]) for m in OPERATOR.finditer(text, start, end)]
    other = {"true": "false", "false": "true"}
    found += [
        (m, other.get(m[0]) or str(int(m[0]) + 1)) for m in CONSTANT.finditer(text, start, end)
    ]
    for number, (match, new) in enumerate(found[:MOST]):
        changed = source[start : match.start()] + new + source[match.end() : end]
        yield make(f"{number}: {match[0]} -> {new}", start, end, " ".join(changed.split()))


def has_comma(expression: str) -> bool:
    """Whether an expression has a comma outside of brackets: several declarations, or arguments of
    a template."""
    return first_comma(expression, 0, len(expression))[1] < len(expression)


def rewritten(source: str, chosen: dict[int, Candidate], header: str) -> str:
    """Returns the source in which these candidates can be selected by their numbers at run time."""
    edits: dict[tuple[int, int], str] = {}
    spans: dict[tuple[int, int], list[int]] = {}
    for number, candidate in chosen.items():
        if candidate.new:
            spans.setdefault((candidate.start, candidate.end), []).append(number)
        else:
            edits[candidate.start, candidate.start] = f"{{if (!collx_mutant({number})) "
            edits[candidate.end, candidate.end] = "}"
    for (start, end), numbers in spans.items():
        choices = "".join(f"collx_mutant({n}) ? ({chosen[n].new}) : " for n in numbers)
        edits[start, end] = f"({choices}({source[start:end]}))"
    for (start, end), new in sorted(edits.items(), reverse=True):
        source = source[:start] + new + source[end:]
    return f'#include "{header}"\n#line 1\n{source}'
