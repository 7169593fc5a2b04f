"""Checks and times every implementation of an operator in every case."""

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from collxbench import cuda_timing, mpi_run, timing
from collxbench.implementation import Call, Implementation, Kind
from collxbench.job import Case, Job, Outcome
from collxbench.norm_case import case_of
from collxbench.op import Op
from collxbench.ops_norm import NormOp
from collxbench.records import Record


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
    eager: dict[str, str] = field(default_factory=dict)  # by label: why no graph can hold its calls
    remarks: dict[str, str] = field(default_factory=dict)  # by label
    ours_failed: bool = False


class Runner:
    def __init__(self, job: Job, op: Op, options: argparse.Namespace) -> None:
        self._job = job
        self._op = op
        self._options = options
        self._results = Results()
        self._ranks = job.ranks

    def run(
        self, sizes: list[int], host_bytes: int, implementations: list[Implementation]
    ) -> Results:
        """`host_bytes`: size of the calls whose host time is taken, if it is."""
        mpi = "mpi" in self._options.peers and self._job.device.type == "cpu"
        total = len(sizes) * len(implementations)
        hidden = self._ranks.rank != 0
        bar = tqdm(total=total, unit="case", desc=self._op.name, disable=hidden)
        with self._stream(), bar:
            for nbytes in sizes:
                case = case_of(self._job, self._op, nbytes)
                for implementation in implementations:
                    bar.set_postfix_str(f"{implementation.label}, {case.where}", refresh=False)
                    self._one(case, implementation)
                    bar.update()
            if self._options.host_time:
                self._host_times(implementations, host_bytes)
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
        if implementation.remark:
            self._results.remarks[implementation.label] = implementation.remark
        call, correct = ready.unwrap()
        record = self._record(implementation.name, case.nbytes, call)
        if not correct:
            self._add(implementation, record)
            return
        if record.eager:
            self._results.eager[implementation.label] = call.eager
        timed = self._timed(case, call)
        if timed.error is not None:
            self._fail(implementation, case, timed.error)
            return
        # What went through the graph or the batches has to be right too, where it can be seen.
        unseen = implementation.kind is Kind.FLOOR or call.in_place
        right = unseen or case.right(call, implementation.kind)
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
        return implementation.kind is Kind.FLOOR or case.check(call, implementation.kind)

    def _timed(self, case: Case, call: Call) -> Outcome[timing.Timing]:
        calls = timing.calls_of(case.nbytes, self._options.iterations)
        warmup = self._options.warmup
        if self._job.device.type == "cpu":
            batches = partial(timing.time_batches, call.run, calls, warmup, self._ranks)
            return self._ranks.attempt(batches)
        if call.eager:
            eager = partial(cuda_timing.time_eager, call.run, calls, warmup, self._ranks)
            return self._ranks.attempt(eager)
        captured = self._ranks.attempt(partial(cuda_timing.capture, call.run, calls, warmup))
        if captured.error is not None:
            return Outcome(None, captured.error)
        graph = captured.unwrap()
        shared = self._ranks.attempt(call.captured)
        if shared.error is not None:
            return Outcome(None, shared.error)
        return self._ranks.attempt(partial(cuda_timing.time_replays, graph, calls, self._ranks))

    def _host_times(self, implementations: list[Implementation], nbytes: int) -> None:
        case = case_of(self._job, self._op, nbytes)
        found: list[tuple[Implementation, Call, str, Callable[[], object]]] = []
        for implementation in implementations:
            skipped = not implementation.wanted(case) or implementation.unfit(case) is not None
            if skipped or implementation.kind is Kind.FLOOR:
                continue
            ready = self._ready(case, implementation)
            if ready.error is not None or not ready.unwrap()[1]:
                continue  # said and marked in the table already
            call = ready.unwrap()[0]
            forms = {implementation.form: call.run, **implementation.other_forms(case)}
            found += [(implementation, call, form, run) for form, run in forms.items()]
        runs = [run for *_, run in found]
        host = partial(
            timing.time_host, runs, self._job.synchronize, self._options.warmup, self._ranks
        )
        times = self._ranks.attempt(host)
        if times.error is not None:
            self._results.notes["host times"] = times.error
            self._results.ours_failed = True  # the forms of peers are those that worked before
            return
        for (implementation, call, form, _), timed in zip(found, times.unwrap(), strict=True):
            record = self._record(implementation.name, case.nbytes, call)
            self._add(implementation, record.timed(timed, True).as_host_time(form))

    def _mpi(self, sizes: list[int]) -> None:
        """In the same run, but in processes of its own, while these wait without spinning."""
        found: list[dict[str, Any]] = []
        reason = None
        if self._ranks.rank == 0:
            work = {
                "op": self._op.name,
                "sizes": sizes,
                "dtype": self._options.dtype,
                "reduce_op": self._job.reduce_op,
                "cols": self._job.cols,
                "rounding": self._job.rounding,
                "iterations": self._options.iterations,
                "warmup": self._options.warmup,
            }
            found, reason = mpi_run.run(self._ranks.world, work)
        found, reason = self._ranks.from_first((found, reason))
        for line in found:
            record = self._record("mpi", line["bytes"])
            if line["correct"]:
                times = timing.Timing(line["us"], line["us_min"], line["us_max"])
                record = record.timed(times, True)
            self._results.rows.append(Row(record, "mpi", Kind.PEER))
        if reason is not None:
            self._results.notes.setdefault("mpi", reason)

    def _record(self, name: str, nbytes: int, call: Call | None = None) -> Record:
        return Record(
            op=self._op.name,
            impl=name,
            algorithm=call.algorithm if call else "",
            bytes=nbytes,
            dtype=self._options.dtype,
            world=self._ranks.world,
            device=self._job.device.type,
            eager=bool(call and call.eager),
            **self._shape(nbytes),
        )

    def _shape(self, nbytes: int) -> dict[str, Any]:
        """What a record of a fused norm has besides."""
        if not isinstance(self._op, NormOp):
            return {}
        rows = nbytes // (self._job.cols * self._job.dtype.itemsize)
        return {"rows": rows, "cols": self._job.cols, "rounding": self._job.rounding}

    def _add(self, implementation: Implementation, record: Record) -> None:
        self._results.rows.append(Row(record, implementation.label, implementation.kind))
        if implementation.kind is Kind.OURS and not record.correct:
            self._results.ours_failed = True

    def _note(self, implementation: Implementation, case: Case, reason: str) -> None:
        note = f"{reason} (first at {case.where})" if self._op.has_tensor else reason
        self._results.notes.setdefault(implementation.label, note)

    def _fail(self, implementation: Implementation, case: Case, reason: str) -> None:
        self._note(implementation, case, reason)
        if implementation.kind is Kind.OURS:
            self._results.ours_failed = True
