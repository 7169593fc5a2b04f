"""Formats the tables of the benchmark."""

import torch

from collx._bench.call import Kind
from collx._bench.ops import OPS
from collx._bench.records import Record
from collx._bench.runner import Results, Row
from collx._bench.units import size_name

FULL_COLUMNS = 3  # with more columns of collx, only the fastest one has busbw and ratio


def table(results: Results) -> str:
    """Returns a table of time, busbw and ratio to the best peer, with one line for each size."""
    rows = [row for row in results.rows if not row.record.is_host_time]
    labels: dict[str, Kind] = {row.label: row.kind for row in rows}
    ours = [label for label, kind in labels.items() if kind is Kind.OURS]
    others = [label for label, kind in labels.items() if kind is not Kind.OURS]
    full = len(ours) <= FULL_COLUMNS
    by_rows = any(row.record.rows is not None for row in rows)
    head = ["rows" if by_rows else "bytes"]
    for label in ours:
        head += [label, "GB/s", "x peer"] if full else [label]
    head += ["algorithm"] if full else ["fastest", "GB/s", "x peer"]
    lines = [[*head, *others, "best peer"]]
    for nbytes in sorted({row.record.bytes for row in rows}):
        at = {row.label: row for row in rows if row.record.bytes == nbytes}
        peer = fastest([row for row in at.values() if row.kind is Kind.PEER])
        cells = [place_name(next(iter(at.values())).record)]
        for label in ours:
            cells += [_time(at.get(label)), *(_merits(at.get(label), peer) if full else [])]
        mine = fastest([row for row in at.values() if row.kind is Kind.OURS])
        if full:
            cells.append(mine.record.algorithm if mine else "")
        else:
            cells += [mine.label if mine else "", *_merits(mine, peer)]
        cells += [*(_time(at.get(label)) for label in others), peer.label if peer else ""]
        lines.append(cells)
    return _aligned(lines)


NCCL_TYPES = {"float16": "half", "float32": "float", "float64": "double"}


def nccl_lines(results: Results) -> str:
    """Returns the output of nccl-tests for each implementation."""
    rows = [row for row in results.rows if not row.record.is_host_time]
    labels = list(dict.fromkeys(row.label for row in rows))
    measured, units = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    lines = [
        ["#", "size", "count", "type", "redop", "root", *measured, *measured],
        ["#", "(B)", "(elements)", "", "", "", *units, *units],
    ]
    lines += [_nccl_line(row) for label in labels for row in rows if row.label == label]
    aligned = _aligned(lines)
    head = aligned.splitlines()[0]
    apart, inside = head.index("time"), head.rindex("time")
    over = " " * head.index("#") + "#"
    return f"{over:{apart}}{'out of place':{inside - apart}}in place\n{aligned}"


def _nccl_line(row: Row) -> list[str]:
    r, op = row.record, OPS[row.record.op]
    count = r.bytes // getattr(torch, r.dtype).itemsize // (r.world if op.divided else 1)
    kind = [NCCL_TYPES.get(r.dtype, r.dtype), r.reduce_op or "none"]
    place = [row.label, str(r.bytes), str(count), *kind, "-1" if r.root is None else str(r.root)]
    wrong = None if row.kind is Kind.FLOOR else r.wrong  # a floor has no checked result
    apart = ["-"] * 4 if r.in_place else _nccl_cells(r.us, r.algbw_gbs, r.busbw_gbs, wrong)
    inside = (r.in_place_us, r.in_place_algbw_gbs, r.in_place_busbw_gbs, r.in_place_wrong)
    return [*place, *apart, *_nccl_cells(*inside)]


def _nccl_cells(
    us: float | None, algbw: float | None, busbw: float | None, wrong: int | None
) -> list[str]:
    times = ("-" if value is None else f"{value:.2f}" for value in (us, algbw, busbw))
    return [*times, "-" if wrong is None else str(wrong)]


def place_name(record: Record) -> str:
    """Returns the label of a line of the table: rows x columns, or bytes."""
    if record.rows is not None:
        return f"{record.rows} x {record.cols}"
    return size_name(record.bytes)


def fastest(rows: list[Row]) -> Row | None:
    timed = [row for row in rows if row.record.us is not None]
    return min(timed, key=lambda row: row.record.us or 0.0, default=None)


def _merits(row: Row | None, peer: Row | None) -> list[str]:
    """Returns busbw and the speedup over the peer."""
    if row is None or row.record.us is None:
        return ["", ""]
    busbw = "" if row.record.busbw_gbs is None else f"{row.record.busbw_gbs:.2f}"
    ratio = "" if peer is None or not peer.record.us else f"{peer.record.us / row.record.us:.2f}"
    return [busbw, ratio]


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.record.us is None:
        return "WRONG"
    return f"{row.record.us:.2f}" if row.record.us < 1000 else f"{row.record.us:.0f}"


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def host_times(results: Results) -> str:
    """Returns a table of host times, with the overhead of a Python function over the operator in
    the same form."""
    rows = [row for row in results.rows if row.record.is_host_time]
    operators = {(row.label, row.record.form): row.record for row in rows}
    lines = [["implementation", "form", "us", "min", "max", "over operator", "of min"]]
    for row in rows:
        r = row.record
        times = (f"{value or 0:.2f}" for value in (r.us, r.us_min, r.us_max))
        form = r.form or ""
        operator = operators.get((row.label, form.replace("function,", "operator,")))
        over = ["", ""]
        if form.startswith("function,") and operator is not None:
            pairs = ((r.us, operator.us), (r.us_min, operator.us_min))
            over = [f"{(mine or 0) - (its or 0):+.2f}" for mine, its in pairs]
        lines.append([row.label, form, *times, *over])
    return _aligned(lines) if rows else ""


def notes(results: Results) -> list[str]:
    """Returns the notes below the table."""
    found = [f"{label} left out: {reason}" for label, reason in results.notes.items()]
    for label, reason in results.eager.items():
        found.append(f"{label}: called one by one, not from a graph, since {reason}")
    found += [f"{label}: {remark}" for label, remark in results.remarks.items()]
    labels = {row.label for row in results.rows}
    if "mpi" in labels:
        found.append("mpi: measured in the same run, in processes that mpiexec started")
    if "memcpy" in labels:
        found.append("memcpy: a plain copy of the bytes that must cross, no peer")
    if any(row.label.startswith("collx(sym)") for row in results.rows):
        whole = "the input is a symmetric tensor, else an ordinary one"
        if all(row.record.rows is None for row in results.rows):
            whole = "input and output are symmetric tensors, else ordinary ones"
        found.append(f"collx(sym): {whole}")
    return found
