"""Checks and times every implementation of an operator in every case."""

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from collxbench import cuda_timing, timing
from collxbench.call import Call, Kind
from collxbench.implementation import Implementation
from collxbench.job import Case, Job, Outcome
from collxbench.mpi_run import Mpi
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
    def __init__(self, job: Job, op: Op, options: argparse.Namespace, mpi: Mpi) -> None:
        self._job = job
        self._mpi = mpi
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
            self._measure_mpi(sizes)
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
        record = self._measured(case, implementation, partial(implementation.prepare, case))
        if record is None:
            return
        if record.in_place:
            record = record.beside(record)
        elif self._options.format == "nccl" and (in_place := implementation.in_place(case)):
            found = self._measured(case, implementation, in_place, "in place: ")
            record = record if found is None else record.beside(found)
        self._add(implementation, record)

    def _measured(
        self, case: Case, implementation: Implementation, prepare: Callable[[], Call], how: str = ""
    ) -> Record | None:
        """None if it failed, which is noted, behind `how`."""
        ready = self._ready(case, implementation, prepare)
        if ready.error is not None:
            self._fail(implementation, case, how + ready.error)
            return None
        if implementation.remark:
            self._results.remarks[implementation.label] = implementation.remark
        call, wrong = ready.unwrap()
        record = self._record(implementation.name, case.nbytes, call)
        if wrong:
            return replace(record, wrong=wrong)
        if record.eager:
            self._results.eager[implementation.label] = call.eager
        timed = self._timed(case, call)
        if timed.error is not None:
            self._fail(implementation, case, how + timed.error)
            return None
        # What went through the graph or the batches has to be right too, where it can be seen.
        unseen = implementation.kind is Kind.FLOOR or call.in_place
        wrong = self._ranks.total(0 if unseen else case.wrong(call, implementation.kind))
        return replace(record, wrong=wrong) if wrong else record.timed(timed.unwrap())

    def _ready(
        self, case: Case, implementation: Implementation, prepare: Callable[[], Call]
    ) -> Outcome[tuple[Call, int]]:
        """A call, and how many elements of all ranks were wrong when it was made once."""
        prepared = self._ranks.attempt(prepare)
        if prepared.error is not None:
            return Outcome(None, prepared.error)
        call = prepared.unwrap()
        checked = self._ranks.attempt(partial(self._check, case, implementation, call))
        if checked.error is not None:
            return Outcome(None, checked.error)
        return Outcome((call, self._ranks.total(checked.unwrap())), None)

    def _check(self, case: Case, implementation: Implementation, call: Call) -> int:
        floor = implementation.kind is Kind.FLOOR
        return 0 if floor else case.check(call, implementation.kind)

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
            ready = self._ready(case, implementation, partial(implementation.prepare, case))
            if ready.error is not None or ready.unwrap()[1]:
                continue  # said and marked in the table already
            call = ready.unwrap()[0]
            forms = {implementation.form: call.run, **implementation.other_forms(case)}
            found += [(implementation, call, form, run) for form, run in forms.items()]
        runs = [run for *_, run in found]
        calls = self._options.iterations or timing.HOST_CALLS
        times = self._ranks.attempt(
            partial(
                timing.time_host,
                runs,
                self._job.synchronize,
                min(calls, timing.HOST_CALLS),
                self._options.warmup,
                self._ranks,
            )
        )
        if times.error is not None:
            self._results.notes["host times"] = times.error
            self._results.ours_failed = True  # the forms of peers are those that worked before
            return
        for (implementation, call, form, _), timed in zip(found, times.unwrap(), strict=True):
            record = self._record(implementation.name, case.nbytes, call)
            self._add(implementation, record.timed(timed).as_host_time(form))

    def _measure_mpi(self, sizes: list[int]) -> None:
        """In the same run, but in processes of its own, while these wait without spinning."""
        found: list[dict[str, Any]] = []
        reason = None
        if self._ranks.rank == 0:
            work = {
                "op": self._op.name,
                "sizes": sizes,
                "dtype": self._dtype,
                "reduce_op": self._job.reduce_op,
                "root": self._job.root,
                "in_place": self._options.format == "nccl",
                "cols": self._job.cols,
                "rounding": self._job.rounding,
                "iterations": self._options.iterations,
                "warmup": self._options.warmup,
            }
            found, reason = self._mpi.run(work)
        found, reason = self._ranks.from_first((found, reason))
        for line in found:
            record = self._from_mpi(line["bytes"], line["result"])
            if record.in_place:
                record = record.beside(record)
            elif line["in_place"] is not None:
                record = record.beside(self._from_mpi(line["bytes"], line["in_place"]))
            self._results.rows.append(Row(record, "mpi", Kind.PEER))
        if reason is not None:
            self._results.notes.setdefault("mpi", reason)

    def _from_mpi(self, nbytes: int, found: dict[str, Any]) -> Record:
        in_place, wrong, times = found["in_place"], found["wrong"], found["times"]
        record = replace(self._record("mpi", nbytes), in_place=in_place, wrong=wrong)
        return record if wrong else record.timed(timing.Timing(**times))

    def _record(self, name: str, nbytes: int, call: Call | None = None) -> Record:
        return Record(
            op=self._op.name,
            impl=name,
            algorithm=call.algorithm if call else "",
            bytes=nbytes,
            dtype=self._dtype,
            world=self._ranks.world,
            device=self._job.device.type,
            reduce_op=self._job.reduce_op if self._op.reduces else None,
            root=self._job.root if self._op.rooted else None,
            eager=bool(call and call.eager),
            in_place=bool(call and call.in_place) and self._in_place,
            **self._shape(nbytes),
        )

    @property
    def _dtype(self) -> str:
        return str(self._job.dtype).removeprefix("torch.")

    @property
    def _in_place(self) -> bool:
        """Whether a call can leave the result in the input: the steps of a norm reduce there, but
        end elsewhere."""
        return self._op.has_tensor and not isinstance(self._op, NormOp)

    def _shape(self, nbytes: int) -> dict[str, Any]:
        """What a record of a fused norm has besides."""
        if not isinstance(self._op, NormOp):
            return {}
        rows = nbytes // (self._job.cols * self._job.dtype.itemsize)
        return {"rows": rows, "cols": self._job.cols, "rounding": self._job.rounding}

    def _add(self, implementation: Implementation, record: Record) -> None:
        self._results.rows.append(Row(record, implementation.label, implementation.kind))
        if implementation.kind is Kind.OURS and (not record.correct or record.in_place_wrong):
            self._results.ours_failed = True

    def _note(self, implementation: Implementation, case: Case, reason: str) -> None:
        note = f"{reason} (first at {case.where})" if self._op.has_tensor else reason
        self._results.notes.setdefault(implementation.label, note)

    def _fail(self, implementation: Implementation, case: Case, reason: str) -> None:
        self._note(implementation, case, reason)
        if implementation.kind is Kind.OURS:
            self._results.ours_failed = True
