"""Bad input: every rank raises one clear error that names the operator, the argument, the given
value and the accepted values, before anything is launched; the communicator remains usable.

See also bad_splits.py, bad_norms.py, bad_options.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import collx

from .. import overloads
from ..attempt import assert_raised, attempt, works
from ..calls import Fields, run_call
from ..collectives import NAMES as COLLECTIVES
from ..collectives import NEEDS_SYMMETRIC, REDUCING, ROOTED, WITH_AXIS
from ..collectives import OPS as ROWS_OF
from ..norms import NAMES as NORMS
from ..norms import quantizes, scatters
from ..operators import NAMES, algorithms_of, name_in_errors
from ..pool import Pool, on_ranks
from ..rank import Rank
from ..refusals import Given, Ops, Wrong, assert_all_refused, dtype, value

IN_PLACE = tuple(op for op in COLLECTIVES if "inplace" in ROWS_OF[op].forms)
WITH_DIMS = tuple(op for op in COLLECTIVES if ROWS_OF[op].least_dims)
SIZED = tuple(op for op in COLLECTIVES if ROWS_OF[op].sized)
LIKE_INPUT = tuple(op for op in NORMS if not quantizes(op) and not scatters(op))
ALGORITHMS = sorted({way for op in NAMES for way in algorithms_of(op)} - {"auto", "fallback"})

NOWHERE = "no such group"


def having(*algorithms: str) -> Ops:
    """Returns the operators that have one of these algorithms."""
    return tuple(op for op in NAMES if set(algorithms) & set(algorithms_of(op)))


def _overlapping(transposed: bool) -> Callable[[Given], Fields]:
    """An input and an output that overlap in memory: the output starts 16 bytes after the input."""

    def change(given: Given) -> Fields:
        source, out = given.input, given["out"]
        nbytes = [tensor.numel() * tensor.itemsize for tensor in (source, out)]
        memory = torch.zeros(sum(nbytes) + 16, dtype=torch.uint8, device=given.rank.device)
        first = memory[: nbytes[0]].view(source.dtype)
        later = memory[16 : 16 + nbytes[1]].view(out.dtype).view(out.shape)
        shape = tuple(source.shape)
        return {
            "input": first.view(shape[::-1]).t() if transposed else first.view(shape),
            "out": later,
        }

    return change


def _part_of_another_rank(given: Given) -> Fields:
    """The smaller tensor is the next rank's part of the larger one."""
    source, out = given.input, given["out"]
    larger, smaller = sorted((source, out), key=lambda tensor: -tensor.numel())
    rows = smaller.shape[0]
    whole = torch.ones_like(larger)
    part = whole.narrow(0, (given.rank.rank + 1) % given.world * rows, rows)
    return {"input": whole, "out": part} if larger is source else {"input": part, "out": whole}


def _of_same_size(given: Given) -> torch.Tensor:
    out: torch.Tensor = given["out"]
    return out.view({1: torch.uint8, 4: torch.int32}[out.itemsize])


NOT_DIVISIBLE = ("input", "a multiple of the group size")
ORDINARY: Fields = {"direct": "symmetric", "copy_engine": "symmetric output", "pull_push": "symme"}
PEERS_GO_TO = {way: having(way) for way in (*NEEDS_SYMMETRIC, "pull_push")}

ANY_OPERATOR: dict[str, Wrong] = {
    "negative max_blocks": value(NAMES, "max_blocks", "-1", max_blocks=-1),
    "unknown communicator": value(NAMES, NOWHERE, "collx.init", group_name=NOWHERE),
    "unknown communicator, in place": value(
        IN_PLACE, NOWHERE, "collx.init", form="inplace", group_name=NOWHERE
    ),
    "group that was never initialized": value(NAMES, "collx.init", group_name="0"),
    "unknown algorithm": value(NAMES, "algorithm", "ring", "{algorithms}", algorithm="ring"),
    **{
        f"{way} where it does not exist": value(
            tuple(op for op in NAMES if way not in algorithms_of(op)),
            f'algorithm: got "{way}"',
            "{algorithms}",
            algorithm=way,
        )
        for way in ALGORITHMS
    },
    "sparse input": dtype(NAMES, "input", "sparse", input=lambda g: g.input.to_sparse()),
    "out with a row too few": value(
        NAMES, "{out}: got shape", form="out", out=lambda g: g["out"][:-1]
    ),
    "out with a column too many": value(
        NAMES,
        "{out}: got shape",
        form="out",
        out=lambda g: g["out"].new_empty((len(g["out"]), g["out"].shape[1] + 1)),
    ),
    "out of another number of dimensions": value(
        NAMES, "{out}: got shape", form="out", out=lambda g: g["out"].view(-1)
    ),
    "out of another dtype": dtype(
        NAMES, "{out}: got dtype float64", form="out", out=lambda g: g["out"].double()
    ),
    "out of a dtype of the same size": dtype(
        NAMES, "{out}: got dtype", "int", form="out", out=_of_same_size
    ),
    "out elsewhere": value(
        NAMES, "{out}: got a tensor on", form="out", out=lambda g: g.elsewhere("out")
    ),
    "out that overlaps itself": value(
        NAMES,
        "{out}: got strides",
        "location",
        form="out",
        out=lambda g: g["out"][:1, :1].expand(g["out"].shape),
    ),
    "out that overlaps the input": value(
        NAMES, "{out}: overlaps", form="out", several=_overlapping(transposed=False)
    ),
    "out that overlaps the transposed input": value(
        NAMES, "{out}: overlaps", form="out", several=_overlapping(transposed=True)
    ),
    "out that is the input": value(
        ("alltoallv", *LIKE_INPUT), "{out}: overlaps", form="out", out=lambda g: g.input
    ),
}

OF_COLLECTIVES: dict[str, Wrong] = {
    "root behind the last rank": value(ROOTED, "root", root=lambda g: g.world),
    "negative root": value(ROOTED, "root", "-1", root=-1),
    "root behind the last rank, in place": value(
        tuple(op for op in ROOTED if op in IN_PLACE), "root", "99", form="inplace", root=99
    ),
    "axis behind the last": value(WITH_AXIS, "axis", "2", axis=2),
    "axis before the first": value(WITH_AXIS, "axis", "-3", axis=-3),
    "another group size": value(SIZED, "group_size", group_size=lambda g: g.world + 1),
    "0-dimensional input": value(
        WITH_DIMS, "input: got a tensor without axes", input=lambda g: g.input[0, 0]
    ),
    "size that is not divisible": value(
        ("scatter", "alltoall"), *NOT_DIVISIBLE, least=2, input=lambda g: g.input[:-1]
    ),
    "size that is not divisible, in place": value(
        ("alltoall",), *NOT_DIVISIBLE, form="inplace", least=2, input=lambda g: g.input[:-1]
    ),
    "total of other parts": value(("allgather",), "total", total=lambda g: 7 * g.world),
    "negative total": value(("allgather",), "total", "-1", total=-1),
    "part of another rank": value(
        WITH_AXIS, "out", "overlap", form="out", least=2, several=_part_of_another_rank
    ),
    "input that overlaps itself, in place": value(
        IN_PLACE,
        "input",
        "location",
        form="inplace",
        input=lambda g: g.input[:1].expand(g.input.shape),
    ),
    "avg of integers": dtype(
        REDUCING, "avg", "int32", reduce_op="avg", input=lambda g: g.input.int()
    ),
    "bool in a reduction": dtype(REDUCING, "input", "bool", input=lambda g: g.input.bool()),
    "complex in a reduction": dtype(
        REDUCING, "input", "complex", input=lambda g: g.input.to(torch.complex64)
    ),
    "int16 in a reduction, in place": dtype(
        tuple(op for op in REDUCING if op in IN_PLACE),
        "int16",
        form="inplace",
        input=lambda g: g.input.short(),
    ),
    "unknown reduce op": value(REDUCING, "reduce_op", "median", "sum", reduce_op="median"),
    **{
        f"{way} on ordinary tensors{', with out' * (form == 'out')}": value(
            PEERS_GO_TO[way], "algorithm", way, ORDINARY[way], form=form, algorithm=way
        )
        for way in PEERS_GO_TO
        for form in ("functional", "out")
    },
    "direct in place that needs two tensors": value(
        ("alltoall",),
        "algorithm",
        "direct",
        form="inplace",
        algorithm="direct",
        input=lambda g: g.symmetric(),
    ),
    "direct with an ordinary tensor of the two": value(
        tuple(op for op in having("direct") if ROWS_OF[op].peers == "output"),
        "algorithm",
        "direct",
        "symmetric",
        form="out",
        algorithm="direct",
        input=lambda g: g.symmetric(),
    ),
}

WRONG = {**ANY_OPERATOR, **OF_COLLECTIVES}


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_argument_is_refused_by_name(pool: Pool, what: str) -> None:
    """Each kind of mistake raises one error before anything is launched, so all ranks continue."""
    assert_all_refused(pool, __name__, what)


@pytest.mark.worlds(2)
@on_ranks
def test_none_instead_of_a_tensor_is_refused_by_name(rank: Rank) -> None:
    """Every tensor of every overload. CUDA kernels would read a bias at address 0."""
    communicator = rank.communicator()
    for overload in overloads.all_overloads():
        given = overloads.arguments_for(rank, communicator.name, overload)
        tensors = [a.name for a in overload._schema.arguments if str(a.type) == "Tensor"]
        op = overloads.name_in_errors(overload)
        # PyTorch itself refuses a call without any tensor.
        for name in tensors if len(tensors) > 1 else ():
            refused = attempt(lambda: overload(**{**given, name: None}))  # noqa: B023
            assert_raised(refused, "TypeError", f"collx.{op}: {name}: got None")
    assert works(rank, communicator)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_refusal_on_one_rank_keeps_it_in_step(rank: Rank) -> None:
    """The refused call was neither launched nor counted. Only rank 0 is refused. It then makes the
    valid call, for which the others have waited."""
    for op in NAMES:
        given = Given(rank, op)
        if rank.rank == 0:
            wrong = given.spoiled(WRONG["negative max_blocks"])
            refused = attempt(lambda: given.call.overload("functional")(**wrong))  # noqa: B023
            assert_raised(refused, "ValueError")
        assert run_call(rank, rank.communicator(), given.call) == "", op


@pytest.mark.worlds(1, 2)
@on_ranks
def test_an_input_on_another_device_is_refused(rank: Rank) -> None:
    """CPU communicators refuse CUDA tensors, and CUDA communicators refuse CPU tensors."""
    if not torch.cuda.is_available():
        pytest.skip("there is but one device")
    elsewhere = "cpu" if rank.device.type == "cuda" else "cuda"
    for op in NAMES:
        given = Given(rank, op)
        tensors = {n: v for n, v in given.arguments.items() if isinstance(v, torch.Tensor)}
        arguments = {**given.arguments, **{n: t.to(elsewhere) for n, t in tensors.items()}}
        refused = attempt(lambda: given.call.overload("functional")(**arguments))  # noqa: B023
        assert_raised(refused, "ValueError", name_in_errors(op), "got a tensor on")
    assert works(rank, rank.communicator())


@pytest.mark.worlds(2)
@on_ranks
def test_python_functions_refuse_as_their_operators_do(rank: Rank) -> None:
    """An unknown communicator and a missing argument raise the same error as in the operators."""
    communicator = rank.communicator()

    def refused(word: str, function: Any, *args: Any, **options: Any) -> None:
        assert_raised(attempt(lambda: function(*args, **options)), "ValueError", word)

    refused(NOWHERE, collx.barrier, NOWHERE)
    forms = [(op, "python") for op in NAMES] + [(op, "python_inplace") for op in IN_PLACE]
    for op, form in forms:
        given = Given(rank, op)
        call = replace(given.call, form=form)
        function, mine = call.function_call(communicator, given.arguments, ())
        refused(NOWHERE, function, **{**mine, "group": NOWHERE})
    tensor = torch.ones((2 * rank.size, 3), device=rank.device)
    splits: Fields = {"device_splits": torch.full((rank.size,), 2, device=rank.device)}
    complete: Fields = {**splits, "capacity": 2 * rank.size, "out": torch.empty_like(tensor)}
    incomplete = {"output_splits": complete, "device_splits": {}, "capacity": splits}
    for what, options in incomplete.items():
        refused(what, collx.alltoallv, tensor, group=communicator, **options)
    assert works(rank, communicator)
