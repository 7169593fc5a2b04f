"""The numeric contract: every algorithm gives the bits of the reference, wherever tensors lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ..check import assert_none
from ..family_cases import (
    OPS,
    SYMMETRIC,
    Call,
    Shape,
    border_shapes,
    dtypes_and_ops,
    legal,
)
from ..family_check import run_calls
from ..pool import Pool
from ..sampling import sampled
from ..values import DTYPES, REDUCE_OPS, legal_ops

EVERY = ("auto", *OPS["allreduce"].algorithms)
FORMS = OPS["allreduce"].forms
STYLES = ("random", "bits", "special")
LAYOUTS = ("contiguous", "transposed", "sliced", "spread")
SHAPES: tuple[Shape, ...] = ((), (0,), (1,), (8, 3), (8, 125), (2, 3, 4))

SHARED_BUDGET = {1: 100, 2: 24, 3: 12, 4: 12, 8: 8}


def call(dtype: str, reduce_op: str, size: int | Shape, algorithm: str, **more: Any) -> Call:
    """An all-reduce of random values of one dimension, if it is not said otherwise."""
    shape = (size,) if isinstance(size, int) else size
    fields = {"style": "random", "reduce_op": reduce_op, **more}
    return legal(Call("allreduce", dtype, shape, algorithm, **fields))


def check(pool: Pool, calls: Iterable[Call], key: str = "default", budget: int = 600) -> None:
    """Makes the calls on all ranks; fewer of them where each takes long."""
    if pool.takes_turns:
        budget = min(budget, SHARED_BUDGET[pool.size])
    elif pool.world.device == "cpu":
        # Every rank hands a core over to every other one.
        budget = max(5, budget // max(2, 2 * pool.size - 2, pool.size**2 // 3))
    assert_none(pool.run(run_calls, sampled(list(calls), budget), key))


@pytest.mark.parametrize("algorithm", EVERY)
def test_every_dtype_and_op_gives_the_bits_of_the_reference(pool: Pool, algorithm: str) -> None:
    """Numeric contract: one algorithm, all dtypes and reduce ops, a few sizes."""
    calls = [
        call(
            reduce_op=fields["reduce_op"],
            dtype=fields["dtype"],
            size=size,
            algorithm=algorithm,
            style=STYLES[count % 3],
            seed=count + 1,
        )
        for count, (fields, size) in enumerate(
            itertools.product(dtypes_and_ops("allreduce"), (1, 7, 1000, 4099))
        )
    ]
    check(pool, calls)


@pytest.mark.parametrize("algorithm", EVERY)
def test_sizes_around_every_border(pool: Pool, algorithm: str) -> None:
    """Hazard 19: sizes 0, 1, odd, and around the borders of vectors, tiles and parts."""
    shapes = border_shapes(("float32", "bfloat16", "float64", "uint8"), pool.size)
    calls = [
        call(fields["dtype"], "sum", fields["shape"], algorithm, seed=number)
        for number, fields in enumerate(shapes)
    ]
    check(pool, calls)


@pytest.mark.parametrize("algorithm", EVERY)
def test_calls_larger_than_the_payload_run_in_chunks(pool: Pool, algorithm: str) -> None:
    """Hazard 17: a communicator with the smallest payload carries any size."""
    # On CPU the smallest slot is one line, so these are hundreds of chunks: a change of process
    # for each of them where ranks outnumber the cores.
    largest = 30_001 if pool.size <= 2 and not pool.takes_turns else 6001
    sizes = (1000, largest) if pool.takes_turns else (1, 1000, 4096, largest)
    calls = [
        call(dtype, op, size, algorithm, seed=size, style="bits")
        for size, (dtype, op) in itertools.product(
            sizes, zip(DTYPES, itertools.cycle(("sum", "max", "prod", "min")))
        )
    ]
    check(pool, calls, key="small", budget=200)


@pytest.mark.parametrize("algorithm", EVERY)
def test_sixteen_bit_patterns_all_pass(pool: Pool, algorithm: str) -> None:
    """Hazard 14: each of the 65,536 patterns, the armed word of a slot among them, arrives."""
    calls = [
        call(dtype, op, 1 << 16, algorithm, style="patterns", seed=3)
        for dtype in ("float16", "bfloat16")
        for op in REDUCE_OPS
    ]
    check(pool, calls, budget=60)


@pytest.mark.parametrize("algorithm", EVERY)
def test_payload_of_ones_and_special_values_arrive(pool: Pool, algorithm: str) -> None:
    """Hazard 14: -1, bytes 255, NaNs of every kind, infinities, subnormals, signed zeros."""
    calls = [
        call(dtype, op, size, algorithm, style=style, seed=size)
        for dtype in DTYPES
        for op in legal_ops(dtype)
        for size, style in ((1, "ones"), (1025, "ones"), (511, "special"), (300, "ones"))
    ]
    check(pool, calls)


@pytest.mark.parametrize("algorithm", EVERY)
def test_any_alignment_of_input_and_output(pool: Pool, algorithm: str) -> None:
    """Hazard 19: views that start at any element, inputs and outputs differently."""
    calls = [
        call(
            dtype,
            "sum",
            size,
            algorithm,
            input_offset=a,
            output_offset=b,
            symmetric=symmetric,
            seed=a + b,
        )
        for dtype in ("uint8", "bfloat16", "float32", "int64")
        for size in (5, 1030)
        for a, b in ((0, 1), (1, 0), (1, 1), (3, 7), (15, 2))
        for symmetric in ("none", "both")
    ]
    check(pool, calls, budget=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_input_and_output(pool: Pool, layout: str) -> None:
    """Transposed, sliced, spread and 0-dimensional tensors, in every form of the op."""
    calls = [
        call(dtype, "sum", shape, algorithm, form=form, layout=layout, output_layout=other)
        for dtype in ("float32", "int8")
        for shape in SHAPES
        for algorithm in ("auto", "twoshot_push")
        for form in FORMS
        for other in (layout, "contiguous")
    ]
    check(pool, calls, budget=400)


@pytest.mark.parametrize("symmetric", SYMMETRIC)
def test_symmetric_and_ordinary_tensors_mix(pool: Pool, symmetric: str) -> None:
    """Zero copy where both are registered, staged where not: the same bits."""
    calls = [
        call(dtype, "sum", size, algorithm, form=form, symmetric=symmetric, seed=size)
        for dtype in ("float32", "bfloat16", "int32")
        for size in (1, 1000, 40_000)
        for algorithm in EVERY
        for form in FORMS
        if algorithm != "pull_push" or symmetric == "both"
    ]
    check(pool, calls, budget=400)


@pytest.mark.parametrize("algorithm", EVERY)
def test_max_blocks_changes_from_call_to_call(pool: Pool, algorithm: str) -> None:
    """Hazard 4: tiles keep their epochs although other blocks serve them."""
    calls = [
        call("float32", "sum", size, algorithm, max_blocks=blocks, seed=index)
        for index, (blocks, size) in enumerate(
            itertools.product((1, 2, 0, 3, 1, 7, 64), (20_000, 5, 1500))
        )
    ]
    check(pool, calls, budget=100)
    check(pool, [replace(one, dtype="int32") for one in calls], budget=100)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_cross_product(pool: Pool, algorithm: str, dtype: str) -> None:
    """Every op, size, style, offset and symmetry of a dtype and an algorithm."""
    calls = [
        call(
            dtype,
            op,
            fields["shape"],
            algorithm,
            form=form,
            style=style,
            input_offset=offset,
            output_offset=2 * offset,
            symmetric=symmetric,
            seed=number,
        )
        for op in legal_ops(dtype)
        for number, fields in enumerate(border_shapes((dtype,), pool.size))
        for form in FORMS
        for style in STYLES
        for offset in (0, 1)
        for symmetric in ("none", "both")
    ]
    check(pool, calls, budget=6000)
