"""torch.library.opcheck for operators that are collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .rank import Rank

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
PASSED = dict.fromkeys(OPCHECKS, "SUCCESS")


def opcheck(
    rank: Rank,
    overload: torch._ops.OpOverload,
    arguments: Sequence[Any],
    options: dict[str, Any] | None = None,
    checks: Sequence[str] = OPCHECKS,
) -> dict[str, str]:
    """The checks and their outcomes on this rank. Collective: check by check, so that a rank that
    finds something wrong does not leave the others waiting in the next one."""
    found = {}
    for check in checks:
        result = torch.library.opcheck(
            overload, tuple(arguments), options or {}, test_utils=check, raise_exception=False
        )
        rank.barrier()
        found[check] = str(result[check])
    return found
