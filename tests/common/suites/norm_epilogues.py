"""Fused normalizations with an epilogue: the function of the rounded row, stored or quantized, has
the bits of the reference in every algorithm, mode, form and layout."""

from __future__ import annotations

import pytest
import torch

import collx

from ..attempt import ones
from ..calls import run_calls
from ..check import assert_none, differences
from ..compiling import inductor, needs_compiler
from ..epilogues import bias_relu
from ..norms import (
    DTYPES,
    EPILOGUES,
    LIES,
    NAMES,
    STYLES,
    Call,
    algorithms_of,
    calls_of,
    modes_of,
    placements,
    sizes,
)
from ..pool import Pool, on_ranks
from ..rank import Rank
from ..sampling import Factors, every, pairs

LARGEST_INPUT = 1 << 14  # elements
# Run one in this many calls: on GPUs each function, dtype and algorithm needs its own kernel.
SHARE = {"cpu": {1: 6, 2: 2, 3: 5, 8: 30}, "cuda": {1: 8, 2: 5, 3: 9, 8: 25}}
SHARE_SHARED = 40


def _check(pool: Pool, calls: list[Call], key: str = "default") -> None:
    step = SHARE_SHARED if pool.takes_turns else SHARE[pool.world.device][pool.size]
    assert_none(pool.run(run_calls, every(calls, step, pool.size), key))


@pytest.mark.worlds(1, 2, 3, 8)
@pytest.mark.parametrize("op", NAMES)
def test_every_pair_of_options_gives_what_the_reference_gives(pool: Pool, op: str) -> None:
    """Every function with every option of a norm, size, kind of rows and algorithm."""
    factors: Factors = {
        "epilogue": tuple(EPILOGUES),
        "lies": LIES,
        "rows": (0, 1, 2, 7),
        "cols": (1, 8, 100, 384, 4096, 9000, 16384),
        **modes_of(op),
        "style": STYLES,
        "algorithm": algorithms_of(op),
    }
    _check(pool, calls_of(op, pairs(factors, sizes(LARGEST_INPUT)), pool.size))


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", NAMES)
def test_any_placement_and_form_will_do(pool: Pool, op: str) -> None:
    """Misaligned and strided tensors, also extras, between canaries; symmetric inputs; calls that
    do not fit the payload at once."""
    factors: Factors = {
        "epilogue": ("scale_residual", "causal"),
        "lies": LIES,
        "rows": (1, 5, 19),
        "cols": (1, 8, 37, 384, 2080),
        **placements(op),
        "dtype": DTYPES,
    }
    calls = calls_of(op, pairs(factors, sizes(LARGEST_INPUT)), pool.size)
    _check(pool, calls)
    _check(pool, calls[1:], "small")


@pytest.mark.worlds(2)
@on_ranks
def test_rows_are_counted_over_the_chunks_of_a_fallback(rank: Rank) -> str:
    rows, cols = 2100, 4096  # more rows than a fallback gathers at once
    x, weight = ones(rank, rows * cols).view(rows, cols), ones(rank, cols)
    number = torch.arange(float(rows), device=rank.device)[:, None]
    made = collx.allreduce_rmsnorm(
        x,
        weight,
        0.0,
        rank.communicator(),
        epilogue=lambda v, extra, row, column: v * extra - row,
        extras=(number,),
        index=True,
        algorithm="fallback",
    )
    assert isinstance(made, torch.Tensor)
    return differences(made.cpu(), torch.zeros(rows, cols))


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks
def test_compiled_code_gives_the_same(rank: Rank) -> str:
    name = rank.communicator().name
    x, bias = ones(rank, 64).view(4, 16) * (rank.rank + 1), ones(rank, 16) * -0.5

    def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        made = collx.allreduce_rmsnorm(
            x * 2, bias + 2, 1e-6, name, epilogue=bias_relu, extras=(bias,)
        )
        assert isinstance(made, torch.Tensor)
        return made + 1

    want = model(x, bias).cpu()
    with inductor():
        return differences(torch.compile(model, fullgraph=True)(x, bias).cpu(), want)
