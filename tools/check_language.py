"""Finds phrases that are hard to read in pages, docstrings and comments: tools/check_language.py"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md"]
CODE = [
    *(f"csrc/**/*.{suffix}" for suffix in ("h", "cpp", "cu", "cuh")),
    *(f"tests/**/*.{suffix}" for suffix in ("h", "cpp", "py")),
    *(f"{folder}/**/*.py" for folder in ("python", "tools", "benchmarks", "examples")),
    *("setup.py", "Makefile", ".ci/run"),
]
LEFT_OUT = re.compile(r"<!-- setup.*?-->|```.*?```", re.DOTALL)  # of a page
HASHES = re.compile(r"(?:^[ \t]*#(?!!).*\n?)+", re.MULTILINE)
SLASHES = re.compile(r"(?:^[ \t]*//.*\n?)+|//.*$", re.MULTILINE)
MARKER = re.compile(r"^[ \t]*(?:#|//[/!]?)", re.MULTILINE)
LONGEST = 60  # maximum number of words in a sentence
RULES = {  # patterns, and what to write instead
    r"(?<!hidden )(?<!vector )\bbehind (?:the|an?|it|that|which|each|every|this)\b": "after",
    r"\bby turns\b": "alternately",
    r"\bin place of\b": "instead of",
    r"\bin front of\b": "before",
    r"\b(?:what|which|that) (?:is|are|was|were) asked for\b": "the requested ...",
    r"\b(?:is|are|was) no (?:part|number|function|place|value|member|tensor)\b": "is not a",
    r"\b(?:kernel|file|build|module|library|graph|compiler|table|page|switch)s? "
    r"(?:know|bear|want|like|say|tell|ask)s?\b": "contains, has, returns",
    r"\bbut for\b": "except",
    r"\b(?:go|goes|went) on\b": "continue",
    r"\bcomes? of\b": "results from",
    r"\b[Tt]ime-outs?\b": "timeout",
    r"\bfor want of\b": "because there is no ...",
    r"\bto be had\b": "available",
    r"\b[Nn]obody\b": "no rank, no process",
    r"\b(?:one|two|an?) \w+ an? (?:rank|call|row|pair|tile|use|GPU|process)\b": "for each",
}


def texts(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Yields the text of a page, or the comments and docstrings of code, each with its line."""
    if path.suffix == ".md":
        yield 1, LEFT_OUT.sub(lambda left_out: "\n" * left_out[0].count("\n"), source)
        return
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Expr(ast.Constant(str(text))):  # a docstring, of an attribute too
                    yield node.lineno, text
    comments = HASHES if path.suffix in (".py", "") else SLASHES
    for found in comments.finditer(source):
        yield 1 + source.count("\n", 0, found.start()), MARKER.sub("", found[0])


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs and list items of a file, each with its line."""
    for line, text in texts(path, path.read_text()):
        for part in re.split(r"(\n(?=\s*(?:\n|[-|]|\d+\. )))", text):
            yield line, " ".join(re.sub(r"`[^`]*`", "x", part).split())
            line += part.count("\n")


def main() -> int:
    wrong = []
    for path in (path for name in (*PAGES, *CODE) for path in ROOT.glob(name)):
        for line, text in paragraphs(path):
            hits = [(hit[0], RULES[rule]) for rule in RULES for hit in re.finditer(rule, text)]
            long = [s for s in re.split(r"[.:;!?|](?:\s|$)", text) if len(s.split()) > LONGEST]
            hits += [(sentence[:40] + "...", "shorter sentences") for sentence in long]
            wrong += [f"{path.relative_to(ROOT)}:{line}: {was!r}: {now}" for was, now in hits]
    print("\n".join(wrong) or "the language of pages and comments is plain")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
