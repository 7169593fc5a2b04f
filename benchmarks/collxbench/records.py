"""What one measurement gave."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from collxbench.ops import OPS
from collxbench.timing import Timing
from collxbench.units import HOST_TIME


@dataclass(frozen=True)
class Record:
    """One line of the JSON file. Times are null where the result was wrong, hence not timed.

    Bandwidths are nccl-tests': algbw the full tensor's bytes over time; busbw what crosses the
    busiest rank's link over time, 2 (n-1)/n of algbw for an all-reduce of n ranks. In 10^9 bytes/s.
    """

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
    reduce_op: str | None = None  # of what reduces
    root: int | None = None  # of what has one
    form: str | None = None  # of the call whose host time it is
    us: float | None = None  # median, slowest rank
    us_min: float | None = None
    us_max: float | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    wrong: int = 0  # elements, of all ranks
    correct: bool = False
    eager: bool = False  # called one by one on CUDA, where no graph could hold it
    in_place: bool = False  # whether all this is of calls in place, for want of others
    in_place_us: float | None = None  # of calls in place, where they were measured
    in_place_algbw_gbs: float | None = None
    in_place_busbw_gbs: float | None = None
    in_place_wrong: int | None = None

    def timed(self, timing: Timing) -> "Record":
        """Of right results."""
        crossing = OPS[self.op].bytes_on_link(self.bytes, self.world)
        return replace(
            self,
            us=timing.us,
            us_min=timing.us_min,
            us_max=timing.us_max,
            algbw_gbs=self.bytes / (timing.us * 1e3) if self.bytes else None,
            busbw_gbs=crossing / (timing.us * 1e3) if crossing else None,
            correct=True,
        )

    def beside(self, other: "Record") -> "Record":
        """With what `other` says of the same in place."""
        return replace(
            self,
            in_place_us=other.us,
            in_place_algbw_gbs=other.algbw_gbs,
            in_place_busbw_gbs=other.busbw_gbs,
            in_place_wrong=other.wrong,
        )

    def as_host_time(self, form: str) -> "Record":
        op = f"{self.op}{HOST_TIME}"
        bare = replace(self, algbw_gbs=None, busbw_gbs=None, eager=False, in_place=False)
        return replace(bare, op=op, form=form)

    @property
    def is_host_time(self) -> bool:
        return self.op.endswith(HOST_TIME)


def of_init(dtype: str, world: int, device: str, seconds: float) -> Record:
    """Of collx.init, on the slowest rank."""
    us = seconds * 1e6
    return Record("init", "collx", "", 0, dtype, world, device, us=us, correct=True)


def write(file: Path, records: list[Record]) -> None:
    lines = ",\n".join(json.dumps(asdict(record)) for record in records)
    file.write_text(f"[\n{lines}\n]\n")
