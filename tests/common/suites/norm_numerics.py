"""Every fused normalization has the bits of the reference in every mode, size and algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ..norms import (
    COLS,
    DTYPES,
    LARGEST,
    NAMES,
    ROUNDINGS,
    ROWS,
    SCALES,
    STYLES,
    Call,
    algorithms_of,
    calls_of,
    modes_of,
    outputs_of,
    placements,
    quantizes,
    sizes,
)
from ..pool import Pool
from ..replay import check_calls
from ..sampling import Factors, every, pairs

pytestmark = pytest.mark.alone  # clusters of blocks

QUANTIZING = tuple(op for op in NAMES if quantizes(op))
SMALL_ROWS = (0, 1, 2, 7)
LARGEST_INPUT = 1 << 15  # elements, except in the full cross-products
# One in this many calls is made where ranks outnumber cores or share a GPU. Worlds of different
# sizes make different calls.
SHARE = {2: 1, 3: 3, 4: 4, 8: 10}
SHARE_OF_GPUS = {2: 1, 3: 1, 4: 1, 8: 2}
SHARE_SHARED = {2: 30, 3: 40, 4: 40, 8: 60}


def share_of(pool: Pool, calls: Sequence[Call]) -> list[Call]:
    """Returns the calls that this world makes, at least one."""
    own = SHARE_OF_GPUS if pool.world.device == "cuda" else SHARE
    step = (SHARE_SHARED if pool.takes_turns else own)[pool.size]
    return every(calls, step, pool.size)


def check(pool: Pool, calls: Sequence[Call], key: str = "default") -> None:
    """Checks this world's share of the calls on all ranks."""
    check_calls(pool, share_of(pool, calls), key)


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("op", NAMES)
def test_every_pair_of_options_gives_what_the_reference_gives(pool: Pool, op: str) -> None:
    """All dtypes, roundings, scales and other options, kinds of rows, algorithms, and sizes up to
    the widest rows; equal bits on every rank."""
    factors: Factors = {
        "rows": SMALL_ROWS,
        "cols": COLS,
        **modes_of(op),
        "style": STYLES,
        "algorithm": algorithms_of(op),
    }
    check(pool, calls_of(op, pairs(factors, sizes(LARGEST_INPUT)), pool.size))


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("op", NAMES)
def test_any_placement_and_form_will_do(pool: Pool, op: str) -> None:
    """Hazards 15, 19 and 20: misaligned and strided tensors, poisoned outputs between canaries,
    surrounding memory full of NaN, symmetric inputs, any number of blocks."""
    factors: Factors = {
        "rows": (1, 5, 9),
        "cols": (1, 8, 37, 384, 2080),
        **placements(op),
        "dtype": DTYPES,
        "style": ("random", "rows"),
    }
    if quantizes(op):
        factors["scale"] = SCALES[::2]
        factors["keep_norm"] = (False, True)
    check(pool, calls_of(op, pairs(factors, sizes(LARGEST_INPUT)), pool.size))


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("op", NAMES)
def test_all_algorithms_give_the_same_bits(pool: Pool, op: str) -> None:
    """Each algorithm on the same rows, with more and with fewer rows than ranks."""
    calls = [
        Call(
            op, dtype, rows, 384, style="rows", algorithm=algorithm, keep_norm=True, seed=3
        ).legal()
        for dtype, rows in itertools.product(DTYPES, (1, 18))
        for algorithm in algorithms_of(op)
    ]
    check_calls(pool, every(calls, 8 if pool.takes_turns else 1, pool.size))


@pytest.mark.worlds(2, 3, 8)
@pytest.mark.parametrize("op", NAMES)
def test_calls_larger_than_the_payload_run_in_chunks_of_it(pool: Pool, op: str) -> None:
    """Hazard 17: a communicator with the smallest payload carries any number of rows, and rows
    larger than the payload."""
    factors: Factors = {
        "rows": (1, 3, 19),
        "cols": (8, 384, 2048, 9000),
        "algorithm": algorithms_of(op),
        "dtype": DTYPES,
        "style": ("random", "rows", "ones"),
    }
    if quantizes(op):
        factors["scale"] = SCALES[::2]
        factors["keep_norm"] = (False, True)
    check(pool, calls_of(op, pairs(factors, sizes(20_000)), pool.size), "small")


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("op", NAMES)
def test_no_result_is_taken_for_an_armed_word(pool: Pool, op: str) -> None:
    """Hazard 14: rows that quantize to -1 only (all bits set, in int8), and rows, scales and
    residuals that are all NaN."""
    base = {"rows": 9, "cols": 384, "keep_norm": True}
    minus = {**base, "dtype": "float32", "style": "minus", "eps": 0.0, "given": 1.0}
    nan = {**base, "dtype": "bfloat16", "style": "ones"}
    combinations = [
        {**one, "scale": scale, "algorithm": algorithm}
        for algorithm in algorithms_of(op)
        for scale in (SCALES if quantizes(op) else SCALES[:1])
        for one in (minus, nan)
    ]
    calls = calls_of(op, combinations)
    # 7 is coprime to 2 and to the number of scales, so all of them occur.
    check_calls(pool, every(calls, 43 if pool.takes_turns else (1, 1, 1, 3, 7)[pool.size]))


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", QUANTIZING)
def test_bounds_of_scales_are_exact(pool: Pool, op: str) -> None:
    """The largest magnitude below, at and above scale_ub, and scales without a reciprocal."""
    # y equals the gain, so its largest magnitude is known.
    exact = {"style": "constant", "eps": 0.0, "dtype": "float32", "rows": 3, "cols": 256}
    tiny = {"style": "tiny", "weights": "float32", "dtype": "float32", "rows": 3, "cols": 256}
    combinations = [
        {**exact, "scale_ub": bound, **scale, **mode}
        for bound in (LARGEST, 2.4999998, 2.5000002, 0.0, 1e-37)
        for scale in ({}, {"ue8m0": True})
        for mode in ({}, {"scale_mode": "group", "quant_group_size": 64})
    ]
    combinations += [{**tiny, "scale": scale} for scale in SCALES]
    combinations += [{**tiny, "scale": scale, "dtype": "float16"} for scale in SCALES]
    calls = calls_of(op, combinations)
    check_calls(pool, every(calls, 12 if pool.takes_turns else 1))


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("op", NAMES)
def test_every_kind_of_row_in_every_rounding(pool: Pool, op: str) -> None:
    """Rows of zeros, infinity, NaN, subnormals, overflow and a single value, with and without eps;
    one row of each kind."""
    combinations = [
        {"dtype": dtype, "rounding": rounding, "eps": eps, "algorithm": algorithm}
        for (dtype, rounding), algorithm in zip(
            itertools.product(DTYPES, ROUNDINGS), itertools.cycle(algorithms_of(op)), strict=False
        )
        for eps in (0.0, 1e-6)
    ]
    base = {"style": "rows", "rows": 18, "cols": 96, "keep_norm": True}
    calls = calls_of(op, [{**base, **combination} for combination in combinations])
    check_calls(pool, every(calls, 9 if pool.takes_turns else 1, pool.size))


# --- Full cross-product.

FULL_ELEMENTS = 4096  # the cross-product covers inputs up to this size
JOB = 400  # calls per job
SHAPES = tuple(itertools.product(ROWS, COLS))


@pytest.mark.full
@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", NAMES)
def test_full_cross_product_of_small_sizes(pool: Pool, op: str, dtype: str, rounding: str) -> None:
    """Every mode with every size up to 4,096 elements; styles and placements rotate."""
    factors: Factors = {**modes_of(op), "dtype": (dtype,), "rounding": (rounding,), "eps": (1e-6,)}
    if "weight_offset" in factors:
        factors["weight_offset"] = (0.0, 1.0)
    modes = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    fitting = [(rows, cols) for rows, cols in SHAPES if rows * cols <= FULL_ELEMENTS]
    combinations = [
        {**mode, "rows": rows, "cols": cols} for mode in modes for rows, cols in fitting
    ]
    turns = pairs({"style": STYLES, **placements(op)})
    calls = [
        replace(call, seed=number % 7 + 1, **turns[number % len(turns)]).legal()
        for number, call in enumerate(calls_of(op, combinations))
    ]
    calls = every(calls, 200 if pool.takes_turns else 1)
    for start in range(0, len(calls), JOB):
        check_calls(pool, calls[start : start + JOB])


@pytest.mark.full
@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("op", NAMES)
def test_full_sizes_above_are_covered_in_pairs(pool: Pool, op: str) -> None:
    """Every size above 4,096 elements with every value of every option; worlds with many ranks
    test a share of them."""
    shapes = [{"rows": rows, "cols": cols} for rows, cols in SHAPES if rows * cols > FULL_ELEMENTS]
    factors: Factors = {"shape": shapes, **modes_of(op), "style": STYLES, **placements(op)}

    def allowed(fields: dict[str, object]) -> bool:
        shape, scale = fields.get("shape"), fields.get("scale")
        if not isinstance(shape, dict) or not isinstance(scale, dict):
            return True
        return scale.get("scale_mode") != "group" or shape["cols"] % scale["quant_group_size"] == 0

    calls = [
        # An arena holds this many elements, spread over twice the memory.
        replace(call, symmetric=call.symmetric if call.rows * call.cols <= 1 << 17 else "none")
        for call in calls_of(op, pairs(factors, allowed), pool.size)
    ]
    calls = share_of(pool, calls)
    for start in range(0, len(calls), 20):
        check_calls(pool, calls[start : start + 20])


def test_every_output_has_a_name() -> None:
    """The names are in the order of the results."""
    assert outputs_of("allreduce_residual_rmsnorm_fp8", True) == (
        "q_out",
        "scale_out",
        "residual_out",
        "norm_out",
    )
    assert outputs_of("allreduce_layernorm") == ("out",)
