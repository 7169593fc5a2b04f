"""What one measurement gave."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from collxbench.ops import OPS
from collxbench.timing import Timing


@dataclass(frozen=True)
class Record:
    """One line of the JSON file. Times are null where the result was wrong, hence not timed."""

    op: str
    impl: str
    algorithm: str  # the one that ran; empty where the implementation does not say
    bytes: int  # of the full tensor; 0 for a barrier
    dtype: str
    world: int
    device: str
    rows: int | None = None  # of a fused norm
    cols: int | None = None
    rounding: str | None = None
    form: str | None = None  # of the call whose host time it is
    us: float | None = None  # median, slowest rank
    us_min: float | None = None
    us_max: float | None = None
    busbw_gbs: float | None = None  # 10^9 bytes/s that cross the busiest rank's link
    correct: bool = False
    eager: bool = False  # called one by one on CUDA, where no graph could hold it

    def timed(self, timing: Timing, correct: bool) -> "Record":
        if not correct:
            return self
        crossing = OPS[self.op].bytes_on_link(self.bytes, self.world)
        return replace(
            self,
            us=timing.us,
            us_min=timing.us_min,
            us_max=timing.us_max,
            busbw_gbs=crossing / (timing.us * 1e3) if crossing else None,
            correct=True,
        )

    def as_host_time(self, form: str) -> "Record":
        op = f"{self.op}{HOST_TIME}"
        return replace(self, op=op, form=form, busbw_gbs=None, eager=False)

    @property
    def is_host_time(self) -> bool:
        return self.op.endswith(HOST_TIME)


def of_init(dtype: str, world: int, device: str, seconds: float) -> Record:
    """Of collx.init, on the slowest rank."""
    us = seconds * 1e6
    return Record("init", "collx", "", 0, dtype, world, device, us=us, correct=True)


HOST_TIME = "_host_time"  # ends the op of records of the host's time


def write(file: Path, records: list[Record]) -> None:
    file.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
