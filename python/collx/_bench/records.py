"""The record of one measurement."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from collx._bench.ops import OPS
from collx._bench.timing import Timing
from collx._bench.units import HOST_TIME


@dataclass(frozen=True)
class Record:
    """One line of the JSON file. Times are null if the result was wrong and the call was therefore
    not timed.

    Bandwidths are defined as in nccl-tests, in 10^9 bytes/s. algbw is the size of the full tensor
    divided by the time. busbw is the number of bytes that cross the busiest rank's link, divided by
    the time: 2 (n-1)/n of algbw for an all-reduce of n ranks.
    """

    op: str
    impl: str
    algorithm: str  # the executed algorithm; empty if the implementation does not report it
    bytes: int  # of the full tensor; 0 for a barrier
    dtype: str
    world: int
    device: str
    rows: int | None = None  # of a fused norm
    cols: int | None = None
    rounding: str | None = None
    reduce_op: str | None = None  # of reductions
    root: int | None = None  # of operators with a root
    form: str | None = None  # the form of the call, for host times
    us: float | None = None  # median on the slowest rank
    us_min: float | None = None
    us_max: float | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    wrong: int | None = 0  # number of wrong elements on all ranks; None: not checked
    correct: bool | None = False  # None: not checked
    eager: bool = False  # eager calls on CUDA, because a graph cannot contain them
    in_place: bool = False  # whether all fields are of in-place calls, because there are no others
    in_place_us: float | None = None  # of in-place calls, if they were measured
    in_place_algbw_gbs: float | None = None
    in_place_busbw_gbs: float | None = None
    in_place_wrong: int | None = None

    def timed(self, timing: Timing) -> "Record":
        """Returns the record of correct results with their times."""
        crossing = OPS[self.op].bytes_on_link(self.bytes, self.world)
        return replace(
            self,
            us=timing.us,
            us_min=timing.us_min,
            us_max=timing.us_max,
            algbw_gbs=self.bytes / (timing.us * 1e3) if self.bytes else None,
            busbw_gbs=crossing / (timing.us * 1e3) if crossing else None,
            correct=None if self.wrong is None else True,
        )

    def beside(self, other: "Record") -> "Record":
        """Returns the record with the in-place times of `other`."""
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
    """Returns the record of collx.init on the slowest rank."""
    us = seconds * 1e6
    return Record("init", "collx", "", 0, dtype, world, device, us=us, correct=True)


def write(file: Path, records: list[Record]) -> None:
    lines = ",\n".join(json.dumps(asdict(record)) for record in records)
    file.write_text(f"[\n{lines}\n]\n")
