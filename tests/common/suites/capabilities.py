"""If one rank's device lacks a capability, no rank uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from ..attempt import works
from ..pool import on_ranks
from ..rank import Rank
from .voting import instead_of_step


def _without(name: str) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """Returns a replacement for the step in which devices report their capabilities: one capability
    is missing."""
    return lambda setup, original: {**original(setup), name: 0}


@pytest.mark.worlds(2)
@on_ranks
def test_dependent_launch_is_off_unless_all_ranks_have_it(rank: Rank) -> None:
    """Hazard 5: the last rank's device lacks it, so no rank uses it, whatever is requested."""
    poor = rank.rank == rank.size - 1
    with instead_of_step("blocks", _without("dependent launch")) if poor else nullcontext():
        communicator = rank.new_communicator("no-dependent-launch", pdl="end")
    found = [communicator.explain("allreduce", 1000).pdl]
    with communicator.set_pdl("early"):
        found.append(communicator.explain("allreduce", 1000).pdl)
    fine = works(rank, communicator)
    communicator.destroy()
    assert (fine, found) == (True, ["off", "off"])
