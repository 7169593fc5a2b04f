"""Checks and times every implementation of an operator in every case."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from collx._bench import cuda_timing, timing
from collx._bench.call import Call, Kind
from collx._bench.implementation import Implementation
from collx._bench.job import Case, Job, Outcome
from collx._bench.mpi_run import Mpi
from collx._bench.norm_case import case_of
from collx._bench.op import Op
from collx._bench.ops_norm import NormOp
from collx._bench.records import Record


@dataclass(frozen=True)
class Row:
    """A record and its position in the table."""

    record: Record
    label: str
    kind: Kind


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # by label: why and where it is left out
    eager: dict[str, str] = field(default_factory=dict)  # by label: why graphs cannot contain it
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
        """Measures all implementations. `host_bytes`: the size of the calls whose host time is
        measured."""
        mpi = "mpi" in self._options.peers and self._job.device.type == "cpu"
        total = len(sizes) * len(implementations)
        with self._stream(), self._progress(total) as progress:
            for nbytes in sizes:
                case = case_of(self._job, self._op, nbytes)
                for implementation in implementations:
                    progress(f"{implementation.label}, {case.where}")
                    self._one(case, implementation)
            if self._options.host_time:
                self._host_times(implementations, host_bytes)
            for implementation in implementations:
                self._ranks.attempt(partial(implementation.close, self._job))
        if mpi:
            self._measure_mpi(sizes)
        return self._results

    @contextlib.contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[str], None]]:
        """Shows a progress bar on rank 0 if tqdm is installed and stderr is a terminal. Yields the
        function that starts a case."""
        if self._ranks.rank != 0 or find_spec("tqdm") is None:
            yield lambda case: None
            return
        from tqdm import tqdm

        with tqdm(total=total, unit="case", desc=self._op.name, disable=None) as bar:

            def begin(case: str) -> None:
                bar.set_postfix_str(case, refresh=False)
                bar.update()

            yield begin

    def _stream(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context with one stream for all measurements: graphs cannot be captured on the
        default stream."""
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
        """Returns the record of a call, None if it failed. `how` is the prefix of the noted
        error."""
        ready = self._ready(case, implementation, prepare)
        if ready.error is not None:
            self._fail(implementation, case, how + ready.error)
            return None
        if implementation.remark:
            self._results.remarks[implementation.label] = implementation.remark
        call, wrong = ready.unwrap()
        record = self._record(implementation.name, case.nbytes, call)
        if not self._options.check:
            record = replace(record, wrong=None)
        if wrong:
            return replace(record, wrong=wrong)
        if record.eager:
            self._results.eager[implementation.label] = call.eager
        timed = self._timed(case, call)
        if timed.error is not None:
            self._fail(implementation, case, how + timed.error)
            return None
        # The results of the graph or the batches are also checked, if they can be.
        unseen = implementation.kind is Kind.FLOOR or call.in_place or not self._options.check
        wrong = self._ranks.total(0 if unseen else case.wrong(call, implementation.kind))
        return replace(record, wrong=wrong) if wrong else record.timed(timed.unwrap())

    def _ready(
        self, case: Case, implementation: Implementation, prepare: Callable[[], Call]
    ) -> Outcome[tuple[Call, int]]:
        """Returns a call, and the number of wrong elements on all ranks after making it once."""
        prepared = self._ranks.attempt(prepare)
        if prepared.error is not None:
            return Outcome(None, prepared.error)
        call = prepared.unwrap()
        checked = self._ranks.attempt(partial(self._check, case, implementation, call))
        if checked.error is not None:
            return Outcome(None, checked.error)
        return Outcome((call, self._ranks.total(checked.unwrap())), None)

    def _check(self, case: Case, implementation: Implementation, call: Call) -> int:
        if implementation.kind is Kind.FLOOR:
            return 0
        if self._options.check or not self._op.has_tensor:
            return case.check(call, implementation.kind)
        call.load()
        return 0

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
                continue  # already reported in the table
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
            self._results.ours_failed = True  # the forms of the peers have worked before
            return
        for (implementation, call, form, _), timed in zip(found, times.unwrap(), strict=True):
            record = self._record(implementation.name, case.nbytes, call)
            self._add(implementation, record.timed(timed).as_host_time(form))

    def _measure_mpi(self, sizes: list[int]) -> None:
        """Measures MPI in the same run, but in separate processes, while these wait without
        spinning."""
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
        """Whether a call can write the result to the input. The steps of a norm reduce in place,
        but their result is another tensor."""
        return self._op.has_tensor and not isinstance(self._op, NormOp)

    def _shape(self, nbytes: int) -> dict[str, Any]:
        """Returns the additional fields of a record of a fused norm."""
        if not isinstance(self._op, NormOp):
            return {}
        rows = nbytes // (self._job.cols * self._job.dtype.itemsize)
        return {"rows": rows, "cols": self._job.cols, "rounding": self._job.rounding}

    def _add(self, implementation: Implementation, record: Record) -> None:
        self._results.rows.append(Row(record, implementation.label, implementation.kind))
        wrong = record.wrong or record.in_place_wrong
        if implementation.kind is Kind.OURS and (wrong or record.us is None):
            self._results.ours_failed = True

    def _note(self, implementation: Implementation, case: Case, reason: str) -> None:
        note = f"{reason} (first at {case.where})" if self._op.has_tensor else reason
        self._results.notes.setdefault(implementation.label, note)

    def _fail(self, implementation: Implementation, case: Case, reason: str) -> None:
        self._note(implementation, case, reason)
        if implementation.kind is Kind.OURS:
            self._results.ours_failed = True
