"""Tuning tables, which `python -m collx tune` writes and `collx.init(tuning=...)` reads."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch

from collx import _machine
from collx._extension import extension
from collx._version import VERSION

__all__ = ["FORMAT", "VARIABLE", "Entry", "Given", "Table", "Tuning", "chosen", "new", "read"]

FORMAT = 1
VARIABLE = "COLLX_TUNING"
MOST_BLOCKS = 1024
MOST_BYTES = (1 << 63) - 1
BLOCK_SIZES = tuple(range(64, 513, 64))
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8")

Given: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"

_log = logging.getLogger("collx")


@dataclass(frozen=True)
class Entry:
    """A range of sizes of an operator, and the choice for it.

    Attributes:
        op: the name of the operator.
        dtype: the name of the dtype of a reduction; None for copies, whose speed does not depend on
            it.
        symmetric: whether the tensors that peers access are symmetric.
        from_bytes, to_bytes: the smallest and the largest size of the full tensor.
        algorithm, max_blocks: as in a call.
        threads: the threads of a block on CUDA; 0 selects the number by the size.
    """

    op: str
    dtype: str | None
    symmetric: bool
    from_bytes: int
    to_bytes: int
    algorithm: str
    max_blocks: int = 0
    threads: int = 0

    @property
    def group(self) -> tuple[str, str, bool]:
        """The group of the entry. Entries of the same group must not overlap."""
        return self.op, self.dtype or "", self.symmetric


@dataclass(frozen=True)
class Table:
    """The content of a file. `device` is the name of the CPU or GPU; `driver` the version of the
    GPU's driver. `payload_bytes` and `max_blocks` are those of the communicator that measured."""

    format: int
    collx_version: str
    torch_version: str
    device_type: str
    device: str
    driver: str | None
    world_size: int
    payload_bytes: int
    max_blocks: int
    date: str
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @property
    def digest(self) -> str:
        """A hash that is equal for equal tables, regardless of the order of keys and entries."""
        whole = {**asdict(self), "entries": sorted(map(repr, self.entries))}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Tuning:
    """The table of a communicator."""

    source: str
    """The name of the file, or "a dict"."""
    table: Table

    def __str__(self) -> str:
        return f"{len(self.table.entries)} entries, sha256 {self.table.digest[:16]}"

    def native(self) -> list[tuple[str, str, bool, int, int, str, int, int]]:
        """Returns the entries as `extension.Communicator` takes them."""
        return [astuple(replace(entry, dtype=entry.dtype or "")) for entry in self.table.entries]


def new(
    device: torch.device, world_size: int, payload_bytes: int, max_blocks: int, date: str
) -> Table:
    """Returns a table for this machine, without entries."""
    return Table(
        format=FORMAT,
        collx_version=VERSION,
        torch_version=str(torch.__version__),
        device_type=device.type,
        device=_machine.device_name(device),
        driver=_machine.driver(device),
        world_size=world_size,
        payload_bytes=payload_bytes,
        max_blocks=max_blocks,
        date=date,
        entries=(),
    )


def chosen(
    given: Given, device: torch.device, world_size: int, *, deterministic: bool, exact: bool
) -> Tuning | None:
    """Returns the table that a communicator uses: `given`, or that of the environment variable.

    A table of another world size or kind of device is an error if `given` is for this communicator
    alone (`exact`). Otherwise this communicator does not use the table; others may.

    Raises:
        ValueError, TypeError: the table is not valid for this communicator.
    """
    if given is None:
        given, exact = os.environ.get(VARIABLE) or None, False
    if given is None:
        return None
    source = "a dict" if isinstance(given, Mapping) else _path(given)
    table = read(given, source)
    served = table.world_size == world_size and table.device_type == device.type
    if not exact and not served:
        _log.info(
            "the tuning table in %s is for %d ranks on %s: a communicator of %d ranks on %s does "
            "not use it",
            *(source, table.world_size, table.device_type, world_size, device.type),
        )
        return None
    _check_place(table, source, device, world_size)
    for number, entry in enumerate(table.entries):
        _check_algorithm(entry, f"entry {number} of {source}", device.type, deterministic)
    return Tuning(source, table)


def read(given: str | os.PathLike[str] | Mapping[str, Any], source: str = "a dict") -> Table:
    """Reads the table in a file or a dict. Raises ValueError if it is damaged or has another
    format."""
    content: Any = given
    if not isinstance(given, Mapping):
        source = _path(given)
        try:
            content = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as reason:
            _refuse(f"{source}, which cannot be read ({reason})", "a file of `collx tune`")
    if not isinstance(content, Mapping):
        _refuse(f"a {type(content).__name__} in {source}", "a JSON object")
    if content.get("format") != FORMAT:
        _refuse(f"format {content.get('format')!r} in {source}", str(FORMAT))
    rows = content.get("entries")
    if not isinstance(rows, (list, tuple)):
        _refuse(f"entries of type {type(rows).__name__} in {source}", "a list")
    entries = []
    for number, row in enumerate(rows):
        where = f"entry {number} of {source}"
        if not isinstance(row, Mapping):
            _refuse(f"a {type(row).__name__} as {where}", "a JSON object")
        entry = Entry(**_checked(Entry, row, where))
        _check_entry(entry, where)
        entries.append(entry)
    _check_overlap(entries, source)
    return Table(**{**_checked(Table, content, source), "entries": tuple(entries)})


def _refuse(got: str, accepted: str) -> NoReturn:
    raise ValueError(f"collx.init: tuning: got {got}; accepted: {accepted}")


def _path(given: Any) -> str:
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"collx.init: tuning: got a {type(given).__name__}; accepted: the path of a file, a "
            "dict, or None"
        )
    return os.fspath(given)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "str | None": (str, type(None)),
    "int": int,
    "bool": bool,
}


def _checked(kind: type, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the values of a dataclass. Raises ValueError if a key is missing or unknown, or a
    value has the wrong type."""
    accepted = [field.name for field in fields(kind)]
    if set(content) != set(accepted):
        _refuse(f"the keys {', '.join(map(str, content))} in {where}", ", ".join(accepted))
    for field in fields(kind):
        wanted = _KINDS.get(str(field.type))
        value = content[field.name]
        if wanted is None:
            continue
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            _refuse(f"{field.name} {value!r} in {where}", str(field.type).replace(" | ", " or "))
    return dict(content)


def _check_entry(entry: Entry, where: str) -> None:
    operators = extension.tunable_operators()
    if entry.op not in operators:
        _refuse(f"op {entry.op!r} in {where}", ", ".join(operators))
    reduces = "reduce" in entry.op
    if entry.dtype not in (DTYPES if reduces else (None,)):
        _refuse(
            f"dtype {entry.dtype!r} for {entry.op} in {where}",
            ", ".join(DTYPES) if reduces else "null",
        )
    if not 0 <= entry.from_bytes <= entry.to_bytes <= MOST_BYTES:
        _refuse(
            f"from_bytes {entry.from_bytes} and to_bytes {entry.to_bytes} in {where}",
            f"0 to {MOST_BYTES}, from_bytes not above to_bytes",
        )
    if not 0 <= entry.max_blocks <= MOST_BLOCKS:
        _refuse(f"max_blocks {entry.max_blocks} in {where}", f"0 to {MOST_BLOCKS}")
    if entry.threads not in (0, *BLOCK_SIZES):
        _refuse(f"threads {entry.threads} in {where}", "0, or a multiple of 64 up to 512")


def _check_algorithm(entry: Entry, where: str, device_type: str, deterministic: bool) -> None:
    """Checks that the algorithm accepts the calls of its entry and returns the same bits as the
    built-in choice."""
    names = extension.tunable_algorithms(entry.op, device_type, entry.symmetric, deterministic)
    if entry.algorithm in names:
        return
    why = "" if entry.symmetric else " of tensors that are not symmetric"
    if deterministic and entry.algorithm in extension.tunable_algorithms(
        entry.op, device_type, entry.symmetric, False
    ):
        why = ", which adds in an order of its own, with deterministic=True"
    _refuse(f"algorithm {entry.algorithm!r} for {entry.op}{why} in {where}", ", ".join(names))


def _check_overlap(entries: list[Entry], source: str) -> None:
    ordered = sorted(entries, key=lambda entry: (*entry.group, entry.from_bytes))
    for one, other in pairwise(ordered):
        if one.group == other.group and one.to_bytes >= other.from_bytes:
            symmetric = "symmetric" if one.symmetric else "not symmetric"
            dtype = "" if one.dtype is None else f"{one.dtype}, "
            _refuse(
                f"two entries for {one.op} ({dtype}{symmetric}) of {other.from_bytes} bytes in "
                f"{source}",
                "ranges that do not overlap",
            )


def _check_place(table: Table, source: str, device: torch.device, world_size: int) -> None:
    """Checks that the table was measured on this kind of machine and with this version. Times of
    others are not valid here."""
    here = new(device, world_size, table.payload_bytes, table.max_blocks, table.date)
    for name in ("collx_version", "device_type", "device", "driver", "world_size"):
        found, accepted = getattr(table, name), getattr(here, name)
        if found != accepted:
            _refuse(f"a table for {name} {found!r} in {source}", repr(accepted))
