"""The properties of the operators that torch.compile needs, from their schemas: which create new
tensors, and which write to which arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._ops import OpOverload

__all__ = ["LOCAL", "Writing", "making", "out_forms", "writing"]


LOCAL = ("epilogue",)
"""Operators that do not communicate: to the compiler functions like any others."""


class Writing(NamedTuple):
    """An overload that writes some of its arguments."""

    op: OpOverload
    written: tuple[str, ...]
    """Those arguments, in the order of the results of `functional`."""
    functional: OpOverload
    """Makes new tensors of what `op` writes; it has the other arguments of `op`, in their order."""
    in_place: bool
    """What is written is read, too: it is an argument of `functional`."""


def making() -> Iterator[OpOverload]:
    """Overloads that write no argument. All that communicates is one of them, or becomes one."""
    for op in _overloads():
        if not _written(op):
            yield op


def writing() -> Iterator[Writing]:
    """All other overloads."""
    for op in _overloads():
        if written := _written(op):
            packet, name = op._schema.name.removeprefix("collx::"), op._overloadname
            in_place = packet.endswith("_")
            functional = name.removesuffix("out").removesuffix("_") or "default"
            found = getattr(getattr(torch.ops.collx, packet.removesuffix("_")), functional)
            yield Writing(op, written, found, in_place)


def out_forms() -> dict[OpOverload, Writing]:
    """By overload that makes new tensors, what writes its results into given ones."""
    return {form.functional: form for form in writing() if not form.in_place}


def _overloads() -> Iterator[OpOverload]:
    """Of what communicates."""
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = full.partition("::")
        if namespace == "collx":
            packet, _, overload = name.partition(".")
            if packet in LOCAL:
                continue
            yield getattr(getattr(torch.ops.collx, packet), overload or "default")


def _written(op: OpOverload) -> tuple[str, ...]:
    given = op._schema.arguments
    return tuple(a.name for a in given if a.alias_info is not None and a.alias_info.is_write)
