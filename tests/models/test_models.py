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


def cases(table: str) -> list[Case]:
    """Returns the cases of a table. Each line is the source of the cases that follow, or a case:
    its name, the minimum that it explores ("-" for a mutant), and its defines."""
    found, source = [], ""
    for line in table.strip().splitlines():
        name, *rest = line.split()
        if not rest:
            source = name
        elif name != "#":
            explored = 0 if rest[0] == "-" else int(rest[0])
            found.append(Case(name, source, " ".join(rest[1:]), explored))
    return found


SPIN = cases("""
sentinel.pml
# A kernel ends after every use, has several uses, or has a last use that omits words.
oneshot 20_000 W=2 WORDS=2 USES=5
oneshot-3-ranks 50_000 W=3 USES=5
oneshot-in-chunks 20_000 W=2 WORDS=2 USES=5 KERNEL=5
oneshot-partial-chunk 20_000 W=2 WORDS=2 USES=5 KERNEL=2 PARTIAL
oneshot-partial-calls 20_000 W=2 WORDS=2 USES=5 PARTIAL
twoshot 100_000 W=2 WORDS=2 USES=4 STAGES=2
twoshot-3-ranks 200_000 W=3 USES=3 STAGES=2 KERNEL=3
twoshot-partial-chunk 100_000 W=2 WORDS=2 USES=5 STAGES=2 KERNEL=2 PARTIAL
no-rearm - W=2 USES=4 NO_REARM
one-slot - W=2 USES=4 SLOTS=1
pair-exchanges-nothing - W=3 USES=4 NO_FILLER
no-fence - W=2 USES=4 KERNEL=4 NO_FENCE
no-block-barrier - W=2 WORDS=2 USES=5 KERNEL=2 PARTIAL NO_BLOCK_BARRIER
# Rings for kernels that push ahead: with the sufficient depth, and with one less.
ring-1-ahead 4_000 W=2 USES=8 KERNEL=9 AHEAD=1 SLOTS=4
ring-1-ahead-shallow - W=2 USES=8 KERNEL=9 AHEAD=1 SLOTS=3
ring-2-ahead 5_000 W=2 USES=8 KERNEL=9 AHEAD=2 SLOTS=6
ring-2-ahead-shallow - W=2 USES=8 KERNEL=9 AHEAD=2 SLOTS=5
ring-drain 8_000 W=2 USES=6 KERNEL=9 STAGES=2 AHEAD=1 LAG=1 STAGE_FENCE SLOTS=3
ring-drain-shallow - W=2 USES=6 KERNEL=9 STAGES=2 AHEAD=1 LAG=1 STAGE_FENCE SLOTS=2
ring-drain-no-stage-fence - W=2 USES=6 KERNEL=9 STAGES=2 AHEAD=1 LAG=1 SLOTS=3
mixed.pml
# Sequences of two-way and one-way collectives. KINDS: see mixed.pml; 16 is the one-way kind.
mixed 100_000 W=2 CALLS=3
mixed-3-ranks 1_000_000 W=3 CALLS=2 GIVEN=1
mixed-stages 300_000 W=3 CALLS=4 LENGTH=1 KINDS=15
mixed-threads 500_000 W=2 WORDS=2 CALLS=1 LENGTH=6 KINDS=16
mixed-threads-calls 100_000 W=2 WORDS=2 CALLS=2 LENGTH=3 KINDS=16 BROADCAST
mixed-put-off 5_000_000 W=2 CALLS=5 LENGTH=3 KINDS=16
mixed-broadcast-x3-shared - W=2 CALLS=3 KINDS=16 BROADCAST SHARED
mixed-allreduce-broadcast-allreduce-shared - W=2 CALLS=3 KINDS=1 SECOND=16 BROADCAST SHARED
mixed-no-filler - W=3 CALLS=3 KINDS=1 SECOND=4 NO_FILLER
mixed-no-done-word - W=2 CALLS=3 NO_DONE
mixed-one-slot - W=2 CALLS=3 SLOTS=1
mixed-not-told - W=2 CALLS=4 LENGTH=1 KINDS=16 NOT_TOLD
mixed-told-ahead - W=2 CALLS=3 TOLD_AHEAD
mixed-put-off-two - W=2 CALLS=3 KINDS=16 PUT_OFF_TWO
mixed-one-kernel - W=2 CALLS=4 LENGTH=1 KINDS=16 ONE_KERNEL
mixed-done-before-rearm - W=2 CALLS=1 LENGTH=3 KINDS=16 DONE_EARLY
mixed-done-relaxed - W=2 CALLS=1 LENGTH=3 KINDS=16 DONE_RELAXED
mixed-no-block-barrier - W=2 WORDS=2 CALLS=1 LENGTH=6 KINDS=16 NO_BLOCK_BARRIER
mixed-counted-at-one-end - W=2 CALLS=3 ONE_END
mixed-epoch-per-tile - W=3 CALLS=2 LENGTH=1 KINDS=16 EPOCH_PER_TILE
mixed-receive-first - W=2 CALLS=1 KINDS=16 RECEIVE_FIRST
mixed-send-all-first - W=2 CALLS=1 LENGTH=3 KINDS=16 SEND_ALL_FIRST
counts.pml
# The counts that precede an all-to-all-v.
counts 20_000 W=2 BLOCKS=2 CALLS=5
counts-3-ranks 10_000 W=3 BLOCKS=1 CALLS=5
counts-one-mailbox - W=2 BLOCKS=2 CALLS=5 ONE_MAILBOX
counts-first-block-advances - W=2 BLOCKS=2 CALLS=5 FIRST_ADVANCES
counts-in-two-words - W=2 BLOCKS=2 CALLS=5 TWO_WORDS
counts-nothing-sent - W=2 BLOCKS=2 CALLS=5 NOTHING_SENT
lanes.pml
# Chunks in lanes. KINDS, FIRST, SECOND: see lanes.pml.
lanes 700_000 W=2 R=2 CALLS=2 CHUNKS=3
lanes-3-ranks 100_000 W=3 R=2 CALLS=1 CHUNKS=2 KINDS=1
lanes-different-grids 50_000 W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=1 BLOCKS1=2
lanes-unequal 300_000 W=2 R=2 CALLS=2 CHUNKS=3 KINDS=32
lanes-not-told - W=2 R=2 CALLS=2 CHUNKS=3 KINDS=32 NOT_TOLD
lanes-carry-all - W=2 R=2 CALLS=2 CHUNKS=3 KINDS=32 CARRY_ALL
lanes-passed 500_000 W=3 R=2 CALLS=1 CHUNKS=2 KINDS=64
lanes-passed-carry-all - W=3 R=2 CALLS=1 CHUNKS=3 KINDS=64 CARRY_ALL
lanes-passed-not-told - W=3 R=2 CALLS=1 CHUNKS=3 KINDS=64 NOT_TOLD
lanes-passed-no-credit - W=3 R=2 CALLS=1 CHUNKS=3 KINDS=64 NO_CREDIT
lanes-no-credit - W=2 R=2 CALLS=2 CHUNKS=3 NO_CREDIT
lanes-relaxed - W=2 R=2 CALLS=1 CHUNKS=2 RELAXED
lanes-oneshot-twoshot - W=2 R=2 CALLS=2 CHUNKS=3 FIRST=2 SECOND=1 NO_CARRY
lanes-broadcast-oneshot - W=2 R=2 CALLS=2 CHUNKS=3 FIRST=4 SECOND=2 NOT_TOLD
lanes-direct-staged - W=2 R=2 CALLS=2 CHUNKS=3 FIRST=8 SECOND=1 DIRECT_IN_RING
lanes-geometry - W=2 R=4 CALLS=3 CHUNKS=3 GEOMETRY
lanes-before-entry - W=2 R=2 CALLS=2 CHUNKS=1 SECOND=16 NO_ENTRY
# Calls whose only block alternates between two lanes, before and after calls with a block for
# each lane.
lanes-wide 50_000 W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=9 WIDE=1
lanes-wide-before 700_000 W=2 LANES=2 R=2 CALLS=2 CHUNKS=2 KINDS=9 WIDE=1 BLOCKS0=2 BLOCKS1=2
lanes-wide-after 700_000 W=2 LANES=2 R=2 CALLS=2 CHUNKS=2 KINDS=9 WIDE=2 BLOCKS0=2 BLOCKS1=2
lanes-wide-no-credit - W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=1 WIDE=1 NO_CREDIT
lanes-wide-not-told - W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=1 WIDE=1 WIDE_NOT_TOLD
lanes-wide-direct-first - W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=8 WIDE=1 WIDE_DIRECT_FIRST
lanes-other-order - W=2 LANES=2 R=2 CALLS=1 CHUNKS=3 KINDS=1 OTHER_ORDER
tiles.pml
# Epochs of tiles.
tiles 50_000 W=2 CALLS=3 CHUNKS=1
tiles-in-chunks 200_000 W=2 CALLS=2 CHUNKS=2
tiles-epoch-per-block - W=2 CALLS=3 CHUNKS=1 EPOCH_PER_BLOCK
tiles-epoch-per-call - W=2 CALLS=2 CHUNKS=2 EPOCH_PER_CALL
tiles-epoch-per-communicator - W=2 CALLS=2 CHUNKS=2 EPOCH_PER_COMMUNICATOR
barrier.pml
# Barriers: symmetric tensors, then staged ones.
barrier 500_000 W=2 BLOCKS=2 CALLS=3
barrier-3-ranks 50_000 W=3 BLOCKS=1 CALLS=3
barrier-multicast 1_000 W=2 BLOCKS=1 CALLS=3 MULTICAST
barrier-multicast-3-ranks 10_000 W=3 BLOCKS=1 CALLS=2 MULTICAST
barrier-multicast-not-own - W=2 BLOCKS=1 CALLS=3 MULTICAST NOT_OWN
barrier-staged 500_000 W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED
barrier-passed 5_000 W=2 BLOCKS=1 CALLS=2 CHUNKS=3 PASSED
barrier-passed-3-ranks 150_000 W=3 BLOCKS=1 CALLS=1 CHUNKS=2 PASSED
barrier-passed-no-gather - W=2 BLOCKS=1 CALLS=2 PASSED NO_GATHER
barrier-passed-relaxed - W=2 BLOCKS=1 CALLS=2 PASSED RELAXED
barrier-sent 1_000 W=2 BLOCKS=1 CALLS=2 CHUNKS=3 SENT
barrier-sent-3-ranks 10_000 W=3 BLOCKS=1 CALLS=2 CHUNKS=2 SENT
barrier-sent-one-half - W=2 BLOCKS=1 CALLS=1 CHUNKS=3 SENT ONE_HALF
barrier-sent-no-closing - W=2 BLOCKS=1 CALLS=2 SENT NO_CLOSING
barrier-sent-no-gather - W=2 BLOCKS=1 CALLS=2 SENT NO_GATHER
barrier-sent-relaxed - W=2 BLOCKS=1 CALLS=2 SENT RELAXED
barrier-no-closing - W=2 BLOCKS=2 CALLS=3 NO_CLOSING
barrier-relaxed - W=2 BLOCKS=2 CALLS=3 RELAXED
barrier-equal - W=2 BLOCKS=2 CALLS=3 EQUAL
barrier-unsigned - W=2 BLOCKS=2 CALLS=3 UNSIGNED
barrier-staged-no-closing - W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED NO_CLOSING
barrier-staged-relaxed - W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED RELAXED
barrier-staged-one-half - W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED ONE_HALF
barrier-staged-other-block - W=2 BLOCKS=2 CALLS=2 CHUNKS=3 STAGED OTHER_BLOCK
""")

SCHEDULES = 30_000
RELACY_CASES = cases(f"""
sentinel_relacy.cpp
sentinel {SCHEDULES} USES=4
sentinel-threads {SCHEDULES} WORDS=2 PARTIAL
sentinel-no-fence - NO_FENCE
sentinel-threads-no-fence - WORDS=2 PARTIAL NO_FENCE
sentinel-no-block-barrier - WORDS=2 PARTIAL NO_BLOCK_BARRIER
sentinel-no-rearm - NO_REARM
sentinel-one-slot - SLOTS=1
oneway_relacy.cpp
oneway {SCHEDULES}
oneway-relaxed-store - RELAXED_STORE
oneway-relaxed-load - RELAXED_LOAD
oneway-no-block-barrier - NO_BLOCK_BARRIER
oneway-done-before-rearm - DONE_EARLY
lanes_relacy.cpp
lanes {SCHEDULES}
lanes-relaxed-store - RELAXED_STORE
lanes-relaxed-load - RELAXED_LOAD
lanes-relaxed-progress - RELAXED_PROGRESS
lanes-no-send-barrier - NO_SEND_BARRIER
lanes-no-take-barrier - NO_TAKE_BARRIER
lanes-one-way {SCHEDULES} ONE_WAY
lanes-one-way-relaxed-store - ONE_WAY RELAXED_STORE
lanes-one-way-relaxed-credit - ONE_WAY RELAXED_CREDIT
lanes-one-way-no-take-barrier - ONE_WAY NO_TAKE_BARRIER
lanes-one-way-no-credit - ONE_WAY NO_CREDIT
barrier_relacy.cpp
barrier {SCHEDULES}
barrier-relaxed-store - RELAXED_STORE
barrier-relaxed-load - RELAXED_LOAD
barrier-no-block-barrier - NO_BLOCK_BARRIER
barrier-no-closing - NO_CLOSING
channel_relacy.cpp
cpu-oneshot {SCHEDULES} ONESHOT
cpu-twoshot {SCHEDULES} W=3
cpu-oneshot-one-slot - ONESHOT SLOTS=1
cpu-one-slot - SLOTS=1
cpu-relaxed-store - RELAXED_STORE
cpu-relaxed-load - RELAXED_LOAD
cpu-two-ahead - SCATTER_EARLY
blame_relacy.cpp
blame {SCHEDULES}
blame-note-behind - NOTE_BEHIND
blame-relaxed-store - RELAXED_STORE
blame-relaxed-load - RELAXED_LOAD
blame-relaxed-mark - RELAXED_MARK
blame-look-first - LOOK_FIRST
blame-notes-first - NOTES_FIRST
blame-leave-first - LEAVE_FIRST
""")


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
