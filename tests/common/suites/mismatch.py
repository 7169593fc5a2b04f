"""Checked mode, option by option: the two calls that an error shows differ in text, and
differences that are allowed between ranks are no mismatch."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import collx  # noqa: F401

from ..attempt import Attempt, attempt, finish
from ..pool import Pool, some_stand_for_all
from ..rank import Rank

ENOUGH = 10.0  # a timeout that no call should reach
SHOWN = re.compile(r"rank (\d+) called (.*), but rank (\d+) called (.*) \(communicator ")

# Each option of an operator: the usual value, and the value that only the last rank gives.
_NEXT = math.nextafter(1e-6, 1.0) + 1e-13  # a few floats further: six digits show no difference
NORM: dict[str, tuple[dict[str, Any], Any]] = {
    "eps": ({"eps": 1e-6, "rounding": "parity"}, _NEXT),
    "weight_offset": ({"weight_offset": 0.0}, 1.0),
    "scale_ub": ({"scale_ub": None}, 3.0),
    "fp8_dtype": ({"fp8_dtype": "e4m3fn"}, "e5m2"),
    "scale_mode": ({"scale_mode": "row"}, "group"),
    "quant_group_size": ({"scale_mode": "group", "quant_group_size": 128}, 64),
    "ue8m0": ({"ue8m0": False}, True),
    "scale_dtype": ({"scale_dtype": "float32"}, "input"),
    "scale_layout": ({"scale_mode": "group", "scale_layout": "row"}, "column"),
    "rounding": ({"rounding": "fp32"}, "parity"),
    "algorithm": ({"algorithm": "twoshot_push"}, "twoshot_pull"),
    "max_blocks": ({"max_blocks": 0}, 7),
    "expression": ({"expression": ""}, "value.bfloat16"),
}
# What the text of the last rank's call contains, and that of the other calls does not.
SAID = {
    "weight_offset": "weight_offset 1",
    "scale_ub": "scale_ub 3",
    "scale_mode": "scale_mode group",
    "quant_group_size": "quant_group_size 64",
    "ue8m0": "ue8m0 1",
    "scale_dtype": "scale_dtype bfloat16",
    "scale_layout": "scale_layout column",
    "rounding": "rounding parity",
    "keep_norm": "keep_norm",
}
NORM_TENSORS = ("rows", "cols", "dtype", "weight", "keep_norm", "op")
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reduce_op": ("allreduce", {"reduce_op": "sum"}, {"reduce_op": "avg"}),
    "algorithm": ("allreduce", {"algorithm": "twoshot_push"}, {"algorithm": "twoshot_pull"}),
    "max_blocks": ("allreduce", {"max_blocks": 0}, {"max_blocks": 7}),
    "shape": ("allreduce", {"shape": (4, 6)}, {"shape": (6, 4)}),
    "dtype": ("broadcast", {"dtype": torch.int16}, {"dtype": torch.uint16}),
    "dimensions": ("allreduce", {"shape": (1,) * 9}, {"shape": (1,) * 10}),
    "last dimension": ("allreduce", {"shape": (1,) * 8 + (4,)}, {"shape": (1,) * 8 + (6,)}),
    "symmetric": ("allreduce", {"symmetric": True}, {"symmetric": False}),
    "place": ("allreduce", {"symmetric": True}, {"symmetric": True, "skipped": 4}),
    "root": ("broadcast", {"root": 0}, {"root": 1}),
    "axis": ("allgather", {"axis": 0}, {"axis": 1}),
    "op": ("gather", {"op": "gather"}, {"op": "scatter"}),
}


def test_every_option_of_a_norm_is_varied() -> None:
    schema = torch.ops.collx.allreduce_residual_rmsnorm_fp8.default._schema
    tensors = {"input", "residual", "weight", "scale", "group_name"}
    of_rank = {"extras", "numbers"}  # their values may differ between ranks
    options = {argument.name for argument in schema.arguments} - tensors - of_rank
    assert options == set(NORM)


def _norm(rank: Rank, name: str, what: str, odd: bool) -> None:
    op = "allreduce_residual_rmsnorm_fp8"
    if what == "op" and odd:
        op = op.replace("fp8", "int8")
    rows = 6 if what == "rows" and odd else 4
    cols = 512 if what == "cols" and odd else 256
    dtype = torch.float16 if what == "dtype" and odd else torch.bfloat16
    weight = torch.float32 if what == "weight" and odd else dtype
    options: dict[str, Any] = {"eps": 1e-6}
    if what in NORM:
        options.update(NORM[what][0])
        if odd:
            options[what] = NORM[what][1]
    packet = getattr(torch.ops.collx, op)
    function = packet.keep_norm if what == "keep_norm" and odd else packet.default
    function(
        torch.ones(rows, cols, dtype=dtype, device=rank.device),
        torch.ones(rows, cols, dtype=dtype, device=rank.device),
        torch.ones(cols, dtype=weight, device=rank.device),
        group_name=name,
        **options,
    )


def _other(rank: Rank, communicator: Any, memory: torch.Tensor, what: str, odd: bool) -> None:
    op, usual, different = OTHERS[what]
    o: dict[str, Any] = {"shape": (4, 4), "dtype": torch.float32, "axis": 0, "root": 0, "op": op}
    o.update(usual, **(different if odd else {}))
    name = communicator.name
    last = (o.get("algorithm", "auto"), o.get("max_blocks", 0))
    tensor = torch.ones(o["shape"], dtype=o["dtype"], device=rank.device)
    if o.get("symmetric"):
        tensor = memory[o.get("skipped", 0) :][: tensor.numel()].view(o["shape"]).fill_(1)
        last = ("twoshot_pull", 0)
    elif what == "symmetric":
        last = ("twoshot_pull", 0)
    packet = getattr(torch.ops.collx, o["op"])
    given: dict[str, tuple[Any, ...]] = {
        "allreduce": (o.get("reduce_op", "sum"), name),
        "broadcast": (o["root"], name),
        "allgather": (rank.size, name, o["axis"], None),
        "gather": (o["root"], rank.size, name),
        "scatter": (o["root"], rank.size, name),
    }
    packet(tensor, *given[o["op"]], *last)


def _described(rank: Rank, what: str, norm: bool) -> Attempt:
    communicator = rank.new_communicator(
        "described", rank.fresh_group(), timeout=ENOUGH, check=True
    )
    memory = communicator.empty((64,))
    odd = rank.rank == rank.size - 1

    def run() -> None:
        if norm:
            _norm(rank, communicator.name, what, odd)
        else:
            _other(rank, communicator, memory, what, odd)
        finish(communicator)

    rank.barrier()
    found = attempt(run)
    rank.barrier()
    # A rank may have left the call before the others noticed the mismatch.
    found = found if found.error else attempt(communicator.raise_if_failed)
    communicator.destroy()
    return found


def _assert_both_shown(pool: Pool, what: str, norm: bool) -> None:
    for found in pool.run(_described, what, norm):
        assert found.error == "CollectiveMismatch", found
        assert found.seconds < ENOUGH, found
        shown = SHOWN.search(found.message)
        assert shown is not None, found
        calls = {int(shown[1]): shown[2], int(shown[3]): shown[4]}
        last = calls.pop(pool.size - 1)
        for call in calls.values():
            assert call != last, found
            if norm and what in SAID:
                assert SAID[what] in last, found
                assert SAID[what] not in call, found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", sorted([*NORM, *NORM_TENSORS]))
def test_norms_that_differ_are_described_differently(pool: Pool, what: str) -> None:
    """The message shows whatever the check compares."""
    some_stand_for_all(pool, what in ("scale_dtype", "keep_norm"))
    _assert_both_shown(pool, what, norm=True)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", sorted(OTHERS))
def test_calls_that_differ_are_described_differently(pool: Pool, what: str) -> None:
    """The same for the other collectives."""
    some_stand_for_all(pool, what in ("last dimension", "place"))
    _assert_both_shown(pool, what, norm=False)


def _uneven_gathers(rank: Rank, algorithm: str) -> list[str]:
    communicator = rank.communicator("checked", check=True)
    found = []
    for axis in (0, 7, 8, 9):
        total = 2 * rank.size + 1
        own = 3 if rank.rank == 0 else 2
        shape, whole = [1] * 10, [1] * 10
        shape[axis], whole[axis] = own, total
        shape[5] = whole[5] = 3
        out = communicator.empty(whole)
        tensor = torch.full(shape, float(rank.rank), device=rank.device)
        result = attempt(
            lambda: torch.ops.collx.allgather.out(
                tensor,  # noqa: B023
                rank.size,
                communicator.name,
                axis,  # noqa: B023
                total,  # noqa: B023
                algorithm,
                out=out,  # noqa: B023
            )
        )
        rank.synchronize()
        owners = torch.tensor([0, *(r for r in range(rank.size) for _ in range(2))])
        if result.error:
            found.append(f"axis {axis}: {result}")
            break
        if not out.cpu().eq(owners.view([-1 if i == axis else 1 for i in range(10)])).all():
            found.append(f"axis {axis}: wrong result")
    communicator.raise_if_failed()
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", ["staged", "direct", "fallback"])
def test_parts_of_any_axis_may_differ_in_checked_mode(pool: Pool, algorithm: str) -> None:
    """Ranks whose parts differ in size make the same call, whichever axis is divided."""
    some_stand_for_all(pool, algorithm == "direct")
    assert pool.run(_uneven_gathers, algorithm) == [[]] * pool.size
