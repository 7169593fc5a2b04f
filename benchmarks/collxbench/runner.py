"""Checks and times every implementation in every case."""

import argparse
import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from collxbench import cuda_timing, mpi_run, timing
from collxbench.implementation import Call, Implementation, Kind
from collxbench.job import Case, Job, Outcome
from collxbench.records import Record

HOST_BYTES = 1 << 12


@dataclass(frozen=True)
class Row:
    """A record and where it stands in the table."""

    record: Record
    label: str
    kind: Kind


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # by label: why it is left out, and where
    ours_failed: bool = False


class Runner:
    def __init__(self, job: Job, options: argparse.Namespace) -> None:
        self._job = job
        self._options = options
        self._results = Results()
        self._ranks = job.ranks

    def run(self, sizes: list[int], implementations: list[Implementation]) -> Results:
        mpi = "mpi" in self._options.peers and self._job.device.type == "cpu"
        total = len(sizes) * len(implementations)
        bar = tqdm(total=total, unit="case", disable=self._ranks.rank != 0)
        with self._stream(), bar:
            for nbytes in sizes:
                case = Case(self._job, nbytes)
                for implementation in implementations:
                    bar.set_postfix_str(f"{implementation.label}, {nbytes} bytes", refresh=False)
                    self._one(case, implementation)
                    bar.update()
            if self._options.host_time:
                self._host_times(implementations)
            for implementation in implementations:
                self._ranks.attempt(partial(implementation.close, self._job))
        if mpi:
            self._mpi(sizes)
        return self._results

    def _stream(self) -> contextlib.AbstractContextManager[object]:
        """One stream for all that is measured: graphs cannot be captured on the default one."""
        if self._job.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream())

    def _one(self, case: Case, implementation: Implementation) -> None:
        if not implementation.wanted(case):
            return
        reason = implementation.unfit(case)
        if reason is not None:
            self._note(implementation, case, reason)
            return
        ready = self._ready(case, implementation)
        if ready.error is not None:
            self._fail(implementation, case, ready.error)
            return
        call, correct = ready.unwrap()
        record = self._record(implementation.name, case.nbytes, call.algorithm)
        if not correct:
            self._add(implementation, record)
            return
        timed = self._timed(case, call)
        if timed.error is not None:
            self._fail(implementation, case, timed.error)
            return
        # What went through the graph or the batches has to be right too, where it can be seen.
        right = not implementation.exact or case.correct(call.result(), exact=True)
        self._add(implementation, record.timed(timed.unwrap(), self._ranks.all(right)))

    def _ready(self, case: Case, implementation: Implementation) -> Outcome[tuple[Call, bool]]:
        """A call, and whether one run of it gave the right result on all ranks."""
        prepared = self._ranks.attempt(partial(implementation.prepare, case))
        if prepared.error is not None:
            return Outcome(None, prepared.error)
        call = prepared.unwrap()
        checked = self._ranks.attempt(partial(self._check, case, implementation, call))
        if checked.error is not None:
            return Outcome(None, checked.error)
        return Outcome((call, self._ranks.all(checked.unwrap())), None)

    def _check(self, case: Case, implementation: Implementation, call: Call) -> bool:
        if implementation.kind is Kind.FLOOR:
            return True
        call.load()
        if not call.in_place:
            call.result().zero_()
        call.run()
        return case.correct(call.result(), implementation.exact)

    def _timed(self, case: Case, call: Call) -> Outcome[timing.Timing]:
        calls = timing.calls_of(case.nbytes, self._options.iterations)
        warmup = self._options.warmup
        if self._job.device.type == "cpu":
            batches = partial(timing.time_batches, call.run, calls, warmup, self._ranks)
            return self._ranks.attempt(batches)
        captured = self._ranks.attempt(partial(cuda_timing.capture, call.run, calls, warmup))
        if captured.error is not None:
            return Outcome(None, captured.error)
        graph = captured.unwrap()
        return self._ranks.attempt(partial(cuda_timing.time_replays, graph, calls, self._ranks))

    def _host_times(self, implementations: list[Implementation]) -> None:
        case = Case(self._job, HOST_BYTES)
        for implementation in implementations:
            if not implementation.wanted(case) or implementation.unfit(case) is not None:
                continue
            ready = self._ready(case, implementation)
            if ready.error is not None or not ready.unwrap()[1]:
                continue  # said and marked in the table already
            call = ready.unwrap()[0]
            host = partial(cuda_timing.time_host, call.run, self._options.warmup, self._ranks)
            timed = self._ranks.attempt(host)
            if timed.error is None:
                record = self._record(implementation.name, case.nbytes, call.algorithm)
                record = replace(record, op=f"{record.op}_host_time")
                record = record.timed(timed.unwrap(), True)
                self._add(implementation, replace(record, busbw_gbs=None))

    def _mpi(self, sizes: list[int]) -> None:
        """In the same run, but in processes of its own, while these wait without spinning."""
        found: list[dict[str, Any]] = []
        reason = None
        if self._ranks.rank == 0:
            work = {
                "sizes": sizes,
                "dtype": self._options.dtype,
                "reduce_op": self._job.reduce_op,
                "iterations": self._options.iterations,
                "warmup": self._options.warmup,
            }
            found, reason = mpi_run.run(self._ranks.world, work)
        found, reason = self._ranks.from_first((found, reason))
        for line in found:
            record = self._record("mpi", line["bytes"], "")
            if line["correct"]:
                times = timing.Timing(line["us"], line["us_min"], line["us_max"])
                record = record.timed(times, True)
            self._results.rows.append(Row(record, "mpi", Kind.PEER))
        if reason is not None:
            self._results.notes.setdefault("mpi", reason)

    def _record(self, name: str, nbytes: int, algorithm: str) -> Record:
        return Record(
            op=self._job.op,
            impl=name,
            algorithm=algorithm,
            bytes=nbytes,
            dtype=self._options.dtype,
            world=self._ranks.world,
            device=self._job.device.type,
        )

    def _add(self, implementation: Implementation, record: Record) -> None:
        self._results.rows.append(Row(record, implementation.label, implementation.kind))
        if implementation.kind is Kind.OURS and not record.correct:
            self._results.ours_failed = True

    def _note(self, implementation: Implementation, case: Case, reason: str) -> None:
        note = f"{reason} (first at {case.nbytes} bytes)"
        self._results.notes.setdefault(implementation.label, note)

    def _fail(self, implementation: Implementation, case: Case, reason: str) -> None:
        self._note(implementation, case, reason)
        if implementation.kind is Kind.OURS:
            self._results.ours_failed = True
