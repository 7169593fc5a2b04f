"""The parser of the command-line tools, and types of arguments for argparse."""

import argparse
import math
import os
import re
from pathlib import Path
from typing import NoReturn

NAMES = {"half": "float16", "float": "float32", "double": "float64"}  # as in nccl-tests
PICTURES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class RankParser(argparse.ArgumentParser):
    """Reports an error only on rank 0."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        super().error(message)


def size(text: str) -> int:
    """Parses a size in bytes: "1K", "256M", "1G" or a plain number. Units are powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: sizes such as 1K, 256M or 4096")
    return int(match[1]) * _UNITS[match[2].upper()]


def size_list(text: str) -> list[int]:
    found = [size(part) for part in names(text)]
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: sizes such as 1K,256M,4096")
    return found


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: numbers from 0")
    return int(text)


def factor(text: str) -> float:
    return _above(1, text)


def positive(text: str) -> float:
    return _above(0, text)


def _above(limit: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > limit):
        raise argparse.ArgumentTypeError(f"got {text}; accepted: numbers above {limit}")
    return value


def file(text: str) -> Path:
    """Returns the path of a file. It must be writable, so that no measurement is lost."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text}, which cannot be written")
    return path


def picture(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"got {text}; accepted: files {', '.join(PICTURES)}")
    return file(text)


def row_counts(text: str) -> list[int]:
    found = sorted({count(part) for part in names(text)})
    if not found or found[0] == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: numbers of rows such as 1,16,64")
    return found


def columns(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("got 0; accepted: numbers from 1")
    return value


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def dtypes(text: str) -> list[str]:
    return [NAMES.get(name, name) for name in names(text)]
