"""Prints the JSON files of the benchmark as Markdown tables, or inserts them into a document.

    python benchmarks/markdown.py out.json
    python benchmarks/markdown.py *.json --into docs/guide/performance.md

In the document, a table is between `<!-- table: TITLE -->` and `<!-- end -->`, where TITLE is the
heading of the printed table. With ", brief" after TITLE, the table only has the fastest peer.
Tables without data in the files do not change.
"""

import argparse
import json
import re
from pathlib import Path
from textwrap import fill
from typing import Any

from collx._bench.units import HOST_TIME, size_name

Records = list[dict[str, Any]]

NO_PEERS = ("memcpy",)
PLACE = re.compile(r"(<!-- table: (.*?)(, brief)? -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description="JSON of the benchmark to Markdown.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="document whose tables are to be replaced")
    options = parser.parse_args()
    tables = by_title([r for file in options.files for r in json.loads(file.read_text())])
    if options.into is None:
        for title, records in tables.items():
            print(f"### {title}\n\n{table(records)}")
        return
    text = options.into.read_text()
    options.into.write_text(filled(text, tables))
    unused = set(tables) - {place[2] for place in PLACE.finditer(text)}
    for title in sorted(unused):
        print(f"no place for: {title}")


def by_title(records: Records) -> dict[str, Records]:
    found: dict[str, Records] = {}
    for r in records:
        parts = [r["op"], f"{r['world']} ranks", r["device"], r["dtype"], r.get("rounding")]
        parts += [r["reduce_op"]] if r.get("reduce_op") not in (None, "sum") else []
        parts += [f"root {r['root']}"] if r.get("root") else []
        found.setdefault(", ".join(part for part in parts if part), []).append(r)
    return found


def filled(text: str, tables: dict[str, Records]) -> str:
    def fill(place: re.Match[str]) -> str:
        start, title, brief, end = place.groups()
        if title not in tables:
            return place[0]
        return f"{start}\n{table(tables[title], brief is not None)}\n{end}"

    return PLACE.sub(fill, text)


def table(records: Records, brief: bool = False) -> str:
    """Returns a table of the median microseconds per call. The last column is the time of the
    fastest peer divided by that of the faster form of collx."""
    if records[0]["op"].endswith(HOST_TIME):
        return host_table(records)
    ours = [r for r in records if _is_ours(r)]
    auto = len({(r["impl"], r["bytes"]) for r in ours}) == len(ours)
    for record in records:
        forced = record in ours and not auto
        record["column"] = record["impl"] + (f" {record['algorithm']}" if forced else "")
        record["column"] += " (eager)" if record.get("eager") else ""
    by_rows = any(record.get("rows") for record in records)
    columns = list(dict.fromkeys(r["column"] for r in (ours if brief else records)))
    peers = list(dict.fromkeys(r["impl"] for r in records if _is_peer(r)))
    head = ["rows" if by_rows else "bytes", *columns, "algorithm"]
    head += ["best peer", "which", "x best peer"] if peers else []
    lines = [head, ["--:"] * len(head)]
    for nbytes in sorted({record["bytes"] for record in records}):
        at = {record["column"]: record for record in records if record["bytes"] == nbytes}
        timed = [record for record in at.values() if record["us"] is not None]
        mine = _fastest([r for r in timed if _is_ours(r)])
        first = next(iter(at.values()))
        place = f"{first['rows']} x {first['cols']}" if by_rows else size_name(nbytes)
        cells = [place, *(_time(at.get(column)) for column in columns)]
        cells.append(mine["algorithm"] if mine else "")
        if peers:
            peer = _fastest([r for r in timed if _is_peer(r)])
            ratio = f"{peer['us'] / mine['us']:.2f}" if mine and peer else ""
            cells += [_time(peer), peer["impl"] if peer else "", ratio]
        lines.append(cells)
    if not brief or not peers:
        return _markdown(lines)
    beside = f"Peers in the same run: {', '.join(peers)}."
    return f"{_markdown(lines)}\n{fill(beside, 120, break_on_hyphens=False)}\n"


def host_table(records: Records) -> str:
    head = ["implementation", "form", "median", "fastest"]
    lines = [head, ["---", "---", "--:", "--:"]]
    for r in records:
        lines.append([r["impl"], r["form"], _time(r), f"{r['us_min']:.2f}"])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _is_ours(record: dict[str, Any]) -> bool:
    return bool(record["impl"].startswith("collx"))


def _is_peer(record: dict[str, Any]) -> bool:
    return not _is_ours(record) and record["impl"] not in NO_PEERS


def _fastest(records: Records) -> dict[str, Any] | None:
    return min(records, key=lambda record: record["us"], default=None)


def _time(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if record["us"] is None:
        return "wrong"
    return f"{record['us']:.2f}" if record["us"] < 1000 else f"{record['us']:,.0f}"


if __name__ == "__main__":
    main()
