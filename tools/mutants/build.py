"""Builds a copy of a tree with C++ mutants: the extension, and the C++ tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.mutants import cpp_source
from tools.mutants.candidates import Candidate

HEADER = Path(__file__).with_name("switch.h")
COPIED = ("csrc", "python", "tests", "tools", "docs", "examples", "benchmarks")
FLAGS = "-std=c++20 -O1 -g0 -w -ffp-contract=off"
NOT_COPIED = re.compile(r"_torch\d|__pycache__|\.so$|\.pyc$")
MENTIONED = re.compile(
    r"^(?:In file included from )?([\w./+-]+):(\d+)(?::\d+)?: (\w+)", re.MULTILINE
)


class Build:
    """A copy of `tree` in `folder`. `chosen` contains the mutants by their numbers. Those that the
    compiler rejects are removed."""

    def __init__(self, tree: Path, folder: Path, chosen: dict[int, Candidate]) -> None:
        self.tree, self.copy, self.chosen = tree, folder / "tree", chosen
        self.programs = folder / "programs"

    def make(self) -> None:
        self._copy()
        environment = {**os.environ, "COLLX_CUDA": "0", "COLLX_WERROR": "0"}
        environment.setdefault("MAX_JOBS", str(os.cpu_count()))
        setup = [sys.executable, "setup.py", "build_ext", "--inplace"]
        while subprocess.run(setup, cwd=self.copy, env=environment, capture_output=True).returncode:
            files = sorted(self.copy.glob("build/*/cpu/*/build.ninja"), key=os.path.getmtime)
            if not files or not self._compile(files[-1].parent):
                raise SystemExit(f"{setup} fails in {self.copy}")
        self._write_programs()
        self._compile(self.programs)

    def _compile(self, folder: Path) -> bool:
        """Compiles until the compiler accepts all mutants. Returns whether it rejected any."""
        refused = False
        while self._drop_refused(folder):
            refused = True
        return refused

    def _copy(self) -> None:
        """Copies the files of the tree, with the mutants. Unchanged files are not built again."""
        found = [path for name in COPIED for path in (self.tree / name).rglob("*")]
        files = {
            str(path.relative_to(self.tree))
            for path in [*found, *self.tree.iterdir()]
            if path.is_file() and not NOT_COPIED.search(str(path))
        }
        for name in COPIED:
            for path in (self.copy / name).rglob("*"):
                old = str(path.relative_to(self.copy))
                if path.is_file() and old not in files and not NOT_COPIED.search(old):
                    path.unlink()
        for file in files:
            self._write(file)

    def _write(self, file: str) -> None:
        content = (self.tree / file).read_bytes()
        here = {n: c for n, c in self.chosen.items() if c.file == file}
        if here:
            content = cpp_source.rewritten(content.decode(), here, str(HEADER)).encode()
        elif file == "setup.py":
            content = content.replace(b'"-O3"', b'"-O1"')
        path = self.copy / file
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod((self.tree / file).stat().st_mode)

    def _write_programs(self) -> None:
        """Writes a file for ninja: builds every tests/cpp/test_*.cpp with the objects of csrc/cpu,
        without Torch."""
        self.programs.mkdir(parents=True, exist_ok=True)
        compiler = "ccache g++" if shutil.which("ccache") else "g++"
        tests = sorted((self.copy / "tests" / "cpp").glob("test_*.cpp"))
        kernels = self.copy.glob("build/*/cpu/libcollx/csrc/cpu/**/*.o")  # from the extension
        objects = " ".join(map(str, sorted(kernels)))
        lines = [
            f"rule cxx\n  depfile = $out.d\n  deps = gcc\n  command = {compiler} {FLAGS}"
            f" -I{self.copy}/csrc -MMD -MF $out.d -c $in -o $out",
            "rule link\n  command = g++ $in -lgtest_main -lgtest -pthread -o $out",
        ]
        lines += [f"build {f.stem}.o: cxx {f}" for f in tests]
        lines += [f"build {f.stem}: link {f.stem}.o {objects}" for f in tests]
        (self.programs / "build.ninja").write_text("\n".join([*lines, ""]))

    def _ninja(self, folder: Path) -> tuple[bool, str]:
        done = subprocess.run(
            ["ninja", "-k", "0"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode == 0, done.stdout

    def _drop_refused(self, folder: Path) -> bool:
        """Removes the mutants on the lines of the errors; if there are none, those on the lines of
        their notes, or in the files of the errors. Returns whether there was an error."""
        fine, output = self._ninja(folder)
        if fine:
            return False
        lines = self._mentioned(output)
        errors = {(file, line) for file, line, word in lines if word == "error"}
        noted = {(file, line) for file, line, _ in lines}
        refused = self._on(errors) or self._on(noted) or set(self._in({f for f, _ in errors}))
        if not refused:
            raise SystemExit(output[-4000:])
        files = {self.chosen.pop(number).file for number in refused}
        print(f"the compiler refuses {len(refused)} mutants in {len(files)} files", flush=True)
        for file in files:
            self._write(file)
        return True

    def _mentioned(self, output: str) -> set[tuple[str, int, str]]:
        """Returns the files, lines and kinds of the messages."""
        found = set()
        for match in MENTIONED.finditer(output):
            path = (self.copy / match[1]).resolve()
            if path.is_relative_to(self.copy.resolve()):
                name = str(path.relative_to(self.copy.resolve()))
                found.add((name, int(match[2]), match[3]))
        return found

    def _on(self, lines: set[tuple[str, int]]) -> set[int]:
        """Returns the mutants on these lines."""
        found = set()
        for number, candidate in self._in({file for file, _ in lines}).items():
            source = (self.tree / candidate.file).read_text()
            first = source.count("\n", 0, candidate.start) + 1
            last = source.count("\n", 0, candidate.end) + 1
            if any((candidate.file, line) in lines for line in range(first, last + 1)):
                found.add(number)
        return found

    def _in(self, files: set[str]) -> dict[int, Candidate]:
        """Returns the mutants in these files."""
        return {n: c for n, c in self.chosen.items() if c.file in files}
