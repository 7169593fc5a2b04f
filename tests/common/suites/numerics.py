"""The numeric contract: every algorithm gives the bits of the reference, wherever tensors lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ..cases import (
    ALGORITHMS,
    FORMS,
    LAYOUTS,
    SYMMETRIC,
    Case,
    border_sizes,
    every_dtype_and_op,
    legal,
    sampled,
)
from ..check import assert_none, run_cases
from ..pool import Pool
from ..sampling import note
from ..values import DTYPES, REDUCE_OPS, legal_ops

EVERY = ("auto", *ALGORITHMS)


SHARED_BUDGET = {1: 100, 2: 24, 3: 12, 4: 12, 8: 8}


def check(pool: Pool, cases: Iterable[Case], key: str = "default", budget: int = 600) -> None:
    """Checks the cases on all ranks; fewer of them where each takes long."""
    if pool.shared:
        budget = min(budget, SHARED_BUDGET[pool.size])
    elif pool.world.device == "cpu":
        budget = max(30, budget // max(1, pool.size - 1))
    everything = list(cases)
    chosen = sampled(everything, budget)
    note(len(chosen), len(everything))
    assert_none(pool.run(run_cases, chosen, key))


@pytest.mark.parametrize("algorithm", EVERY)
def test_every_dtype_and_op_gives_the_bits_of_the_reference(pool: Pool, algorithm: str) -> None:
    """Numeric contract: one algorithm, all dtypes and reduce ops, a few sizes."""
    check(pool, every_dtype_and_op(algorithm, (1, 7, 1000, 4099)))


@pytest.mark.parametrize("algorithm", EVERY)
def test_sizes_around_every_border(pool: Pool, algorithm: str) -> None:
    """Hazard 19: sizes 0, 1, odd, and around the borders of vectors, tiles and parts."""
    cases = [
        legal(Case(dtype, "sum", size, algorithm, seed=size))
        for dtype in ("float32", "bfloat16", "float64", "uint8")
        for size in border_sizes(dtype, pool.size)
    ]
    check(pool, cases)


@pytest.mark.parametrize("algorithm", EVERY)
def test_calls_larger_than_the_payload_run_in_chunks(pool: Pool, algorithm: str) -> None:
    """Hazard 17: a communicator with the smallest payload carries any size."""
    # On CPU the smallest slot is one line, so these are hundreds of chunks: a change of process
    # for each of them where ranks outnumber the cores.
    largest = 30_001 if pool.size <= 2 and not pool.shared else 6001
    sizes = (1000, largest) if pool.shared else (1, 1000, 4096, largest)
    cases = [
        legal(Case(dtype, op, size, algorithm, seed=size, style="bits"))
        for size, (dtype, op) in itertools.product(
            sizes, zip(DTYPES, itertools.cycle(("sum", "max", "prod", "min")))
        )
    ]
    check(pool, cases, key="small", budget=200)


@pytest.mark.parametrize("algorithm", EVERY)
def test_sixteen_bit_patterns_all_pass(pool: Pool, algorithm: str) -> None:
    """Hazard 14: each of the 65,536 patterns, the armed word of a slot among them, arrives."""
    cases = [
        legal(Case(dtype, op, 1 << 16, algorithm, style=style, seed=3))
        for dtype in ("float16", "bfloat16")
        for op in ("sum", "max", "min", "prod", "avg")
        for style in ("patterns",)
    ]
    check(pool, cases, budget=60)


@pytest.mark.parametrize("algorithm", EVERY)
def test_payload_of_ones_and_special_values_arrive(pool: Pool, algorithm: str) -> None:
    """Hazard 14: -1, bytes 255, NaNs of every kind, infinities, subnormals, signed zeros."""
    cases = [
        legal(Case(dtype, op, size, algorithm, style=style, seed=size))
        for dtype in DTYPES
        for op in legal_ops(dtype)
        for size, style in ((1, "ones"), (1025, "ones"), (511, "special"), (300, "ones"))
    ]
    check(pool, cases)


@pytest.mark.parametrize("algorithm", EVERY)
def test_any_alignment_of_input_and_output(pool: Pool, algorithm: str) -> None:
    """Hazard 19: views that start at any element, inputs and outputs differently."""
    cases = [
        legal(
            Case(
                dtype,
                "sum",
                size,
                algorithm,
                input_offset=a,
                output_offset=b,
                symmetric=symmetric,
                seed=a + b,
            )
        )
        for dtype in ("uint8", "bfloat16", "float32", "int64")
        for size in (5, 1030)
        for a, b in ((0, 1), (1, 0), (1, 1), (3, 7), (15, 2))
        for symmetric in ("none", "both")
    ]
    check(pool, cases, budget=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_input_and_output(pool: Pool, layout: str) -> None:
    """Transposed, sliced, spread and 0-dimensional tensors, in every form of the op."""
    sizes = (1,) if layout == "scalar" else (0, 1, 24, 1000)
    cases = [
        legal(Case(dtype, "sum", size, algorithm, form, layout=layout, output_layout=other))
        for dtype in ("float32", "int8")
        for size in sizes
        for algorithm in ("auto", "twoshot_push")
        for form in FORMS
        for other in (layout, "contiguous")
    ]
    check(pool, cases, budget=200)


@pytest.mark.parametrize("symmetric", SYMMETRIC)
def test_symmetric_and_ordinary_tensors_mix(pool: Pool, symmetric: str) -> None:
    """Zero copy where both are registered, staged where not: the same bits."""
    cases = [
        legal(Case(dtype, "sum", size, algorithm, form, symmetric=symmetric, seed=size))
        for dtype in ("float32", "bfloat16", "int32")
        for size in (1, 1000, 40_000)
        for algorithm in EVERY
        for form in FORMS
        if algorithm != "pull_push" or symmetric == "both"
    ]
    check(pool, cases, budget=200)


@pytest.mark.parametrize("algorithm", EVERY)
def test_max_blocks_changes_from_call_to_call(pool: Pool, algorithm: str) -> None:
    """Hazard 4: tiles keep their epochs although other blocks serve them."""
    cases = [
        legal(Case("float32", "sum", size, algorithm, max_blocks=blocks, seed=index))
        for index, (blocks, size) in enumerate(
            itertools.product((1, 2, 0, 3, 1, 7, 64), (20_000, 5, 1500))
        )
    ]
    check(pool, cases, budget=100)
    check(pool, [replace(case, dtype="int32") for case in cases], budget=100)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_cross_product(pool: Pool, algorithm: str, dtype: str) -> None:
    """Every op, size, style, offset and symmetry of a dtype and an algorithm."""
    cases = [
        legal(
            Case(
                dtype,
                op,
                size,
                algorithm,
                form,
                style,
                input_offset=offset,
                output_offset=2 * offset,
                symmetric=symmetric,
                seed=size,
            )
        )
        for op in REDUCE_OPS
        if op in legal_ops(dtype)
        for size in border_sizes(dtype, pool.size)
        for form in FORMS
        for style in ("random", "bits", "special")
        for offset in (0, 1)
        for symmetric in ("none", "both")
    ]
    check(pool, cases, budget=3000)
