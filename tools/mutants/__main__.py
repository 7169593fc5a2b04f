"""Runs mutation tests: measures which small mistakes in the sources the tests detect.

    python -m tools.mutants --draw       # draws new mutants, and records which the tests detect
    python -m tools.mutants              # runs the drawn mutants; status 1 if one is not detected
                                         # any more
    python -m tools.mutants --record     # also writes the record
    python -m tools.mutants --tree ../other --record-file mutants.json

docs/internals/development.md describes the method and the interpretation of the result. All files
are in build/mutants: a copy of the tree, the build with the C++ mutants, and the map of the code
that each test executes. `--keep` reuses the previous build and map.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from zlib import crc32

from tools.mutants import cpp_source, python_source
from tools.mutants.build import Build
from tools.mutants.candidates import Candidate, find
from tools.mutants.runs import TESTS, Runner, Test

ROOT = Path(__file__).resolve().parents[2]
SEED = 20_240_607
OF_A_FILE = 8  # number of C++ candidates per file that are built for a draw
DRAWN = {True: 42, False: 24}  # numbers of C++ and Python mutants
PER_FILE = 2
MOST_TESTS, MOST_SECONDS = 40, 40.0  # limits of the first tests of a mutant
USUAL = {"ordinal": 0, "caught": True, "at_import": False}  # fields that the record leaves out


def candidates_of(tree: Path) -> list[Candidate]:
    """Returns all candidates of a tree."""
    found = []
    for folder in cpp_source.FOLDERS:
        for path in sorted((tree / "csrc" / folder).rglob("*")):
            if path.suffix in (".h", ".cpp"):
                found += cpp_source.candidates(str(path.relative_to(tree)), path.read_text())
    for path in sorted((tree / "python/collx").rglob("*.py")):
        found += python_source.candidates(str(path.relative_to(tree)), path.read_text())
    return found


def shuffled(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates in random order. The order of two candidates only depends on the seed
    and on these candidates."""
    return sorted(candidates, key=lambda c: (crc32(f"{SEED} {c.key}".encode()), c.key))


def at_most(count: int, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the first `count` candidates of every file."""
    seen: Counter[str] = Counter()
    result = []
    for candidate in candidates:
        seen[candidate.file] += 1
        if seen[candidate.file] <= count:
            result.append(candidate)
    return result


class Session:
    """A build with some mutants, and the map of the code that the tests execute."""

    def __init__(self, options: argparse.Namespace, wanted: list[Candidate]) -> None:
        self.tree = Path(options.tree).resolve()
        self.folder = ROOT / "build" / "mutants"
        self.runner = Runner(self.folder, options.worlds, options.tests)
        native = [c for c in wanted if c.native]
        self.build = Build(self.tree, self.folder, dict(enumerate(native)))
        state = self.folder / "state.pickle"
        if options.keep and state.exists():
            self.build.chosen, self.tests = pickle.loads(state.read_bytes())
        else:
            self.build.make()
            print(f"{len(self.build.chosen)} mutants of C++ are built", flush=True)
            self.tests = self.runner.map(options.minutes, 2 * options.jobs)
            state.write_bytes(pickle.dumps((self.build.chosen, self.tests)))
        self.numbers = {candidate: number for number, candidate in self.build.chosen.items()}
        self.bases = self.runner.bases()
        self.rest = 60 * options.rest
        self.runners = [self.runner, *map(self.runner.another, range(1, options.jobs))]
        print(f"{len(self.tests)} tests pass and are in the map", flush=True)

    def reaching(self, candidate: Candidate) -> list[Test]:
        """Returns the tests that execute a candidate."""
        if candidate.native:
            place = self.numbers.get(candidate, -1)
        else:
            place = self.bases[str(self.runner.copy / candidate.file)] + candidate.line - 4
        return [test for test in self.tests if place in test.reached]

    def run(
        self, runner: Runner, candidate: Candidate, all_tests: bool, left_out: set[str]
    ) -> tuple[str, bool]:
        """Returns the test that detects a mutant, and whether the mutant fails at import. With
        `all_tests`, runs the other tests after the first ones."""
        tests = in_turn([t for t in self.reaching(candidate) if t.name not in left_out])
        first = within(tests, MOST_TESTS, MOST_SECONDS)
        rest = within(tests[len(first) :], len(tests), self.rest) if all_tests else []
        for part in filter(None, (first, rest)):
            limit = 300 + 5 * sum(test.seconds for test in part)
            found = self._run(runner, candidate, part, limit)
            if found[0]:
                return found
        return "", False

    def _run(
        self, runner: Runner, candidate: Candidate, tests: list[Test], limit: float
    ) -> tuple[str, bool]:
        if candidate.native:
            return runner.first_failure(tests, self.numbers[candidate], limit)
        source = self.tree / candidate.file
        target = runner.copy / candidate.file
        try:
            target.write_text(python_source.rewritten(source.read_text(), candidate))
            return runner.first_failure(tests, -1, limit)
        finally:
            target.write_text(source.read_text())

    def flaky(self, caught: dict[Candidate, str]) -> set[str]:
        """Returns the tests that also fail without a mutant."""
        names = set(caught.values())
        result: set[str] = set()
        while waiting := [t for t in self.tests if t.name in names - result]:
            found, _ = self.runner.first_failure(waiting, -1, 300 + 4 * len(waiting))
            if not found:
                break
            result.add(found)
        return result


def in_turn(tests: list[Test]) -> list[Test]:
    """Returns the tests in the order in which they run: the cheapest test of every file, then the
    next test of every file. A line that most tests execute is then not only tested by the cheapest
    file."""
    place: Counter[str] = Counter()
    order = []
    for test in sorted(tests, key=lambda t: (t.seconds, t.name)):
        file = test.name.partition(":")[0]
        order.append((place[file], not test.native, test.seconds, test.name, test))
        place[file] += 1
    return [entry[-1] for entry in sorted(order)]


def within(tests: list[Test], count: int, seconds: float) -> list[Test]:
    """Returns the first tests, up to this number and this total of seconds, but at least one."""
    total = 0.0
    for place, test in enumerate(tests[:count]):
        total += test.seconds
        if place and total > seconds:
            return tests[:place]
    return tests[:count]


def draw(session: Session, candidates: list[Candidate]) -> list[Candidate]:
    """Draws mutants from the candidates that tests execute."""
    order = [c for c in shuffled(candidates) if session.reaching(c)]
    print(f"{len(order)} candidates are executed by tests", flush=True)
    return [
        candidate
        for native, count in DRAWN.items()
        for candidate in at_most(PER_FILE, (c for c in order if c.native == native))[:count]
    ]


def run_all(
    session: Session, drawn: list[Candidate], known: set[Candidate]
) -> dict[Candidate, tuple[str, bool]]:
    """Returns the test that detects each mutant. Tests that also fail without a mutant are
    excluded."""
    results: dict[Candidate, tuple[str, bool]] = {}
    left_out: set[str] = set()
    waiting = drawn
    free: SimpleQueue[Runner] = SimpleQueue()
    for runner in session.runners:
        free.put(runner)

    def run(candidate: Candidate) -> tuple[str, bool]:
        runner = free.get()
        try:
            return session.run(runner, candidate, candidate in known, left_out)
        finally:
            free.put(runner)

    while waiting:
        with ThreadPoolExecutor(len(session.runners)) as pool:
            for candidate, result in zip(waiting, pool.map(run, waiting), strict=True):
                results[candidate] = result
                say(candidate, *result)
        caught = {c: results[c][0] for c in waiting if results[c][0] and not results[c][1]}
        flaky = session.flaky(caught)
        left_out |= flaky
        waiting = [c for c, name in caught.items() if name in flaky]
    return results


def say(candidate: Candidate, test: str, at_import: bool) -> None:
    what = "import" if at_import else "caught" if test else "SURVIVED"
    print(f"{what:9}{candidate.file}:{candidate.line}: {candidate.mutation}: {candidate.text}")
    print(f"         {test}", flush=True)


def entries(results: dict[Candidate, tuple[str, bool]]) -> list[dict[str, Any]]:
    """Returns the entries of the record. A line and a test would not identify a mutant after the
    next edit; the output of a run names them."""
    made = []
    for c, (test, at_import) in results.items():
        fields = {"ordinal": c.ordinal, "caught": bool(test), "at_import": at_import}
        unusual = {name: value for name, value in fields.items() if value != USUAL[name]}
        made.append({"file": c.file, "text": c.text, "mutation": c.mutation, **unusual})
    return made


def read(file: Path) -> list[dict[str, Any]]:
    return [{**USUAL, **entry} for entry in json.loads(file.read_text())["mutants"]]


def write(file: Path, results: dict[Candidate, tuple[str, bool]]) -> None:
    file.write_text(json.dumps({"seed": SEED, "mutants": entries(results)}, indent=1) + "\n")


def summarize(results: dict[Candidate, tuple[str, bool]], began: float) -> None:
    caught = sum(bool(test) for test, _ in results.values())
    at_import = sum(at_import for _, at_import in results.values())
    print(
        f"{len(results)} mutants: {caught} caught, of which {at_import} fail at import; "
        f"{len(results) - caught} survived; {(time.monotonic() - began) / 60:.0f} minutes"
    )


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw the mutants anew")
    parser.add_argument("--record", action="store_true", help="write what is caught")
    parser.add_argument("--keep", action="store_true", help="keep build and map of the last time")
    parser.add_argument(
        "--survivors", action="store_true", help="those alone, with all tests that reach them"
    )
    parser.add_argument("--tree", default=str(ROOT), help="whose sources and tests")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="folders of Python tests")
    parser.add_argument("--worlds", default="cpu2", help="as named in the parameters of tests")
    half = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--jobs", type=int, default=half, help="mutants that are tested at once")
    parser.add_argument("--minutes", type=float, default=20, help="limit of the tests for the map")
    parser.add_argument("--rest", type=float, default=10, help="minutes of tests after the first")
    parser.add_argument("--record-file", type=Path, default=Path(__file__).with_name("record.json"))
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    began = time.monotonic()
    candidates = candidates_of(Path(options.tree).resolve())
    print(f"{len(candidates)} candidates", flush=True)
    if options.draw:
        wanted = at_most(OF_A_FILE, shuffled(c for c in candidates if c.native))
        session = Session(options, wanted)
        write(options.record_file, dict.fromkeys(draw(session, candidates), ("", False)))
    recorded = read(options.record_file)
    found = [(entry, find(entry, candidates)) for entry in recorded]
    lost = [entry for entry, candidate in found if candidate is None]
    before = {c: ("recorded" * e["caught"], e["at_import"]) for e, c in found if c is not None}
    known = {c for c, (test, _) in before.items() if test}
    if not options.draw:
        session = Session(options, list(before))
    if options.survivors:
        results = before | run_all(session, [c for c in before if c not in known], set(before))
    else:
        results = run_all(session, list(before), known)
    for entry in lost:
        print(f"gone: {entry['file']}: {entry['mutation']}: {entry['text']}")
    weaker = [c for c in known if not results[c][0]]
    for candidate in weaker:
        print(f"no longer caught: {candidate.file}:{candidate.line}: {candidate.mutation}")
    if options.draw or options.record:
        write(options.record_file, results)
    summarize(results, began)
    return int(bool(weaker) or any(entry["caught"] for entry in lost))


if __name__ == "__main__":
    sys.exit(main())
