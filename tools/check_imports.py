"""Checks that the imports of the package have no cycles.

    python tools/check_imports.py [FOLDER ...]

Imports within functions, and those for type checkers only, are included: a cycle that the
interpreter does not see is still a cycle for the reader.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("python/collx",)


def main(folders: list[Path]) -> int:
    failed = False
    for folder in folders:
        graph = {name: set(imported(path, folder)) for name, path in modules(folder).items()}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            failed = True
            print(f"{folder.name}: imports in a circle: {' <- '.join(error.args[1])}")
    if not failed:
        print("imports go one way")
    return int(failed)


def modules(folder: Path) -> dict[str, Path]:
    """Returns the files of a package by the names of their modules."""
    files = [*folder.rglob("*.py"), *folder.rglob("*.pyi")]
    return {name_of(path, folder): path for path in files}


def name_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, folder: Path) -> Iterator[str]:
    """Yields the package's own modules that a file imports."""
    known = modules(folder)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports here are absolute"
            for alias in node.names:
                # Either a module of that package, or a name that the package's file defines.
                module = f"{node.module}.{alias.name}"
                if module in known:
                    yield module
                elif node.module in known:
                    yield str(node.module)


if __name__ == "__main__":
    given = [Path(folder).resolve() for folder in sys.argv[1:]]
    sys.exit(main(given or [ROOT / package for package in PACKAGES]))
