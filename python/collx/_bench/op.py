"""Descriptions of operators, from which cases, checks and calls are created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

import collx
from collx._extension import extension


class Given(Protocol):
    """The values from which a call's arguments are computed, such as Case in job.py."""

    numel: int
    world: int
    reduce_op: str
    root: int
    comm: collx.Communicator


class Share(Enum):
    """The share of the full tensor that a rank's input or output is."""

    WHOLE = "whole"
    PART = "part"
    NONE = "none"


@dataclass(frozen=True)
class Op:
    name: str
    takes: Share
    gives: Share
    expect: Callable[[list[Tensor], str, int], list[Tensor]]
    """Computes the outputs of all ranks from their inputs, the reduce op and the root."""
    arguments: Callable[[Given], tuple[Any, ...]]
    """Returns the arguments of collx's operator after the input, without those that have a
    default."""
    link: Callable[[int, bool], float]
    """Returns the share of the full tensor that must cross a rank's link in one direction. The
    arguments are the number of ranks and whether the rank is the root."""
    symmetric_only: str = ""
    """The algorithm that only accepts symmetric tensors."""
    reduces: bool = False
    rooted: bool = False
    divided: bool = False
    """Whether the full tensor is divided into equal parts, one for each rank."""
    result_at_root: bool = False
    """Whether only the root has a result with the peers. collx has a result on all ranks."""
    symmetric_above: int = 0
    """The size in bytes up to which symmetric tensors are not faster and are not measured."""

    @property
    def operator(self) -> str:
        """The name of the operator in collx."""
        return self.name

    def algorithms(self, multicast: bool = False) -> tuple[str, ...]:
        """Returns the algorithms other than "auto". `multicast`: includes those that need
        multicast."""
        return tuple(extension.algorithms(self.operator, multicast))

    @property
    def has_tensor(self) -> bool:
        return self.takes is not Share.NONE

    def bytes_on_link(self, nbytes: int, world: int, at_root: bool = True) -> float:
        """Returns the bytes that cross the link of the root, which is the busiest, or of another
        rank, for a full tensor of `nbytes`."""
        return self.link(world, at_root) * nbytes
