"""Finds phrases that are hard to read, in the pages and the docstrings: tools/check_language.py"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "python/collx/*.py"]
FILES += [
    f"python/collx/{name}.py" for name in ("ops/*", "nn/*", "reference/*", "compile/__init__")
]
CODE = re.compile(r"<!-- setup.*?-->|```.*?```", re.DOTALL)
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
LONGEST = 60  # words of a sentence
RULES = {  # what to write instead
    r"(?<!hidden )\bbehind (?:the|an?|it|that|which|each|every|this)\b": "after",
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
    r"\b(?:one|two|an?) \w+ an? (?:rank|call|row|pair|tile|use|GPU|process)\b": "for each",
}


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Texts without code, each with its line."""
    source = path.read_text()
    found = [(0, CODE.sub(lambda code: "\n" * code[0].count("\n"), source))]
    if path.suffix == ".py":
        found = [(text.start(), text[1]) for text in DOCSTRING.finditer(source)]
    for start, text in found:
        line = 1 + source.count("\n", 0, start)
        for part in re.split(r"(\n(?=\s*(?:\n|[-|]|\d+\. )))", text):
            yield line, " ".join(re.sub(r"`[^`]*`", "x", part).split())
            line += part.count("\n")


def main() -> int:
    wrong = []
    for path in (path for name in FILES for path in ROOT.glob(name)):
        for line, text in paragraphs(path):
            hits = [(hit[0], RULES[rule]) for rule in RULES for hit in re.finditer(rule, text)]
            long = [s for s in re.split(r"[.:;!?|](?:\s|$)", text) if len(s.split()) > LONGEST]
            hits += [(sentence[:40] + "...", "shorter sentences") for sentence in long]
            wrong += [f"{path.relative_to(ROOT)}:{line}: {was!r}: {now}" for was, now in hits]
    print("\n".join(wrong) or "the language of the documentation is plain")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
