"""Checks the protocols with model checkers: Spin explores every interleaving of a small instance,
and Relacy runs C++ code on random schedules of a weak memory model.

Every promise is checked twice: by a model that must hold, with a lower bound on the explored states
or schedules, and by mutants, each of which lacks one rule of the protocol and must be caught.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.common.ahead import quietly

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent.parent / "build" / "models"
RELACY = Path("/usr/include/relacy/relacy.hpp")
MEMORY_MIB = 1500
_building = threading.Lock()


@dataclass(frozen=True)
class Case:
    """`explored`: the minimum number of states (Spin) or schedules (Relacy), or 0 for a mutant that
    must be caught."""

    name: str
    source: str
    defines: str
    explored: int = 0


# A kernel ends after every use, has several uses, or has a last use that omits words.
SPIN = [
    Case("oneshot", "sentinel.pml", "W=2 WORDS=2 USES=5", 20_000),
    Case("oneshot-3-ranks", "sentinel.pml", "W=3 USES=5", 50_000),
    Case("oneshot-in-chunks", "sentinel.pml", "W=2 WORDS=2 USES=5 KERNEL=5", 20_000),
    Case("oneshot-partial-chunk", "sentinel.pml", "W=2 WORDS=2 USES=5 KERNEL=2 PARTIAL", 20_000),
    Case("oneshot-partial-calls", "sentinel.pml", "W=2 WORDS=2 USES=5 PARTIAL", 20_000),
    Case("twoshot", "sentinel.pml", "W=2 WORDS=2 USES=4 STAGES=2", 100_000),
    Case("twoshot-3-ranks", "sentinel.pml", "W=3 USES=3 STAGES=2 KERNEL=3", 200_000),
    Case(
        "twoshot-partial-chunk",
        "sentinel.pml",
        "W=2 WORDS=2 USES=5 STAGES=2 KERNEL=2 PARTIAL",
        100_000,
    ),
    Case("no-rearm", "sentinel.pml", "W=2 USES=4 NO_REARM"),
    Case("one-slot", "sentinel.pml", "W=2 USES=4 SLOTS=1"),
    Case("pair-exchanges-nothing", "sentinel.pml", "W=3 USES=4 NO_FILLER"),
    Case("no-fence", "sentinel.pml", "W=2 USES=4 KERNEL=4 NO_FENCE"),
    Case(
        "no-block-barrier", "sentinel.pml", "W=2 WORDS=2 USES=5 KERNEL=2 PARTIAL NO_BLOCK_BARRIER"
    ),
    # Rings for kernels that push ahead: with the sufficient depth, and with one less.
    Case("ring-1-ahead", "sentinel.pml", "W=2 USES=8 KERNEL=9 AHEAD=1 SLOTS=4", 4_000),
    Case("ring-1-ahead-shallow", "sentinel.pml", "W=2 USES=8 KERNEL=9 AHEAD=1 SLOTS=3"),
    Case("ring-2-ahead", "sentinel.pml", "W=2 USES=8 KERNEL=9 AHEAD=2 SLOTS=6", 5_000),
    Case("ring-2-ahead-shallow", "sentinel.pml", "W=2 USES=8 KERNEL=9 AHEAD=2 SLOTS=5"),
    Case(
        "ring-drain",
        "sentinel.pml",
        "W=2 USES=6 KERNEL=9 STAGES=2 AHEAD=1 LAG=1 STAGE_FENCE SLOTS=3",
        8_000,
    ),
    Case(
        "ring-drain-shallow",
        "sentinel.pml",
        "W=2 USES=6 KERNEL=9 STAGES=2 AHEAD=1 LAG=1 STAGE_FENCE SLOTS=2",
    ),
    Case(
        "ring-drain-no-stage-fence",
        "sentinel.pml",
        "W=2 USES=6 KERNEL=9 STAGES=2 AHEAD=1 LAG=1 SLOTS=3",
    ),
    # Sequences of two-way and one-way collectives. KINDS: see mixed.pml; 16 is the one-way kind.
    Case("mixed", "mixed.pml", "W=2 CALLS=3", 100_000),
    Case("mixed-3-ranks", "mixed.pml", "W=3 CALLS=2 GIVEN=1", 1_000_000),
    Case("mixed-stages", "mixed.pml", "W=3 CALLS=4 LENGTH=1 KINDS=15", 300_000),
    Case("mixed-threads", "mixed.pml", "W=2 WORDS=2 CALLS=1 LENGTH=6 KINDS=16", 500_000),
    Case(
        "mixed-threads-calls",
        "mixed.pml",
        "W=2 WORDS=2 CALLS=2 LENGTH=3 KINDS=16 BROADCAST",
        100_000,
    ),
    Case("mixed-put-off", "mixed.pml", "W=2 CALLS=5 LENGTH=3 KINDS=16", 5_000_000),
    Case("mixed-broadcast-x3-shared", "mixed.pml", "W=2 CALLS=3 KINDS=16 BROADCAST SHARED"),
    Case(
        "mixed-allreduce-broadcast-allreduce-shared",
        "mixed.pml",
        "W=2 CALLS=3 KINDS=1 SECOND=16 BROADCAST SHARED",
    ),
    Case("mixed-no-filler", "mixed.pml", "W=3 CALLS=3 KINDS=1 SECOND=4 NO_FILLER"),
    Case("mixed-no-done-word", "mixed.pml", "W=2 CALLS=3 NO_DONE"),
    Case("mixed-one-slot", "mixed.pml", "W=2 CALLS=3 SLOTS=1"),
    Case("mixed-not-told", "mixed.pml", "W=2 CALLS=4 LENGTH=1 KINDS=16 NOT_TOLD"),
    Case("mixed-told-ahead", "mixed.pml", "W=2 CALLS=3 TOLD_AHEAD"),
    Case("mixed-put-off-two", "mixed.pml", "W=2 CALLS=3 KINDS=16 PUT_OFF_TWO"),
    Case("mixed-one-kernel", "mixed.pml", "W=2 CALLS=4 LENGTH=1 KINDS=16 ONE_KERNEL"),
    Case("mixed-done-before-rearm", "mixed.pml", "W=2 CALLS=1 LENGTH=3 KINDS=16 DONE_EARLY"),
    Case("mixed-done-relaxed", "mixed.pml", "W=2 CALLS=1 LENGTH=3 KINDS=16 DONE_RELAXED"),
    Case(
        "mixed-no-block-barrier",
        "mixed.pml",
        "W=2 WORDS=2 CALLS=1 LENGTH=6 KINDS=16 NO_BLOCK_BARRIER",
    ),
    Case("mixed-counted-at-one-end", "mixed.pml", "W=2 CALLS=3 ONE_END"),
    Case("mixed-epoch-per-tile", "mixed.pml", "W=3 CALLS=2 LENGTH=1 KINDS=16 EPOCH_PER_TILE"),
    Case("mixed-receive-first", "mixed.pml", "W=2 CALLS=1 KINDS=16 RECEIVE_FIRST"),
    Case("mixed-send-all-first", "mixed.pml", "W=2 CALLS=1 LENGTH=3 KINDS=16 SEND_ALL_FIRST"),
    # The counts that precede an all-to-all-v.
    Case("counts", "counts.pml", "W=2 BLOCKS=2 CALLS=5", 20_000),
    Case("counts-3-ranks", "counts.pml", "W=3 BLOCKS=1 CALLS=5", 10_000),
    Case("counts-one-mailbox", "counts.pml", "W=2 BLOCKS=2 CALLS=5 ONE_MAILBOX"),
    Case("counts-first-block-advances", "counts.pml", "W=2 BLOCKS=2 CALLS=5 FIRST_ADVANCES"),
    Case("counts-in-two-words", "counts.pml", "W=2 BLOCKS=2 CALLS=5 TWO_WORDS"),
    Case("counts-nothing-sent", "counts.pml", "W=2 BLOCKS=2 CALLS=5 NOTHING_SENT"),
    # Chunks in lanes. KINDS, FIRST, SECOND: see lanes.pml.
    Case("lanes", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3", 700_000),
    Case("lanes-3-ranks", "lanes.pml", "W=3 R=2 CALLS=1 CHUNKS=2 KINDS=1", 100_000),
    Case(
        "lanes-different-grids",
        "lanes.pml",
        "W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=1 BLOCKS1=2",
        50_000,
    ),
    Case("lanes-unequal", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3 KINDS=32", 300_000),
    Case("lanes-not-told", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3 KINDS=32 NOT_TOLD"),
    Case("lanes-carry-all", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3 KINDS=32 CARRY_ALL"),
    Case("lanes-passed", "lanes.pml", "W=3 R=2 CALLS=1 CHUNKS=2 KINDS=64", 500_000),
    *(
        Case(
            f"lanes-passed-{mutant.lower().replace('_', '-')}",
            "lanes.pml",
            f"W=3 R=2 CALLS=1 CHUNKS=3 KINDS=64 {mutant}",
        )
        for mutant in ("CARRY_ALL", "NOT_TOLD", "NO_CREDIT")
    ),
    Case("lanes-no-credit", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3 NO_CREDIT"),
    Case("lanes-relaxed", "lanes.pml", "W=2 R=2 CALLS=1 CHUNKS=2 RELAXED"),
    Case(
        "lanes-oneshot-twoshot", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3 FIRST=2 SECOND=1 NO_CARRY"
    ),
    Case(
        "lanes-broadcast-oneshot", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=3 FIRST=4 SECOND=2 NOT_TOLD"
    ),
    Case(
        "lanes-direct-staged",
        "lanes.pml",
        "W=2 R=2 CALLS=2 CHUNKS=3 FIRST=8 SECOND=1 DIRECT_IN_RING",
    ),
    Case("lanes-geometry", "lanes.pml", "W=2 R=4 CALLS=3 CHUNKS=3 GEOMETRY"),
    Case("lanes-before-entry", "lanes.pml", "W=2 R=2 CALLS=2 CHUNKS=1 SECOND=16 NO_ENTRY"),
    # Calls whose only block alternates between two lanes, before and after calls with a block for
    # each lane.
    Case("lanes-wide", "lanes.pml", "W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=9 WIDE=1", 50_000),
    *(
        Case(
            f"lanes-wide-{order}",
            "lanes.pml",
            f"W=2 LANES=2 R=2 CALLS=2 CHUNKS=2 KINDS=9 WIDE={calls} BLOCKS0=2 BLOCKS1=2",
            700_000,
        )
        for order, calls in (("before", 1), ("after", 2))
    ),
    *(
        Case(
            f"lanes-wide-{mutant.removeprefix('WIDE_').lower().replace('_', '-')}",
            "lanes.pml",
            f"W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS={kind} WIDE=1 {mutant}",
        )
        for kind, mutant in ((1, "NO_CREDIT"), (1, "WIDE_NOT_TOLD"), (8, "WIDE_DIRECT_FIRST"))
    ),
    Case("lanes-other-order", "lanes.pml", "W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=1 OTHER_ORDER"),
    # Epochs of tiles.
    Case("tiles", "tiles.pml", "W=2 CALLS=3 CHUNKS=1", 50_000),
    Case("tiles-in-chunks", "tiles.pml", "W=2 CALLS=2 CHUNKS=2", 200_000),
    Case("tiles-epoch-per-block", "tiles.pml", "W=2 CALLS=3 CHUNKS=1 EPOCH_PER_BLOCK"),
    Case("tiles-epoch-per-call", "tiles.pml", "W=2 CALLS=2 CHUNKS=2 EPOCH_PER_CALL"),
    Case(
        "tiles-epoch-per-communicator", "tiles.pml", "W=2 CALLS=2 CHUNKS=2 EPOCH_PER_COMMUNICATOR"
    ),
    # Barriers: symmetric tensors, then staged ones.
    Case("barrier", "barrier.pml", "W=2 BLOCKS=2 CALLS=3", 500_000),
    Case("barrier-3-ranks", "barrier.pml", "W=3 BLOCKS=1 CALLS=3", 50_000),
    Case("barrier-multicast", "barrier.pml", "W=2 BLOCKS=1 CALLS=3 MULTICAST", 1_000),
    Case("barrier-multicast-3-ranks", "barrier.pml", "W=3 BLOCKS=1 CALLS=2 MULTICAST", 10_000),
    Case("barrier-multicast-not-own", "barrier.pml", "W=2 BLOCKS=1 CALLS=3 MULTICAST NOT_OWN"),
    Case("barrier-staged", "barrier.pml", "W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED", 500_000),
    Case("barrier-passed", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 CHUNKS=3 PASSED", 5_000),
    Case("barrier-passed-3-ranks", "barrier.pml", "W=3 BLOCKS=1 CALLS=1 CHUNKS=2 PASSED", 150_000),
    Case("barrier-passed-no-gather", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 PASSED NO_GATHER"),
    Case("barrier-passed-relaxed", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 PASSED RELAXED"),
    Case("barrier-sent", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 CHUNKS=3 SENT", 1_000),
    Case("barrier-sent-3-ranks", "barrier.pml", "W=3 BLOCKS=1 CALLS=2 CHUNKS=2 SENT", 10_000),
    Case("barrier-sent-one-half", "barrier.pml", "W=2 BLOCKS=1 CALLS=1 CHUNKS=3 SENT ONE_HALF"),
    Case("barrier-sent-no-closing", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 SENT NO_CLOSING"),
    Case("barrier-sent-no-gather", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 SENT NO_GATHER"),
    Case("barrier-sent-relaxed", "barrier.pml", "W=2 BLOCKS=1 CALLS=2 SENT RELAXED"),
    Case("barrier-no-closing", "barrier.pml", "W=2 BLOCKS=2 CALLS=3 NO_CLOSING"),
    Case("barrier-relaxed", "barrier.pml", "W=2 BLOCKS=2 CALLS=3 RELAXED"),
    Case("barrier-equal", "barrier.pml", "W=2 BLOCKS=2 CALLS=3 EQUAL"),
    Case("barrier-unsigned", "barrier.pml", "W=2 BLOCKS=2 CALLS=3 UNSIGNED"),
    Case(
        "barrier-staged-no-closing",
        "barrier.pml",
        "W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED NO_CLOSING",
    ),
    Case("barrier-staged-relaxed", "barrier.pml", "W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED RELAXED"),
    Case("barrier-staged-one-half", "barrier.pml", "W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED ONE_HALF"),
    Case(
        "barrier-staged-other-block",
        "barrier.pml",
        "W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED OTHER_BLOCK",
    ),
]

SCHEDULES = 30_000
RELACY_CASES = [
    Case("sentinel", "sentinel_relacy.cpp", "USES=4", SCHEDULES),
    Case("sentinel-threads", "sentinel_relacy.cpp", "WORDS=2 PARTIAL", SCHEDULES),
    Case("sentinel-no-fence", "sentinel_relacy.cpp", "NO_FENCE"),
    Case("sentinel-threads-no-fence", "sentinel_relacy.cpp", "WORDS=2 PARTIAL NO_FENCE"),
    Case("sentinel-no-block-barrier", "sentinel_relacy.cpp", "WORDS=2 PARTIAL NO_BLOCK_BARRIER"),
    Case("sentinel-no-rearm", "sentinel_relacy.cpp", "NO_REARM"),
    Case("sentinel-one-slot", "sentinel_relacy.cpp", "SLOTS=1"),
    Case("oneway", "oneway_relacy.cpp", "", SCHEDULES),
    Case("oneway-relaxed-store", "oneway_relacy.cpp", "RELAXED_STORE"),
    Case("oneway-relaxed-load", "oneway_relacy.cpp", "RELAXED_LOAD"),
    Case("oneway-no-block-barrier", "oneway_relacy.cpp", "NO_BLOCK_BARRIER"),
    Case("oneway-done-before-rearm", "oneway_relacy.cpp", "DONE_EARLY"),
    Case("lanes", "lanes_relacy.cpp", "", SCHEDULES),
    Case("lanes-relaxed-store", "lanes_relacy.cpp", "RELAXED_STORE"),
    Case("lanes-relaxed-load", "lanes_relacy.cpp", "RELAXED_LOAD"),
    Case("lanes-relaxed-progress", "lanes_relacy.cpp", "RELAXED_PROGRESS"),
    Case("lanes-no-send-barrier", "lanes_relacy.cpp", "NO_SEND_BARRIER"),
    Case("lanes-no-take-barrier", "lanes_relacy.cpp", "NO_TAKE_BARRIER"),
    Case("lanes-one-way", "lanes_relacy.cpp", "ONE_WAY", SCHEDULES),
    Case("lanes-one-way-relaxed-store", "lanes_relacy.cpp", "ONE_WAY RELAXED_STORE"),
    Case("lanes-one-way-relaxed-credit", "lanes_relacy.cpp", "ONE_WAY RELAXED_CREDIT"),
    Case("lanes-one-way-no-take-barrier", "lanes_relacy.cpp", "ONE_WAY NO_TAKE_BARRIER"),
    Case("lanes-one-way-no-credit", "lanes_relacy.cpp", "ONE_WAY NO_CREDIT"),
    Case("barrier", "barrier_relacy.cpp", "", SCHEDULES),
    Case("barrier-relaxed-store", "barrier_relacy.cpp", "RELAXED_STORE"),
    Case("barrier-relaxed-load", "barrier_relacy.cpp", "RELAXED_LOAD"),
    Case("barrier-no-block-barrier", "barrier_relacy.cpp", "NO_BLOCK_BARRIER"),
    Case("barrier-no-closing", "barrier_relacy.cpp", "NO_CLOSING"),
    Case("cpu-oneshot", "channel_relacy.cpp", "ONESHOT", SCHEDULES),
    Case("cpu-twoshot", "channel_relacy.cpp", "W=3", SCHEDULES),
    Case("cpu-oneshot-one-slot", "channel_relacy.cpp", "ONESHOT SLOTS=1"),
    Case("cpu-one-slot", "channel_relacy.cpp", "SLOTS=1"),
    Case("cpu-relaxed-store", "channel_relacy.cpp", "RELAXED_STORE"),
    Case("cpu-relaxed-load", "channel_relacy.cpp", "RELAXED_LOAD"),
    Case("cpu-two-ahead", "channel_relacy.cpp", "SCATTER_EARLY"),
    Case("blame", "blame_relacy.cpp", "", SCHEDULES),
    Case("blame-note-behind", "blame_relacy.cpp", "NOTE_BEHIND"),
    Case("blame-relaxed-store", "blame_relacy.cpp", "RELAXED_STORE"),
    Case("blame-relaxed-load", "blame_relacy.cpp", "RELAXED_LOAD"),
    Case("blame-relaxed-mark", "blame_relacy.cpp", "RELAXED_MARK"),
    Case("blame-look-first", "blame_relacy.cpp", "LOOK_FIRST"),
    Case("blame-notes-first", "blame_relacy.cpp", "NOTES_FIRST"),
    Case("blame-leave-first", "blame_relacy.cpp", "LEAVE_FIRST"),
]


def build(command: list[str], where: Path) -> None:
    done = quietly(command, where)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"


def switches(case: Case) -> list[str]:
    return [f"-D{define}" for define in case.defines.split()]


def effort(case: Case) -> str:
    """Returns the optimization level. Exploring small models and catching mutants takes less time
    than optimizing them."""
    return "-O2" if case.explored >= 200_000 else "-O0"


def key(case: Case, *sources: str) -> str:
    """Returns a hash of everything that a result depends on."""
    text = b"".join((HERE / name).read_bytes() for name in sources)
    return hashlib.sha256(text + f"{case} {SCHEDULES} {MEMORY_MIB}".encode()).hexdigest()[:16]


def verified(case: Case) -> str:
    """Returns the output of the verifier of a Spin model. It is cached in build/models until the
    model changes, because an exhaustive search always has the same result."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    kept = KEPT / f"{case.name}-{key(case, case.source, 'memory.inc')}.txt"
    if not kept.exists():
        report = explored(case)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(report)
    return kept.read_text()


def explored(case: Case) -> str:
    """Runs the verifier of a Spin model and returns its output."""
    with TemporaryDirectory() as folder:
        where = Path(folder)
        for source in HERE.glob("*.pml"):
            shutil.copy(source, where)
        shutil.copy(HERE / "memory.inc", where)
        build(["spin", "-a", *switches(case), case.source], where)
        checker = ["-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", "-DVECTORSZ=2048"]
        build(["gcc", effort(case), "-w", *checker, "-o", "pan", "pan.c"], where)
        return quietly(["./pan", "-m50000", "-w20"], where).stdout


def program(source: str, sizes: tuple[str, ...]) -> Path:
    """Returns the program of a Relacy test, which is compiled for the given sizes. It is cached in
    build/models until its source or its header changes."""
    made = Case(Path(source).stem, source, " ".join(sizes))
    file = KEPT / f"{made.name}-{key(made, source, 'relacy_run.h')}"
    with _building:
        if not file.exists():
            KEPT.mkdir(parents=True, exist_ok=True)
            # Relacy itself causes warnings, and optimizing it takes longer than running it.
            command = ["g++", "-std=c++17", "-O0", "-w", f"-DSCHEDULES={SCHEDULES}"]
            command += [f"-D{size}" for size in sizes]
            unfinished = file.with_suffix(".unfinished")
            build([*command, "-o", str(unfinished), str(HERE / source)], HERE)
            unfinished.rename(file)
    return file


def simulated(case: Case) -> subprocess.CompletedProcess[str]:
    """Runs a test with Relacy. Names with a value are sizes, the others are switches."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    if not RELACY.exists():
        pytest.skip("Relacy is not installed (Debian: relacy-dev)")
    defines = case.defines.split()
    sizes = tuple(define for define in defines if "=" in define)
    switched = [define for define in defines if "=" not in define]
    return quietly([str(program(case.source, sizes)), *switched])


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.ahead(work=verified)
@pytest.mark.parametrize("case", SPIN, ids=lambda case: case.name)
def test_spin(case: Case, ahead: str) -> None:
    report = ahead
    errors = number(r"errors: (\d+)", report)
    if case.explored:
        assert errors == 0, report
        # Neither the depth nor the memory has limited the search.
        assert "error: max search depth too small" not in report, report
        assert "reached -DMEMLIM bound" not in report, report
        assert number(r"(\d+) states, stored", report) >= case.explored, report
    else:
        assert errors > 0, f"the mutant was not caught\n{report}"
        assert re.search(r"pan:1: (assertion violated|invalid end state)", report), report


@pytest.mark.ahead(work=simulated)
@pytest.mark.parametrize("case", RELACY_CASES, ids=lambda case: case.name)
def test_relacy(case: Case, ahead: subprocess.CompletedProcess[str]) -> None:
    done = ahead
    if case.explored:
        assert done.returncode == 0, done.stdout
        assert number(r"schedules (\d+)", done.stdout) >= case.explored, done.stdout
    else:
        assert done.returncode == 1, f"the mutant was not caught\n{done.stdout}"
        assert re.search(r"DATA RACE|USER ASSERT FAILED|DEADLOCK", done.stdout), done.stdout
