"""torch.library.opcheck for collective operators."""

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
    """Returns the outcomes of the checks on this rank. Collective. The ranks run check by check, so
    a rank that finds an error does not leave the others waiting in the next check."""
    found = {}
    for check in checks:
        result = torch.library.opcheck(
            overload, tuple(arguments), options or {}, test_utils=check, raise_exception=False
        )
        rank.barrier()
        found[check] = str(result[check])
    return found
