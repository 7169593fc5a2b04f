"""The Python function of a collective that is not in the library. It only needs a declaration."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from collx.ops.functions import built_in


@built_in
def reduce_to_everyone(
    input: torch.Tensor,
    reduce_op: str = "sum",
    group: Any = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> Any:
    """Reduces `input` over the ranks. Every rank gets the result."""


if __name__ == "__main__":
    x = torch.empty(3, 5, device="meta")
    assert reduce_to_everyone(x, "max", "nobody", algorithm="direct").shape == x.shape
    assert reduce_to_everyone(x, group="nobody", out=x) is x
    compiled = torch.compile(reduce_to_everyone, fullgraph=True, backend="eager")
    assert compiled(x, "sum", "nobody").shape == x.shape
    print("a built-in function:", inspect.isbuiltin(reduce_to_everyone))
