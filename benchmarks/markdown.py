"""Prints the JSON file of bench.py as a Markdown table, for docs/performance.md.

python benchmarks/markdown.py out.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from collxbench.units import size_name

NO_PEERS = ("memcpy",)


def main() -> None:
    parser = argparse.ArgumentParser(description="JSON of bench.py to Markdown.")
    parser.add_argument("file", type=Path)
    records = json.loads(parser.parse_args().file.read_text())
    ops = list(dict.fromkeys(record["op"] for record in records))
    for op in ops:
        if len(ops) > 1:
            print(f"### {op}")
        print(table([record for record in records if record["op"] == op]))


def table(records: list[dict[str, Any]]) -> str:
    """Median us a call; last, the fastest peer's time over that of collx's faster form."""
    ours = [r for r in records if r["impl"].startswith("collx")]
    auto = len({(r["impl"], r["bytes"]) for r in ours}) == len(ours)
    for record in records:
        forced = record in ours and not auto
        record["column"] = record["impl"] + (f" {record['algorithm']}" if forced else "")
        record["column"] += " (eager)" if record.get("eager") else ""
    by_rows = any(record.get("rows") for record in records)
    columns = list(dict.fromkeys(record["column"] for record in records))
    head = ["rows" if by_rows else "bytes", *columns, "algorithm", "x best peer"]
    lines = [head, ["--:"] * len(head)]
    for nbytes in sorted({record["bytes"] for record in records}):
        at = {record["column"]: record for record in records if record["bytes"] == nbytes}
        timed = [record for record in at.values() if record["us"] is not None]
        mine = _fastest([r for r in timed if r["impl"].startswith("collx")])
        peer = _fastest(
            [r for r in timed if not r["impl"].startswith("collx") and r["impl"] not in NO_PEERS]
        )
        ratio = f"{peer['us'] / mine['us']:.2f}" if mine and peer else ""
        cells = [_time(at.get(column)) for column in columns]
        first = next(iter(at.values()))
        place = f"{first['rows']} x {first['cols']}" if by_rows else size_name(nbytes)
        lines.append([place, *cells, mine["algorithm"] if mine else "", ratio])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _fastest(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    return min(records, key=lambda record: record["us"], default=None)


def _time(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if record["us"] is None:
        return "wrong"
    return f"{record['us']:.2f}" if record["us"] < 1000 else f"{record['us']:,.0f}"


if __name__ == "__main__":
    main()
