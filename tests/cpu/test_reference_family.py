"""Compares the reference of the operators except allreduce with index arithmetic and NumPy slices.

test_reference.py compares allreduce itself with exact arithmetic. Here, operators that reduce are
compared with allreduce, and operators that copy are checked byte by byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from collx import reference
from collx._extension import extension
from tests.common.values import COPIED, dtype_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

DTYPES = tuple(map(dtype_of, COPIED))
WORLDS = (1, 2, 3, 5)

Outputs = list[torch.Tensor]


def bits(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[torch.Tensor]:
    """Returns a tensor of random bits for each rank, which include NaNs with any payload."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shape in shapes:
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        raw = raw % 2 if dtype == torch.bool else raw
        tensors.append(raw.view(dtype).view(shape))
    return tensors


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Returns the elements as opaque values, which NumPy can move and compare by their bytes."""
    dense = tensor.contiguous()
    return (
        dense.reshape(-1)
        .view(torch.uint8)
        .numpy()
        .view(f"V{dense.itemsize}")
        .reshape(tuple(dense.shape))
    )


def assert_is(result: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert tuple(result.shape) == expected.shape
    assert raw(result).tobytes() == expected.tobytes()


@pytest.mark.parametrize("world", range(1, 17))
def test_parts_are_the_partition_of_the_kernels(world: int) -> None:
    for n in (0, 1, 2, 5, 15, 16, 17, 1000, 2**40 + 3, 2**62 + 5):
        sizes = reference.parts(n, world)
        starts = [sum(sizes[:rank]) for rank in range(world)]
        assert sum(sizes) == n
        assert sizes == [n // world + (rank < n % world) for rank in range(world)]
        assert list(zip(starts, sizes, strict=True)) == [
            extension.part_of(n, world, rank) for rank in range(world)
        ]


def test_parts_of_nothing_that_can_be_divided() -> None:
    for n, world in ((-1, 2), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match=f"got {n} units and {world} ranks"):
            reference.parts(n, world)


@pytest.mark.parametrize("reduce_op", reference.REDUCE_OPS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((7,), 0), ((1,), -1), ((6, 5), 0), ((6, 5), -1), ((2, 7, 3), 1)]
)
def test_reducescatter_takes_the_parts_of_the_allreduce(
    world: int, shape: tuple[int, ...], axis: int, reduce_op: str
) -> None:
    inputs = bits([shape] * world)
    whole = raw(reference.allreduce(inputs, reduce_op))
    results = reference.reducescatter(inputs, reduce_op, axis)
    assert len(results) == world
    for rank, result in enumerate(results):
        start, count = extension.part_of(shape[axis], world, rank)
        index = [slice(None)] * len(shape)
        index[axis] = slice(start, start + count)
        expected = np.ascontiguousarray(whole[tuple(index)])
        mine = torch.from_numpy(expected.view(np.int32).copy()).view(torch.float32)
        assert result.is_contiguous()
        assert reference.same_bits(result, mine.view(result.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_allgather_joins_equal_and_unequal_inputs(
    dtype: torch.dtype, world: int, axis: int
) -> None:
    for sizes in ([3] * world, reference.parts(2 * world + 1, world), reference.parts(1, world)):
        shapes = [tuple(size if d == axis % 3 else 2 + d for d in range(3)) for size in sizes]
        inputs = bits(shapes, dtype)
        expected = np.concatenate([raw(tensor) for tensor in inputs], axis)
        for result in reference.allgather(inputs, axis):
            assert_is(result, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_gather_and_scatter_move_the_bytes_of_the_ranks(
    dtype: torch.dtype, world: int
) -> None:
    rows = 2 * world
    inputs = bits([(rows, 3)] * world, dtype)
    joined = np.concatenate([raw(tensor) for tensor in inputs])
    for root in range(world):
        for result in reference.broadcast(inputs, root):
            assert_is(result, raw(inputs[root]), dtype)
        for rank, result in enumerate(reference.gather(inputs, root)):
            assert_is(result, joined if rank == root else np.zeros_like(joined), dtype)
        for rank, result in enumerate(reference.scatter(inputs, root)):
            assert_is(result, raw(inputs[root])[2 * rank : 2 * rank + 2], dtype)


@pytest.mark.parametrize("reduce_op", ["sum", "max"])
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_changes_what_root_has_alone(world: int, reduce_op: str) -> None:
    inputs = bits([(4, 3)] * world)
    whole = reference.allreduce(inputs, reduce_op)
    for root in range(world):
        for rank, result in enumerate(reference.reduce(inputs, reduce_op, root)):
            if rank == root:
                assert reference.same_bits(result, whole)
            else:
                assert reference.equal_bytes(result, inputs[rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_alltoall_transposes_the_chunks(dtype: torch.dtype, world: int) -> None:
    inputs = bits([(3 * world, 2)] * world, dtype)
    chunks = np.stack([raw(tensor).reshape(world, 3, 2) for tensor in inputs])
    for rank, result in enumerate(reference.alltoall(inputs)):
        assert_is(result, np.ascontiguousarray(chunks[:, rank]).reshape(3 * world, 2), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_alltoallv_sends_rows_where_the_splits_say(dtype: torch.dtype, world: int) -> None:
    for splits in (
        [[(r + 2 * s + 1) % 4 for s in range(world)] for r in range(world)],
        [[5 if s == 0 else 0 for s in range(world)] for r in range(world)],
        [[0] * world for r in range(world)],
    ):
        inputs = bits([(sum(row), 2) for row in splits], dtype)
        # Each row, with the rank that receives it.
        received: list[list[np.ndarray]] = [[] for _ in range(world)]
        for tensor, row in zip(inputs, splits, strict=True):
            targets = itertools.chain(*([s] * count for s, count in enumerate(row)))
            for target, values in zip(targets, raw(tensor), strict=True):
                received[target].append(values)
        for rank, result in enumerate(reference.alltoallv(inputs, splits)):
            none = np.empty((0, 2), raw(inputs[0]).dtype)
            assert_is(result, np.stack(received[rank]) if received[rank] else none, dtype)


EVERY: dict[str, Callable[[list[torch.Tensor]], Outputs]] = {
    "allreduce": lambda inputs: [reference.allreduce(inputs, "max")],
    "reducescatter": lambda inputs: reference.reducescatter(inputs, "max", 0),
    "allgather": lambda inputs: reference.allgather(inputs),
    "broadcast": lambda inputs: reference.broadcast(inputs, 1),
    "reduce": lambda inputs: reference.reduce(inputs, "max", 1),
    "gather": lambda inputs: reference.gather(inputs, 1),
    "scatter": lambda inputs: reference.scatter(inputs, 1),
    "alltoall": lambda inputs: reference.alltoall(inputs),
    "alltoallv": lambda inputs: reference.alltoallv(inputs, [[1, 3], [4, 0]]),
}


@pytest.mark.parametrize("op", sorted(EVERY))
def test_strides_do_not_matter_and_results_share_nothing(op: str) -> None:
    inputs = bits([(4, 6)] * 2)
    expected = EVERY[op](inputs)
    transposed = [tensor.t().contiguous().t().requires_grad_() for tensor in inputs]
    results = EVERY[op](transposed)
    for result, other in zip(results, expected, strict=True):
        assert result.is_contiguous()
        assert not result.requires_grad
        assert reference.same_bits(result, other)
    places = [t.untyped_storage().data_ptr() for t in (*results, *expected, *inputs, *transposed)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("op", ["allgather", "broadcast", "gather", "scatter", "alltoall"])
def test_bits_of_lazy_conjugates_are_those_of_the_values(op: str) -> None:
    values = [torch.tensor([1 + 2j, -3j], dtype=torch.complex64) * (r + 1) for r in range(2)]
    for a, b in zip(
        EVERY[op]([tensor.conj() for tensor in values]),
        EVERY[op]([tensor.conj().resolve_conj() for tensor in values]),
        strict=True,
    ):
        assert not a.is_conj()
        assert reference.equal_bytes(a, b)


@pytest.mark.parametrize("op", sorted(set(EVERY) - {"alltoallv"}))
def test_empty_tensors_are_legal(op: str) -> None:
    for shape in ((0,), (0, 3), (4, 0), (4, 0, 2)):
        for result in EVERY[op]([torch.empty(shape)] * 2):
            assert result.numel() == 0


def test_tensors_may_have_no_dimensions() -> None:
    inputs = [torch.tensor(1.0), torch.tensor(2.0)]
    assert reference.same_bits(reference.allreduce(inputs), torch.tensor(3.0))
    assert [t.item() for t in reference.broadcast(inputs, 1)] == [2, 2]
    assert [t.item() for t in reference.reduce(inputs, "sum", 1)] == [1, 3]


def test_equal_bytes_sees_every_byte() -> None:
    nan, other_nan = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    zero = torch.tensor(0.0)
    assert reference.equal_bytes(nan, nan.clone())
    assert not reference.equal_bytes(nan, other_nan)
    assert not reference.equal_bytes(zero, -zero)
    assert not reference.equal_bytes(zero, zero.int())
    assert not reference.equal_bytes(zero, zero.reshape(1))
    assert reference.equal_bytes(torch.empty(0, 2), torch.empty(0, 2))
    for dtype in DTYPES:
        (tensor,) = bits([(4, 6)], dtype)
        assert reference.equal_bytes(tensor, tensor.t().contiguous().t())
        changed = tensor.clone()
        changed.view(torch.uint8)[3, -1] ^= 1
        assert not reference.equal_bytes(tensor, changed)


ONE = torch.ones(4)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no inputs": (lambda: reference.allgather([]), ValueError, "allgather.*empty"),
    "unequal dtypes": (
        lambda: reference.gather([ONE, ONE.double()]),
        TypeError,
        "gather: rank 1 has torch.float64",
    ),
    "unequal shapes": (
        lambda: reference.broadcast([ONE, ONE[:3]]),
        ValueError,
        r"broadcast: rank 1 has \(3,\)",
    ),
    "shapes that cannot be joined": (
        lambda: reference.allgather([ONE.view(2, 2), ONE.view(1, 4)], 0),
        ValueError,
        "allgather: rank 1 .* only in dimension 0",
    ),
    "no such reduce op": (
        lambda: reference.reduce([ONE], "median"),
        ValueError,
        "reduce: reduce_op: got 'median'",
    ),
    "avg of integers": (
        lambda: reference.reducescatter([ONE.int()], "avg"),
        TypeError,
        "reducescatter: avg: got torch.int32",
    ),
    "no such axis": (
        lambda: reference.reducescatter([ONE], "sum", 1),
        ValueError,
        "reducescatter: axis: got 1",
    ),
    "no axis at all": (
        lambda: reference.alltoall([ONE[0]]),
        ValueError,
        "alltoall: axis: got 0",
    ),
    "no such root": (lambda: reference.scatter([ONE], 1), ValueError, "scatter: root: got 1"),
    "a negative root": (
        lambda: reference.broadcast([ONE], -1),
        ValueError,
        "broadcast: root: got -1",
    ),
    "rows that cannot be divided": (
        lambda: reference.alltoall([ONE] * 3),
        ValueError,
        "alltoall: got 4 rows; accepted: a multiple of 3",
    ),
    "splits that leave a row": (
        lambda: reference.alltoallv([ONE, ONE], [[2, 2], [2, 1]]),
        ValueError,
        r"alltoallv: rank 1 divides 4 rows into \[2, 1\]",
    ),
    "a negative split": (
        lambda: reference.alltoallv([ONE, ONE], [[5, -1], [2, 2]]),
        ValueError,
        "alltoallv: rank 0",
    ),
    "too few splits": (
        lambda: reference.alltoallv([ONE, ONE], [[4], [2, 2]]),
        ValueError,
        "alltoallv: rank 0",
    ),
    "splits of too few ranks": (
        lambda: reference.alltoallv([ONE, ONE], [[2, 2]]),
        ValueError,
        "alltoallv: got 2 inputs, but 1 lists",
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_does_not_fit_together_is_refused(what: str) -> None:
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call()
