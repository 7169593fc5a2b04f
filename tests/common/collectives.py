"""Calls of the collectives, and one description for each operator, which defines inputs, arguments
and expected results of a call.

    shape      the shape of every rank's input (allreduce, reducescatter, broadcast, reduce, gather,
               allgather), of the result (allgather with `uneven`), of every rank's output
               (scatter), of a chunk (alltoall), or of a chunk of ordinary size (alltoallv, see
               `splits_of`)
    splits     alltoallv: the pattern of the chunks' sizes
    form       also "alias": out= is the input; "part": the smaller one of input and output is this
               rank's part of the larger one
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import collx
from collx import reference
from collx._extension import extension

from . import calls
from .calls import Data, Fields, Tensors
from .sampling import each
from .values import COPIED, DTYPES, dtype_of, legal_ops, make_values

Shape = tuple[int, ...]

SYMMETRIC = ("none", "input", "output", "both")

TILE_BYTES = 1024
VECTOR_BYTES = 16
GROUP_BYTES = 31 * VECTOR_BYTES  # vectors that share one vector of flags
STYLES = ("bits", "special", "ones", "armed")
SPLITS = ("even", "uneven", "zeros", "wild", "one_sends", "one_receives", "self", "nobody")

ANYWHERE = ("functional", "out", "python", "python_out")
IN_PLACE = ("inplace", "python_inplace", "alias")
ONE_TENSOR = (*IN_PLACE, "part")


@dataclass(frozen=True, repr=False)
class Call(calls.Call):
    """A call of a collective."""

    op: str
    dtype: str = "float32"
    shape: Shape = (1000,)
    style: str = "bits"
    reduce_op: str = "sum"
    root: int = 0  # modulo the number of ranks
    axis: int = 0
    uneven: bool = False
    splits: str = "even"
    spare: int = 0  # device splits: rows of the result after the received rows
    unused: int = 0  # device splits: rows of the input after the sent rows
    seed: int = 1

    def legal(self) -> Call:
        return _legal(self)

    def make_data(self, world: int) -> Data:
        row = OPS[self.op]
        given, inputs = [], []
        for rank in range(world):
            shape = row.input_shape(self, world, rank)
            values = make_values(self.style, self.dtype, math.prod(shape), self.seed, rank)
            inputs.append(values.view(shape))
            given.append({"input": inputs[-1]})
            if self.op == "alltoallv_device":
                given[-1]["input_splits"] = torch.tensor(splits_of(self, world)[rank])
        return Data(given, row.expected(self, inputs))

    def outputs(self) -> tuple[str, ...]:
        return ("out", "output_splits")[: 1 + (self.op == "alltoallv_device")]

    def by_bytes(self, output: str, world: int, rank: int) -> bool:
        reduced = OPS[self.op].reduces and (self.op != "reduce" or rank == self.root % world)
        return not reduced

    def overload(self, form: str) -> Callable[..., Any]:
        row = OPS[self.op]
        packet = getattr(torch.ops.collx, row.packet + "_" * (form == "inplace"))
        which = {"functional": row.overloads[0], "out": row.overloads[1], "inplace": "default"}
        found: Callable[..., Any] = getattr(packet, which[form])
        return found

    def arguments(self, communicator: Any, tensors: Fields) -> Fields:
        row, world = OPS[self.op], communicator.world_size
        given: Fields = {**row.arguments(self, world, communicator.rank), **tensors}
        if row.sized:
            given["group_size"] = world
        given["group_name"] = communicator.name
        return {**given, "algorithm": self.algorithm, "max_blocks": self.max_blocks}

    def function_call(
        self, communicator: Any, given: Fields, outs: Tensors
    ) -> tuple[Callable[..., Any], Fields]:
        ours = ("group_size", "group_name")
        mine = {key: value for key, value in given.items() if key not in ours}
        if self.form == "python_out":
            mine.update(zip(self.outputs(), outs, strict=True))
        if self.op == "alltoallv_device":
            mine["device_splits"] = mine.pop("input_splits")
        function = getattr(collx, OPS[self.op].packet + "_" * (self.form == "python_inplace"))
        return function, {**mine, "group": communicator}

    def part(self, world: int, rank: int) -> tuple[str, int, int, int] | None:
        if self.form != "part":
            return None
        sizes = list(self.shape)
        count = sizes[self.axis]
        gathered = self.op == "allgather" and not self.uneven
        each = [count] * world if gathered else reference.parts(count, world)
        larger = "out" if self.op == "allgather" else "input"
        return larger, self.axis % len(sizes), sum(each[:rank]), each[rank]


@lru_cache(maxsize=64)
def _splits(pattern: str, rows: int, which: int, world: int) -> list[list[int]]:
    choose = random.Random(f"{pattern} {rows} {which} {world}")

    def chunk(sender: int, receiver: int) -> int:
        return {
            "even": rows,
            "uneven": choose.randrange(2 * rows + 1),
            "zeros": rows * (choose.random() < 0.4),
            "wild": rows * world if (sender, receiver) == (which, (which + 1) % world) else 2,
            "one_sends": rows * (sender == which),
            "one_receives": rows * (receiver == which),
            "self": rows * (sender == receiver),
            "nobody": 0,
        }[pattern]

    return [[chunk(sender, receiver) for receiver in range(world)] for sender in range(world)]


def splits_of(call: Call, world: int) -> list[list[int]]:
    """Returns the number of rows that each rank sends to each rank."""
    return _splits(call.splits, call.shape[0], call.root % world, world)


def received_by(call: Call, world: int, rank: int) -> list[int]:
    """Returns the number of rows that a rank receives from each rank."""
    return [sent[rank] for sent in splits_of(call, world)]


def _whole(call: Call, world: int, rank: int) -> Shape:
    return call.shape


def _chunks(call: Call, world: int, rank: int) -> Shape:
    return (world * call.shape[0], *call.shape[1:])


def _even_or_part(call: Call, world: int, rank: int) -> Shape:
    if not call.uneven:
        return call.shape
    sizes = list(call.shape)
    sizes[call.axis] = reference.parts(sizes[call.axis], world)[rank]
    return tuple(sizes)


def _rows_sent(call: Call, world: int, rank: int) -> Shape:
    return (sum(splits_of(call, world)[rank]) + call.unused, *call.shape[1:])


def _nothing_more(call: Call, world: int, rank: int) -> Fields:
    return {}


def _total(call: Call, world: int, rank: int) -> Fields:
    return {"total": call.shape[call.axis] if call.uneven else None}


def _both_splits(call: Call, world: int, rank: int) -> Fields:
    sent = splits_of(call, world)[rank]
    return {"output_splits": received_by(call, world, rank), "input_splits": list(sent)}


def _capacity(call: Call, world: int, rank: int) -> Fields:
    # The tensor input_splits is created together with the other tensors.
    return {"capacity": sum(received_by(call, world, rank)) + call.spare}


def _by_reference(call: Call, inputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    taken = OPS[call.op].taken(call, len(inputs))
    return [(result,) for result in getattr(reference, call.op)(inputs, **taken)]


def _allreduced(call: Call, inputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return [(reference.allreduce(inputs, call.reduce_op),)] * len(inputs)


def _exchanged(call: Call, inputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    splits = splits_of(call, len(inputs))
    used = [tensor.narrow(0, 0, sum(sent)) for tensor, sent in zip(inputs, splits, strict=True)]
    results = reference.alltoallv(used, splits)
    if call.op == "alltoallv":
        return [(result,) for result in results]
    answers: list[tuple[torch.Tensor, ...]] = []
    for rank, result in enumerate(results):
        shape = (result.shape[0] + call.spare, *result.shape[1:])
        whole = torch.zeros(math.prod(shape) * result.element_size(), dtype=torch.uint8)
        whole = whole.view(result.dtype).view(shape)
        whole[: result.shape[0]] = result
        counts = torch.tensor(received_by(call, len(inputs), rank), dtype=torch.int64)
        answers.append((whole, counts))
    return answers


@dataclass(frozen=True)
class Op:
    """The description of a collective."""

    name: str  # in collx
    takes: tuple[str, ...] = ()  # fields of a call that are arguments of op and reference
    forms: tuple[str, ...] = ANYWHERE
    reduces: bool = False
    sized: bool = False  # the schema has group_size
    peers: str = "none"  # tensors that peers access: symmetric for NEEDS_SYMMETRIC
    least_dims: int = 0
    widens: bool = False  # the larger of its tensors has `shape` once for each rank
    input_shape: Callable[[Call, int, int], Shape] = _whole
    more: Callable[[Call, int, int], Fields] = _nothing_more
    expected: Callable[[Call, list[torch.Tensor]], list[tuple[torch.Tensor, ...]]] = _by_reference
    packet: str = ""  # the name in torch.ops.collx; by default `name`
    overloads: tuple[str, str] = ("default", "out")

    def __post_init__(self) -> None:
        object.__setattr__(self, "packet", self.packet or self.name)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms other than "auto"."""
        return tuple(extension.algorithms(self.packet))

    @property
    def dtypes(self) -> tuple[str, ...]:
        return DTYPES if self.reduces else COPIED

    def taken(self, call: Call, world: int) -> Fields:
        """Returns the arguments that the reference also takes."""
        values = {name: getattr(call, name) for name in self.takes}
        if "root" in values:
            values["root"] %= world
        return values

    def arguments(self, call: Call, world: int, rank: int) -> Fields:
        """Returns the arguments of one rank, without tensors and the arguments of every op."""
        return {**self.taken(call, world), **self.more(call, world, rank)}


OPS = {
    op.name: op
    for op in (
        Op(
            "allreduce",
            ("reduce_op",),
            (*ANYWHERE, *IN_PLACE),
            reduces=True,
            expected=_allreduced,
        ),
        Op(
            "reducescatter",
            ("reduce_op", "axis"),
            (*ANYWHERE, "part"),
            reduces=True,
            sized=True,
            peers="input",
            least_dims=1,
        ),
        Op(
            "allgather",
            ("axis",),
            (*ANYWHERE, "part"),
            sized=True,
            peers="output",
            least_dims=1,
            widens=True,
            input_shape=_even_or_part,
            more=_total,
        ),
        Op(
            "broadcast",
            ("root",),
            (*ANYWHERE, *IN_PLACE),
            peers="output",
        ),
        Op(
            "reduce",
            ("reduce_op", "root"),
            (*ANYWHERE, *IN_PLACE),
            reduces=True,
            peers="input",
        ),
        Op("gather", ("root",), sized=True, peers="output", least_dims=1, widens=True),
        Op(
            "scatter",
            ("root",),
            sized=True,
            peers="output",
            least_dims=1,
            widens=True,
            input_shape=_chunks,
        ),
        Op(
            "alltoall",
            (),
            (*ANYWHERE, *IN_PLACE),
            sized=True,
            peers="output",
            least_dims=1,
            widens=True,
            input_shape=_chunks,
        ),
        Op(
            "alltoallv",
            peers="output",
            least_dims=1,
            widens=True,
            input_shape=_rows_sent,
            more=_both_splits,
            expected=_exchanged,
        ),
        Op(
            "alltoallv_device",
            peers="output",
            least_dims=1,
            widens=True,
            input_shape=_rows_sent,
            more=_capacity,
            expected=_exchanged,
            packet="alltoallv",
            overloads=("device_splits", "device_splits_out"),
        ),
        # The barrier has no tensors, so users of a call handle it separately.
        Op("barrier", (), ("functional",)),
    )
}
# The collective of tests/extension, if the build includes it. It only has an operator.
if hasattr(torch.ops.collx, "reduce_to_everyone"):
    OPS["reduce_to_everyone"] = replace(
        OPS["allreduce"],
        name="reduce_to_everyone",
        packet="reduce_to_everyone",
        forms=("functional", "out", "inplace", "alias"),
        peers="input",
    )
NAMES = tuple(name for name in OPS if name != "barrier")
REDUCING = tuple(name for name in NAMES if OPS[name].reduces)
ROOTED = tuple(name for name in NAMES if "root" in OPS[name].takes)
WITH_AXIS = tuple(name for name in NAMES if "axis" in OPS[name].takes)
WITH_SPLITS = ("alltoallv", "alltoallv_device")
NEEDS_SYMMETRIC = ("direct", "copy_engine")
SWAPPED = ("alltoall", "reduce_to_everyone")  # in place would overwrite data that peers need


def _legal(call: Call) -> Call:
    """Returns the closest valid call, which meets the requirements of algorithms and of tensors
    that share memory."""
    op = OPS[call.op]
    if op.reduces and call.reduce_op not in legal_ops(call.dtype):
        call = replace(call, reduce_op="sum")
    if call.form not in op.forms or (call.op in SWAPPED and call.algorithm in NEEDS_SYMMETRIC):
        apart = call.form in ANYWHERE and call.form in op.forms
        call = replace(call, form=call.form if apart else "out")
    if call.form == "part":
        before = call.shape[: call.axis % len(call.shape)]
        axis = call.axis if set(before) <= {1} else 0  # otherwise the part is not contiguous
        call = replace(call, axis=axis, layout="contiguous", output_layout="contiguous")
    needed = "both" if call.algorithm == "pull_push" else "none"
    if call.algorithm in NEEDS_SYMMETRIC:
        needed = op.peers
    if needed in ("input", "both"):
        call = replace(call, layout="contiguous")
    if needed in ("output", "both"):
        call = replace(call, output_layout="contiguous")
        # A new tensor is never symmetric.
        given = {"functional": "out", "python": "python_out"}
        call = replace(call, form=given.get(call.form, call.form))
    if needed not in ("none", call.symmetric):
        call = replace(call, symmetric=needed if call.symmetric == "none" else "both")
    if call.form in ONE_TENSOR:
        dense = "contiguous" if needed != "none" else call.layout
        call = replace(call, output_offset=call.input_offset, layout=dense, output_layout=dense)
        if call.symmetric != "none":
            call = replace(call, symmetric="both")
    return call


def dtypes_and_ops(op: str) -> list[Fields]:
    """Returns a dimension: every dtype of an op with every reduce op that it supports."""
    if not OPS[op].reduces:
        return each("dtype", COPIED)
    return [{"dtype": dtype, "reduce_op": other} for dtype in DTYPES for other in legal_ops(dtype)]


def border_shapes(dtypes: Sequence[str], world: int) -> list[Fields]:
    """Returns a dimension: sizes at and around the borders of vectors, groups, tiles and parts."""
    borders = [VECTOR_BYTES, GROUP_BYTES, GROUP_BYTES + VECTOR_BYTES, 2 * GROUP_BYTES, TILE_BYTES]
    borders += [2 * TILE_BYTES, 3 * TILE_BYTES + VECTOR_BYTES]
    borders += [world * border for border in borders[:5]]
    found = []
    for dtype in dtypes:
        itemsize = dtype_of(dtype).itemsize
        sizes = {border // itemsize + step for border in borders for step in (-1, 0, 1)}
        sizes |= {0, 1, 2, 3, 5, 7, 13, world - 1, world, world + 1}
        found += [{"dtype": dtype, "shape": (size,)} for size in sorted(sizes) if size >= 0]
    return found


def _random_shape(choose: random.Random, numel: int, least_dims: int) -> Shape:
    if numel == 1 and least_dims == 0 and choose.random() < 0.5:
        return ()
    dims = choose.choice((1, 1, 2, 3))
    sizes = []
    for _ in range(dims - 1):
        sizes.append(choose.choice([d for d in (1, 2, 3, 5, 8) if d <= max(1, numel)]))
        numel //= sizes[-1]
    choose.shuffle(sizes)
    sizes.insert(choose.randrange(dims), numel)
    return tuple(sizes)


def _spare_rows(choose: random.Random, shape: Shape, largest: int) -> int:
    """Draws the number of rows after the received ones. It is small if rows are long, because
    `largest` includes them."""
    rows = choose.choice((0, 0, 1, 3, 40))
    return rows if rows * math.prod(shape[1:]) <= largest else 1


def random_call(
    choose: random.Random, largest: int, world: int, ops: Sequence[str] = tuple(OPS)
) -> Call:
    """Draws a valid call of these ops. Ranks with the same `choose` draw the same call. `largest`:
    the maximum number of elements of the larger tensors."""
    op = OPS[choose.choice(ops)]
    if op.name == "barrier":
        return Call("barrier", form="functional")
    dtype = choose.choice(op.dtypes)
    # Small sizes are as frequent as large ones.
    numel = min(int(2 ** choose.uniform(0, largest.bit_length())) - choose.randrange(2), largest)
    uneven = op.name == "allgather" and choose.random() < 0.5
    splits = choose.choice(SPLITS)
    # "uneven" may send twice as many rows to all ranks.
    share = {"uneven": 2 * world, "wild": 2 * world}.get(splits, world)
    numel //= share if op.name in WITH_SPLITS else world if op.widens and not uneven else 1
    shape = _random_shape(choose, numel, op.least_dims)
    return Call(
        op=op.name,
        dtype=dtype,
        shape=shape,
        algorithm=choose.choice(("auto", *op.algorithms)),
        form=choose.choice(op.forms),
        style=choose.choice(("random", *STYLES)),
        reduce_op=choose.choice(legal_ops(dtype)) if op.reduces else "sum",
        root=choose.randrange(world),
        axis=choose.randrange(-len(shape), len(shape)) if shape else 0,
        uneven=uneven,
        splits=splits,
        spare=_spare_rows(choose, shape, largest) if op.name == "alltoallv_device" else 0,
        unused=choose.choice((0, 0, 2)) if op.name == "alltoallv_device" else 0,
        max_blocks=choose.choice((0, 0, 1, 2, 3, 8, 64)),
        input_offset=choose.choice((0, choose.randrange(17))),
        output_offset=choose.choice((0, choose.randrange(17))),
        layout=choose.choice(("contiguous", "contiguous", "transposed", "sliced")),
        output_layout=choose.choice(("natural", "contiguous", "transposed", "spread")),
        symmetric=choose.choice(SYMMETRIC),
        seed=choose.randrange(1, 1000),
    ).legal()
