"""Reads text files with one sentence per line."""

from pathlib import Path

SENTENCES = Path(__file__).parents[1] / "sentences.txt"


def read_sentences(file: Path, least: int) -> list[str]:
    """Returns all lines that are not empty and do not begin with #. Raises SystemExit if there are
    fewer than `least`."""
    if not file.is_file():
        raise SystemExit(f"no such file: {file}")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    sentences = [line for line in lines if line and not line.startswith("#")]
    if len(sentences) < least:
        raise SystemExit(f"{file} holds fewer than {least} sentences")
    return sentences
