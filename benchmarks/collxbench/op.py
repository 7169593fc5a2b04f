"""What an operator is described by: what a case, a check and a call of it are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

import collx
from collx._extension import extension


class Given(Protocol):
    """What a call's arguments are made from: job.py's Case has it."""

    numel: int
    world: int
    reduce_op: str
    root: int
    comm: collx.Communicator


class Share(Enum):
    """How much of the full tensor a rank's input or output is."""

    WHOLE = "whole"
    PART = "part"
    NONE = "none"


@dataclass(frozen=True)
class Op:
    name: str
    takes: Share
    gives: Share
    expect: Callable[[list[Tensor], str, int], list[Tensor]]
    """Every rank's output, from every rank's input, the reduce op and the root."""
    arguments: Callable[[Given], tuple[Any, ...]]
    """Of collx's operator, behind the input; what has a default is left out."""
    link: Callable[[int, bool], float]
    """What must cross one rank's link in one direction, as a share of the full tensor; from the
    number of ranks, and whether the rank is the root."""
    symmetric_only: str = ""
    """The algorithm that accepts no other tensors."""
    reduces: bool = False
    rooted: bool = False
    divided: bool = False
    """Whether the full tensor is cut into one equal part a rank."""
    result_at_root: bool = False
    """Whether peers give a result on the root alone. collx's is defined on all ranks."""
    symmetric_above: int = 0
    """Bytes up to which collx is no faster on symmetric tensors, and is not measured there."""

    @property
    def operator(self) -> str:
        """collx's name of it."""
        return self.name

    def algorithms(self, multicast: bool = False) -> tuple[str, ...]:
        """Besides "auto". `multicast`: with those that need it."""
        return tuple(extension.algorithms(self.operator, multicast))

    @property
    def has_tensor(self) -> bool:
        return self.takes is not Share.NONE

    def bytes_on_link(self, nbytes: int, world: int, at_root: bool = True) -> float:
        """Of a full tensor of `nbytes`, over the link of the root, which is the busiest, or of
        another rank."""
        return self.link(world, at_root) * nbytes
