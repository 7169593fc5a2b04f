"""What one measurement gave."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from collxbench.timing import Timing

OPS = ("allreduce",)


@dataclass(frozen=True)
class Record:
    """One line of the JSON file. Times are null where the result was wrong, hence not timed."""

    op: str
    impl: str
    algorithm: str  # the one that ran; empty where the implementation does not say
    bytes: int  # of the full tensor on each rank
    dtype: str
    world: int
    device: str
    us: float | None = None  # median, slowest rank
    us_min: float | None = None
    us_max: float | None = None
    busbw_gbs: float | None = None  # 10^9 bytes/s that cross each rank's link
    correct: bool = False

    def timed(self, timing: Timing, correct: bool) -> "Record":
        if not correct:
            return self
        busbw = wire_bytes(self.bytes, self.world) / (timing.us * 1e3)
        return replace(
            self,
            us=timing.us,
            us_min=timing.us_min,
            us_max=timing.us_max,
            busbw_gbs=busbw,
            correct=True,
        )


def wire_bytes(nbytes: int, world: int) -> float:
    """Bytes that an all-reduce must send over each rank's link."""
    return 2 * (world - 1) / world * nbytes


def write(file: Path, records: list[Record]) -> None:
    file.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return str(nbytes)
