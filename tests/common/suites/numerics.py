"""Every collective returns the bits of the reference, in every algorithm and dtype: copies keep all
bytes, and reductions follow the numeric contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import pytest

from ..calls import Fields
from ..collectives import (
    NAMES,
    OPS,
    ROOTED,
    SPLITS,
    STYLES,
    SYMMETRIC,
    WITH_AXIS,
    WITH_SPLITS,
    Call,
    border_shapes,
    dtypes_and_ops,
)
from ..operators import ways
from ..pool import Pool
from ..replay import check_calls
from ..sampling import each, note, spread
from ..values import PACKED, REDUCE_OPS

# Calls per collective and algorithm. Each call takes long where ranks outnumber cores or share a
# GPU. Worlds and algorithms draw different samples, which together cover everything. All-reduces
# make WEIGHT times as many calls: most other operators are built on their kernels.
BUDGET = {1: 16, 2: 20, 3: 12, 4: 9, 8: 4, 16: 2}
BUDGET_OF_GPUS = {1: 24, 2: 24, 3: 16, 4: 16, 8: 12}
BUDGET_SHARED = {1: 24, 2: 2, 3: 1, 4: 1, 8: 1}

WEIGHT = {"allreduce": 4}

EVEN_AND_NOT = each("uneven", (False, True))
LAYOUTS = ("natural", "transposed", "sliced", "spread")

every_way = pytest.mark.parametrize(("op", "algorithm"), ways(*NAMES))


def check(
    pool: Pool,
    op: str,
    algorithm: str,
    *dimensions: Sequence[Fields],
    key: str = "default",
    count: int = 0,
) -> None:
    """Checks a sample of the combinations on all ranks; `count`, if given, is its size."""
    own = BUDGET_OF_GPUS if pool.world.device == "cuda" else BUDGET
    budget = WEIGHT.get(op, 1) * (BUDGET_SHARED if pool.takes_turns else own)[pool.size]
    seed = crc32(f"{pool.world} {op} {algorithm} {[len(values) for values in dimensions]}".encode())
    calls = [
        Call(op, **{"algorithm": algorithm, "seed": number + 1, **fields}).legal()
        for number, fields in enumerate(spread(count or budget, seed, *dimensions))
    ]
    note(len(calls), math.prod(map(len, dimensions)))
    check_calls(pool, calls, key)


def sizes(*numels: int) -> list[Fields]:
    return each("shape", [(numel,) for numel in numels])


def forms(op: str) -> list[Fields]:
    return each("form", OPS[op].forms)


@every_way
def test_every_dtype_and_op_gives_what_the_reference_gives(
    pool: Pool, op: str, algorithm: str
) -> None:
    """Copying ops with every PyTorch dtype, reductions with every dtype and reduce op."""
    check(
        pool,
        op,
        algorithm,
        dtypes_and_ops(op),
        sizes(1, 7, 1000, 2051),
        each("style", ("random", *STYLES)),
    )


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", [name for name in NAMES if not OPS[name].reduces])
def test_a_dtype_that_pytorch_can_only_copy_is_moved(pool: Pool, op: str) -> None:
    """Two elements per byte: no PyTorch kernel supports this dtype."""
    check(pool, op, "auto", each("dtype", (PACKED,)), sizes(1, 4001), count=2)


@pytest.mark.worlds(2, 3, 4, 8)
@every_way
def test_sizes_around_every_border_arrive(pool: Pool, op: str, algorithm: str) -> None:
    """Hazard 19: 0, 1, odd sizes, and around the borders of vectors, groups, tiles and parts."""
    borders = border_shapes(OPS[op].dtypes, pool.size)
    check(pool, op, algorithm, borders, each("style", ("bits", "armed")), EVEN_AND_NOT)


@pytest.mark.worlds(2, 3, 8)
@every_way
def test_calls_larger_than_the_payload_run_in_chunks_of_it(
    pool: Pool, op: str, algorithm: str
) -> None:
    """Hazard 17: a communicator with the smallest payload carries any size."""
    # On CPU the smallest slot is one cache line, so these are hundreds of chunks, and each needs a
    # context switch where ranks outnumber the cores.
    largest = 30_001 if pool.size <= 2 and not pool.takes_turns else 4001
    share = pool.size if OPS[op].widens else 1
    numels = sizes(*(-(-numel // share) for numel in (1, 600, largest // 3, largest)))
    styles, splits = each("style", ("bits", "armed")), each("splits", SPLITS)
    check(pool, op, algorithm, dtypes_and_ops(op), numels, styles, splits, key="small")


@pytest.mark.worlds(2, 3, 4)
@every_way
def test_no_payload_is_taken_for_an_armed_word(pool: Pool, op: str, algorithm: str) -> None:
    """Hazard 14: tensors of -1 and of bytes 255, every 16-bit pattern, and words that equal those
    of slots or flags, alone and in runs longer than a group."""
    # With many ranks, the ranks together send all patterns.
    each_sends = (1 << 16) // (pool.size if OPS[op].widens and pool.size > 4 else 1)
    patterns = [
        {**kind, "shape": (each_sends,), "style": "patterns"}
        for kind in dtypes_and_ops(op)
        if kind["dtype"] in ("float16", "bfloat16", "int16")
    ]
    words = [
        {"dtype": dtype, "shape": (size,), "style": style}
        for dtype in ("float32", "int32", "float64", "int64", "bfloat16", "int8", "uint8")
        for size in (1, 31 * 4, 1025, 4096 + 3)
        for style in ("ones", "armed")
    ]
    check(pool, op, algorithm, words)
    check(pool, op, algorithm, patterns, count=len(patterns) if pool.size <= 2 else 1)


@pytest.mark.worlds(1, 2, 3, 4)
@every_way
def test_any_alignment_of_input_and_output_will_do(pool: Pool, op: str, algorithm: str) -> None:
    """Hazard 19: views that start at any element; input and output offsets differ."""
    starts = each("input_offset", range(17)), each("output_offset", range(17))
    dtypes = each("dtype", ("uint8", "bfloat16", "float32", "int64"))
    symmetric = each("symmetric", ("none", "both"))
    check(pool, op, algorithm, *starts, dtypes, sizes(5, 126, 1030, 9001), symmetric, forms(op))


@pytest.mark.worlds(1, 2, 4, 8)
@every_way
def test_symmetric_tensors_mix_with_ordinary_ones(pool: Pool, op: str, algorithm: str) -> None:
    """Symmetric input, output, both or none: the same result in every form."""
    dtypes = each("dtype", ("float32", "bfloat16", "uint8"))
    symmetric = each("symmetric", SYMMETRIC)
    check(pool, op, algorithm, symmetric, forms(op), dtypes, sizes(1, 1000, 9001))


@pytest.mark.worlds(2, 3, 4)
@every_way
def test_another_number_of_blocks_serves_the_same_tiles(
    pool: Pool, op: str, algorithm: str
) -> None:
    """Hazard 4: tiles keep their epochs when other blocks serve them."""
    blocks = each("max_blocks", (1, 2, 0, 3, 7, 64))
    check(pool, op, algorithm, blocks, sizes(20_000 // pool.size, 5, 1500), EVEN_AND_NOT)


@pytest.mark.parametrize(("op", "algorithm"), ways(*WITH_AXIS))
def test_any_axis_may_be_divided(pool: Pool, op: str, algorithm: str) -> None:
    """Even and uneven parts, fewer elements than ranks, along any axis counted from either end."""
    shapes = (5, 7, 3), (48, 33), (1, 130, 4), (3, 2, 16, 5), (2, 0, 3), (1, 1000), (9, 515)
    axes = [
        {"shape": shape, "axis": axis}
        for shape in shapes
        for axis in range(-len(shape), len(shape))
    ]
    dtypes = each("dtype", ("float32", "int8", "bfloat16", "int64"))
    check(pool, op, algorithm, axes, dtypes, EVEN_AND_NOT, forms(op))


@pytest.mark.parametrize(("op", "algorithm"), ways(*ROOTED))
def test_any_rank_may_be_the_root(pool: Pool, op: str, algorithm: str) -> None:
    """Each root in turn, with sizes that the algorithms divide differently."""
    roots = each("root", range(pool.size))
    shapes = each("shape", ((1,), (7, 3), (1030,), (96, 50)))
    check(pool, op, algorithm, roots, shapes, each("dtype", ("float32", "uint8")), forms(op))


@pytest.mark.parametrize(("op", "algorithm"), ways(*WITH_SPLITS))
def test_any_splits_are_followed(pool: Pool, op: str, algorithm: str) -> None:
    """Zeros, very unequal splits, one rank that sends or receives everything, no data at all; with
    device splits also spare rows on both sides."""
    shapes = each("shape", ((1,), (3, 5), (40, 31), (700,)))
    room = [{"spare": spare, "unused": unused} for spare in (0, 1, 100) for unused in (0, 3)]
    room = room if op == "alltoallv_device" else room[:1]
    patterns = each("splits", SPLITS)
    styles = each("style", ("bits", "ones"))
    roots = each("root", range(min(3, pool.size)))
    check(pool, op, algorithm, patterns, shapes, room, styles, roots, forms(op))


@pytest.mark.full
@every_way
def test_full_cross_product(pool: Pool, op: str, algorithm: str) -> None:
    """Everything that the tests above vary, combined."""
    axes = [
        {"shape": shape, "axis": axis} for shape in ((13, 5, 17), (64, 9)) for axis in (0, 1, -1)
    ]
    room = [{"spare": 0, "unused": 0}, {"spare": 7, "unused": 2}]
    both = (
        each("style", STYLES),
        EVEN_AND_NOT,
        each("root", range(pool.size)),
        each("splits", SPLITS),
        room if op == "alltoallv_device" else room[:1],
        each("max_blocks", (0, 1, 3)),
        [{"input_offset": a, "output_offset": 2 * a} for a in (0, 1, 5)],
        each("layout", LAYOUTS),
        each("output_layout", LAYOUTS),
        each("symmetric", SYMMETRIC),
        forms(op),
    )
    count = (100 if pool.takes_turns else 2000) // pool.size
    # If a dtype does not support the drawn reduce op, the op becomes sum.
    shapes = border_shapes(OPS[op].dtypes, pool.size)
    kinds = each("reduce_op", REDUCE_OPS if OPS[op].reduces else ("sum",))
    check(pool, op, algorithm, shapes, kinds, *both, count=count)
    check(pool, op, algorithm, dtypes_and_ops(op), axes, *both, count=count // 4)
    check(pool, op, algorithm, shapes, kinds, *both, count=count // 8, key="small")
