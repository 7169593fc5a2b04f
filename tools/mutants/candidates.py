"""Candidates: possible mistakes in a source. The entries of a record match them after edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

ALIKE = 0.6  # minimum similarity of a statement to the original one after its names have changed


@dataclass(frozen=True)
class Candidate:
    """Replaces the bytes from `start` to `end` of a file by `new`. In C++, `new` is empty for a
    statement that is removed."""

    file: str
    line: int  # of the statement, for the coverage of Python and for readers
    text: str  # the statement, in one line
    mutation: str
    start: int
    end: int
    new: str
    ordinal: int = 0  # among those of the file with the same text and mutation

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Identifies the candidate, without line number and test."""
        return self.file, self.text, self.mutation, self.ordinal

    @property
    def native(self) -> bool:
        """Whether the file is C++."""
        return not self.file.endswith(".py")


def numbered(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates with their ordinals."""
    seen: Counter[tuple[str, str, str]] = Counter()
    result = []
    for candidate in candidates:
        key = (candidate.file, candidate.text, candidate.mutation)
        result.append(replace(candidate, ordinal=seen[key]))
        seen[key] += 1
    return result


def find(entry: dict[str, Any], candidates: list[Candidate]) -> Candidate | None:
    """Returns the candidate of a record's entry: the one with the same text, otherwise the one with
    the most similar text in the file and the same mutation, otherwise the one with the same text in
    another file."""
    key = tuple(entry[name] for name in ("file", "text", "mutation", "ordinal"))
    same = [c for c in candidates if c.mutation == entry["mutation"]]
    for candidate in same:
        if candidate.key == key:
            return candidate
    scored = [
        (SequenceMatcher(None, c.text, entry["text"]).ratio(), c)
        for c in same
        if c.file == entry["file"]
    ]
    best = max(scored, key=lambda pair: pair[0], default=None)
    if best is not None and best[0] >= ALIKE:
        return best[1]
    return next((c for c in same if c.text == entry["text"]), None)
