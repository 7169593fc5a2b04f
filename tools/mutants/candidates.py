"""A candidate is one possible mistake in a source. A record finds it again after an edit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

ALIKE = 0.6  # a statement whose names have changed is at least this similar to what it was


@dataclass(frozen=True)
class Candidate:
    """Replaces the bytes from `start` to `end` of a file by `new`. In C++ `new` is empty for a
    statement that is left out."""

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
        """What identifies it: no line number, and no test."""
        return self.file, self.text, self.mutation, self.ordinal

    @property
    def native(self) -> bool:
        """Whether it is C++."""
        return not self.file.endswith(".py")


def numbered(candidates: Iterable[Candidate]) -> list[Candidate]:
    """With their ordinals."""
    seen: Counter[tuple[str, str, str]] = Counter()
    result = []
    for candidate in candidates:
        key = (candidate.file, candidate.text, candidate.mutation)
        result.append(replace(candidate, ordinal=seen[key]))
        seen[key] += 1
    return result


def find(entry: dict[str, Any], candidates: list[Candidate]) -> Candidate | None:
    """The candidate of a record's entry: the same text, else the most similar text of the file with
    the same mutation, else the same text in another file."""
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
