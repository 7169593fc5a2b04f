"""Fused normalizations with an epilogue: the function of the rounded row, stored or quantized, has
the bits of the reference in every algorithm, mode, form and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import collx
from collx.epilogues import expression_of

from ..attempt import Attempt, attempt, finish, ones, works
from ..calls import run_calls
from ..check import assert_none, differences
from ..compiling import inductor, require_compiler
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
from ..opcheck import PASSED, opcheck
from ..pool import Pool
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


def _chunks(rank: Rank) -> str:
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
def test_rows_are_counted_over_the_chunks_of_a_fallback(pool: Pool) -> None:
    assert pool.run(_chunks) == [""] * 2


def _another(rank: Rank, epilogues: bool) -> Attempt:
    communicator = rank.new_communicator(f"other-rows-{epilogues}", check=True, timeout=10.0)
    factor = float(rank.rank)
    options: dict[str, Any] = {"epilogue": lambda v: v * factor} if epilogues else {}
    if not epilogues and rank.rank == 0:
        options = {"epilogue": lambda v: v}

    def call() -> None:
        x = ones(rank, 32).view(2, 16)
        collx.allreduce_rmsnorm(x, ones(rank, 16), 1e-6, communicator, **options)
        finish(communicator)

    attempted = attempt(call)
    communicator.destroy()
    return attempted


@pytest.mark.worlds(2)
@pytest.mark.parametrize("epilogues", [True, False])
def test_ranks_with_different_epilogues_are_a_mismatch(pool: Pool, epilogues: bool) -> None:
    """In checked mode; also if some ranks have no epilogue."""
    for attempted in pool.run(_another, epilogues):
        assert attempted.error == "CollectiveMismatch", attempted
        assert "with epilogue " in attempted.message


def _refused(rank: Rank, which: str) -> tuple[Attempt, bool]:
    communicator = rank.communicator()
    x, weight = ones(rank, 12).view(3, 4), ones(rank, 4)
    wanted = ones(rank, 4).requires_grad_()
    calls: dict[str, dict[str, Any]] = {
        "another dtype": {"epilogue": lambda v: v.to(torch.float64)},
        "shape": {"epilogue": bias_relu, "extras": (ones(rank, 5),)},
        "dtype": {"epilogue": bias_relu, "extras": (ones(rank, 4, torch.float64),)},
        "too few": {"epilogue": bias_relu},
        "no function": {"extras": (weight,)},
        "no function, but index": {"index": True},
        "a gradient": {"epilogue": bias_relu, "extras": (wanted,)},
        "an extra as out": {"epilogue": bias_relu, "extras": (x,), "out": x},
        "a random op": {"epilogue": lambda v: v + torch.rand_like(v)},
    }
    options = calls[which]
    attempted = attempt(
        lambda: collx.allreduce_rmsnorm(x * 1, weight, 1e-6, communicator, **options)
    )
    return attempted, works(rank, communicator)


@pytest.mark.worlds(2)
@pytest.mark.parametrize(
    ("which", "kind", "words"),
    [
        ("another dtype", "TypeError", ("expression", "float64", "float32")),
        ("shape", "ValueError", ("extras[0]", "[5]", "[3, 4]")),
        ("dtype", "TypeError", ("extras[0]", "Double", "Float")),
        ("too few", "TypeError", ("epilogue",)),
        ("no function", "ValueError", ("extras", "without epilogue=")),
        ("no function, but index", "ValueError", ("index", "without epilogue=")),
        ("a gradient", "NotImplementedError", ("automatic differentiation",)),
        ("an extra as out", "ValueError", ("extras", "overlaps out", "results")),
        ("a random op", "TypeError", ("rand_like", "accepted")),
    ],
)
def test_a_wrong_epilogue_is_refused(
    pool: Pool, which: str, kind: str, words: tuple[str, ...]
) -> None:
    """By name, before anything is launched, on every rank; all ranks remain usable."""
    for attempted, well in pool.run(_refused, which):
        assert attempted.error == kind, attempted
        for word in ("allreduce_rmsnorm", *words):
            assert word in attempted.message, attempted.message
        assert well


def _compiled(rank: Rank) -> str:
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


@pytest.mark.worlds(2)
def test_compiled_code_gives_the_same(pool: Pool) -> None:
    require_compiler()
    assert pool.run(_compiled) == [""] * 2


def _opchecks(rank: Rank) -> list[Any]:
    name = rank.communicator().name
    x, bias = ones(rank, 32).view(2, 16), ones(rank, 16)
    text = expression_of("allreduce_rmsnorm", bias_relu, torch.float32, 1)
    options = {"expression": text, "extras": [bias]}
    ops = torch.ops.collx
    return [
        opcheck(rank, ops.allreduce_rmsnorm.default, (x, bias, 1e-6, name), options),
        opcheck(rank, ops.allreduce_rmsnorm_fp8.default, (x, bias, 1e-6, name), options),
    ]


@pytest.mark.worlds(1)
def test_the_operators_pass_opcheck(pool: Pool) -> None:
    for found in pool.run(_opchecks):
        assert found == [PASSED] * 2
