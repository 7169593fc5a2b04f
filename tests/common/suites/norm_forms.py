"""The fused normalizations as PyTorch sees them: the Python functions, results that are known
without running, opcheck, compiled graphs, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, works
from ..norm_cases import (
    OPS,
    Call,
    Fields,
    Tensors,
    family_of,
    legal,
    outputs_of,
    quantizes,
    scatters,
)
from ..norm_check import arguments_of, make, overload, run_norm, tensors_of, wrong_results
from ..norm_samples import SCALES, calls_of
from ..opcheck import OPCHECKS
from ..pool import Pool, some_stand_for_all
from ..rank import Rank


def _wrong_outputs(rank: Rank) -> dict[str, Attempt]:
    import collx

    communicator = rank.communicator()
    found = {}
    for op in OPS:
        call = Call(op, keep_norm=quantizes(op), rows=2 * rank.size)
        given = tensors_of(call, rank.size, rank.rank, rank.device)
        names = outputs_of(op, call.keep_norm)
        if len(names) == 1:
            continue
        outs = (torch.empty_like(given["input"]),) * (len(names) - 1)
        options: Fields = {}
        if quantizes(op):
            options = {"keep_norm": True, "quantization": op.rpartition("_")[2]}
        function = getattr(collx, family_of(op))
        found[op] = attempt(
            lambda: function(**given, eps=1e-6, group=communicator, out=outs, **options)  # noqa: B023
        )
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_outputs_are_all_given_or_none(pool: Pool) -> None:
    """The Python functions say which outputs they take."""
    for found in pool.run(_wrong_outputs):
        assert len(found) == len(OPS) - 2
        for op, result in found.items():
            assert result.error == "ValueError", (op, result)
            for word in (f"collx.{op}: out:", *outputs_of(op, quantizes(op))):
                assert word in result.message, (op, result)


# --- Meta -----------------------------------------------------------------------------------------


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _calls_for_meta(op: str) -> list[Call]:
    shapes: list[Fields] = [
        {"rows": rows, "cols": cols, "folded": folded}
        for rows, cols in ((0, 128), (1, 4096), (6, 384), (7, 1))
        for folded in (False, True)
    ]
    scales = SCALES if quantizes(op) else SCALES[:1]
    dtypes = ("float32", "float16", "bfloat16")
    combinations = [
        {
            **shape,
            "dtype": dtypes[(number + other) % 3],
            "scale": scale,
            "keep_norm": bool(number % 2),
            "fp8_dtype": ("e5m2", "e4m3fn")[other % 2],
            "layout": ("contiguous", "transposed")[(number + other) % 2],
            "weights": ("same", "float32")[other % 2],
        }
        for number, shape in enumerate(shapes)
        for other, scale in enumerate(scales)
    ]
    return calls_of(op, combinations)


def _exact(rank: Rank, op: str) -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    communicator = rank.communicator()
    calls = _calls_for_meta(op)
    found = []
    # No step divides the number of scales, so that all of them occur.
    for call in calls[rank.size % 2 :: 20 if rank.world.shared else 4]:
        tensors = tensors_of(call, rank.size, rank.rank, rank.device)
        for name in ("input", "residual") if call.layout == "transposed" else ():
            if name in tensors:
                tensors[name] = tensors[name].mT.contiguous().mT
        given = arguments_of(call, communicator.name, tensors)
        function = overload(op, call.keep_norm, False)
        reals = function(**given)
        with FakeTensorMode() as mode:
            fakes = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
            outs = function(**fakes)
            reals, outs = ((v,) if isinstance(v, torch.Tensor) else v for v in (reals, outs))
            by_name = dict(zip(outputs_of(op, call.keep_norm), outs, strict=True))
            write = overload(op, call.keep_norm, True)
            refused = {}
            for name, out in by_name.items():
                assert write(**fakes, **by_name) is None
                other = torch.empty((97, 3, 5), dtype=out.dtype, device=rank.device)
                refused[name] = attempt(lambda: write(**fakes, **{**by_name, name: other}))  # noqa: B023
        if [_kind(t) for t in reals] != [_kind(t) for t in outs]:
            found.append(f"{call}: {[_kind(t) for t in reals]} is not {[_kind(t) for t in outs]}")
        for name, result in refused.items():
            if result.error != "ValueError" or name not in result.message:
                found.append(f"{call}: {name} of another shape: {result}")
    return found[:5]


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", OPS)
def test_meta_kernels_of_the_norms_are_exact(pool: Pool, op: str) -> None:
    """Hazard 25: shapes, strides (of scales by columns, too), dtypes and device are known without
    running; an output of another shape is refused there, too."""
    for found in pool.run(_exact, op):
        assert not found, found


def test_meta_of_the_norms_needs_no_group() -> None:
    """Rows that a rank owns are those of its residual."""
    import collx  # noqa: F401

    for op in OPS:
        call = Call(op, rows=6)
        given = tensors_of(call, 2, 0, torch.device("meta"))
        result = overload(op, False, False)(**arguments_of(call, "nowhere", given))
        first = result if isinstance(result, torch.Tensor) else result[0]
        assert tuple(first.shape) == ((3, 384) if scatters(op) else (6, 384))


# --- opcheck --------------------------------------------------------------------------------------

QUANTIZING = tuple(op for op in OPS if quantizes(op))
CHECKED = [(op, False, out) for op in OPS for out in (False, True)]
CHECKED += [(op, True, out) for op in QUANTIZING for out in (False, True)]


def _opcheck(rank: Rank, op: str, keep_norm: bool, out: bool, options: Fields) -> dict[str, str]:
    communicator = rank.communicator()
    call = legal(Call(op, "float32", 2 * rank.size + 1, 256, keep_norm=keep_norm, **options))
    tensors = tensors_of(call, rank.size, rank.rank, rank.device)
    given = arguments_of(call, communicator.name, tensors)
    function: Any = overload(op, call.keep_norm, out)
    checks: tuple[str, ...] = OPCHECKS
    if out:
        plain = overload(op, call.keep_norm, False)(**given)
        outs = (plain,) if isinstance(plain, torch.Tensor) else plain
        given.update(zip(outputs_of(op, call.keep_norm), outs, strict=True))
        if any("float8" in str(tensor.dtype) for tensor in outs):
            # It cannot compare float8 arguments; int8 ones stand for them.
            checks = tuple(check for check in OPCHECKS if check != "test_schema")
    found = {}
    for check in checks:
        result = torch.library.opcheck(function, (), given, test_utils=check, raise_exception=False)
        rank.barrier()
        found[check] = str(result[check])
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize(("op", "keep_norm", "out"), CHECKED)
def test_opcheck_of_the_norms_passes_in_lockstep(
    pool: Pool, op: str, keep_norm: bool, out: bool
) -> None:
    """Hazard 25: schema, autograd registration, exact Meta kernel, dynamic shapes, on all ranks."""
    some_stand_for_all(pool, op in ("allreduce_layernorm", "allreduce_residual_rmsnorm_fp8"))
    options: list[Fields] = [{}]
    if quantizes(op):
        options.append({"scale_mode": "group", "scale_layout": "column"})
    for option in options:
        for found in pool.run(_opcheck, op, keep_norm, out, option):
            assert set(found.values()) == {"SUCCESS"}, found


# --- compiled graphs ------------------------------------------------------------------------------


def _compiled(rank: Rank) -> list[str]:
    communicator = rank.communicator()
    calls = [Call(op, rows=4, cols=256, form="python", keep_norm=quantizes(op)) for op in OPS]
    calls += calls_of(OPS[5], [{"rows": 4, "cols": 256, "scale": scale} for scale in SCALES[5:9]])
    tensors = [tensors_of(call, rank.size, rank.rank, rank.device) for call in calls]

    def function(given: list[Fields]) -> list[Tensors]:
        return [
            make(communicator, call, arguments_of(call, communicator.name, one), ())
            for call, one in zip(calls, given, strict=True)
        ]

    calls = [legal(Call(**{**vars(call), "form": "python"})) for call in calls]
    torch._dynamo.reset()
    results = torch.compile(function, fullgraph=True, backend="aot_eager")(tensors)
    return [
        wrong_results(call, got, _expected(call, rank))
        for call, got in zip(calls, results, strict=True)
    ]


def _expected(call: Call, rank: Rank) -> Tensors:
    from ..norm_cases import data_of

    return data_of(call, rank.size).expected[rank.rank]


@pytest.mark.worlds(2)
def test_functions_of_the_norms_compile_into_one_graph(pool: Pool) -> None:
    assert pool.run(_compiled) == [[""] * (len(OPS) + 4)] * pool.size


# --- gradients ------------------------------------------------------------------------------------


def _with_gradients(rank: Rank, op: str) -> dict[str, Attempt]:
    import torch.autograd.forward_ad as forward_ad

    communicator = rank.communicator()
    call = Call(op, "float32", 4, 128, form="functional")
    found = {}

    def run(given: Fields) -> Tensors:
        return make(communicator, call, arguments_of(call, communicator.name, given), ())

    def backward(given: Fields) -> None:
        sum(t.float().sum() for t in run(given) if t.is_floating_point()).backward()  # type: ignore[union-attr]

    given = tensors_of(call, rank.size, rank.rank, rank.device)
    for name in given:
        asked = {**given, name: given[name].clone().requires_grad_()}
        found[name] = attempt(lambda: backward(asked))  # noqa: B023
        with torch.no_grad():
            assert not any(result.requires_grad for result in run(asked))
    assert not any(result.requires_grad for result in run(given))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["input"], given["input"])
        found["tangent"] = attempt(lambda: run({**given, "input": dual}))
    assert run_norm(rank, communicator, call) == ""
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_the_norms_are_refused_by_name(pool: Pool, op: str) -> None:
    """Hazard 29: no silent absence of autograd, whichever argument requires grad; and forward mode
    drops no tangent."""
    for found in pool.run(_with_gradients, op):
        assert {"input", "weight", "tangent"} <= set(found)
        for name, result in found.items():
            assert result.error == "NotImplementedError", (name, result)
            assert op in result.message, (name, result)
