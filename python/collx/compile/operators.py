"""Derives from the operators' schemas what torch.compile needs: which operators create new tensors,
and which write to which arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._ops import OpOverload

__all__ = ["LOCAL", "Writing", "making", "out_forms", "writing"]


LOCAL = ("epilogue",)
"""Operators that do not communicate. The compiler treats them as ordinary functions."""


class Writing(NamedTuple):
    """An overload that writes to some of its arguments."""

    op: OpOverload
    written: tuple[str, ...]
    """The written arguments, in the order of the results of `functional`."""
    functional: OpOverload
    """The overload that returns new tensors instead. It has the other arguments of `op`, in the
    same order."""
    in_place: bool
    """Whether `op` also reads the written arguments, so that `functional` has them too."""


def making() -> Iterator[OpOverload]:
    """Yields the overloads that write to no argument. Every overload that communicates is one of
    these, or is replaced by one."""
    for op in _overloads():
        if not _written(op):
            yield op


def writing() -> Iterator[Writing]:
    """Yields the overloads that write to an argument."""
    for op in _overloads():
        if written := _written(op):
            packet, name = op._schema.name.removeprefix("collx::"), op._overloadname
            in_place = packet.endswith("_")
            functional = name.removesuffix("out").removesuffix("_") or "default"
            found = getattr(getattr(torch.ops.collx, packet.removesuffix("_")), functional)
            yield Writing(op, written, found, in_place)


def out_forms() -> dict[OpOverload, Writing]:
    """Maps each overload that creates new tensors to the one that writes into given tensors."""
    return {form.functional: form for form in writing() if not form.in_place}


def _overloads() -> Iterator[OpOverload]:
    """Yields the overloads of all operators that communicate."""
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
