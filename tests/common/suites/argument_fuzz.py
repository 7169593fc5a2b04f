"""Fuzz test of arguments: calls of every operator with one or two arguments replaced by other
valid or invalid values. Either the call returns the same bits as the reference, or all ranks raise
an exception before anything is launched and the communicator remains usable.

See drawing.py for how the calls are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies

from collx import reference

from .. import collectives, norms
from ..attempt import Attempt, attempt, works
from ..calls import Call, Fields, Prepared, strides_of
from ..drawing import for_all
from ..overloads import (
    MODES,
    all_overloads,
    arguments_for,
    as_function_call,
    results_of,
    written_by,
)
from ..pool import Pool
from ..rank import Rank
from ..values import COPIED, legal_ops, unequal

CALLS, CALLS_SHARED = {"cpu": 800, "cuda": 200}, 40  # on GPUs each new epilogue is compiled
LARGEST = 2000  # elements of the input of a fused normalization

MAPS = tuple(
    f"{op}{value}" for op in ("allreduce_map", "reducescatter_map") for value in ("", "_with_value")
)
# What must follow when an argument is replaced. "same": the result is unchanged. "right": the call
# may be refused, but otherwise the result is unchanged. "either": the call may be refused or return
# another result. "refused": the call must be refused. In every case all ranks behave the same.
VERDICTS = SAME, RIGHT, EITHER, REFUSED = "same", "right", "either", "refused"

WORLD = -1  # stands for the number of ranks in the values below
HUGE = (2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**63)


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


@dataclass(frozen=True)
class Change:
    """Another value for an argument: a key of CHANGES, and a number that picks one of several."""

    argument: str
    what: str
    number: int


@dataclass(frozen=True)
class Example:
    """A valid call, its overload and the changes to its arguments."""

    call: Call | str  # the name of an operator of MAPS
    overload: str
    changes: tuple[Change, ...]
    mode: str
    by_function: bool  # call the Python function if it has the changed arguments


# --- Functions that return a replacement for a tensor, or None if the tensor cannot be replaced.


def _lazy(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    if tensor.is_complex():
        return tensor.conj_physical().conj()
    if tensor.dtype in (torch.float32, torch.float64):
        return torch.view_as_complex(torch.stack([tensor, -tensor], -1)).conj().imag
    return None


def _spread(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    strides = strides_of("spread", tuple(tensor.shape))
    memory = torch.zeros(
        2 * tensor.numel() * tensor.element_size() + 16, dtype=torch.uint8, device=tensor.device
    )
    start = number % 3 * tensor.element_size()
    whole = memory[start : start + 2 * tensor.numel() * tensor.element_size()]
    if whole.data_ptr() % tensor.element_size() or whole.storage_offset() % tensor.element_size():
        return None
    return whole.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def _transposed(tensor: torch.Tensor, number: int) -> torch.Tensor:
    strides = strides_of("transposed", tuple(tensor.shape))
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _overlapping(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    wide = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    if not wide or tensor.numel() == 0:
        return None
    return tensor.narrow(wide[0], 0, 1).expand(tensor.shape)


def _inference(tensor: torch.Tensor, number: int) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _other_dtype(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    dtypes = [getattr(torch, name) for name in COPIED]
    others = [dtype for dtype in dtypes if dtype != tensor.dtype]
    return torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device).to(
        others[number % len(others)]
    )


def _sparse(tensor: torch.Tensor, number: int) -> Any:
    zeros = torch.zeros(tensor.shape, device=tensor.device)
    if number % 2 and tensor.dim() == 2 and tensor.numel():
        return zeros.to_sparse_csr()
    return zeros.to_sparse() if tensor.dim() else None


def _other_shape(tensor: torch.Tensor, number: int) -> torch.Tensor:
    shapes = [(*tensor.shape, 2), (*tensor.shape[:-1], 999), (0,), (7,) * 6, (2**40, 0)]
    return torch.zeros(shapes[number % len(shapes)], dtype=tensor.dtype, device=tensor.device)


def _wrapped(tensor: torch.Tensor, number: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    if number % 2:
        return TwoTensor(tensor.clone(), tensor.clone())
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(tensor)


def _nested(tensor: torch.Tensor, number: int) -> Any:
    layout = (torch.strided, torch.jagged)[number % 2]
    try:
        return torch.nested.nested_tensor([tensor, tensor], layout=layout)
    except (NotImplementedError, RuntimeError):
        return None  # not every dtype and shape is supported


def _elsewhere(tensor: torch.Tensor, number: int) -> torch.Tensor:
    device = "cpu" if tensor.is_cuda and number % 2 else "meta"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


TENSORS: dict[str, tuple[str, Callable[[torch.Tensor, int], Any]]] = {
    "lazy": (SAME, _lazy),
    "spread": (SAME, _spread),
    "transposed": (SAME, _transposed),
    "subclass": (SAME, lambda t, n: t.as_subclass(Plain)),
    "parameter": (SAME, lambda t, n: torch.nn.Parameter(t, requires_grad=False)),
    "inference": (RIGHT, _inference),
    "gradient": (
        RIGHT,
        lambda t, n: (
            t.requires_grad_()
            if t.is_floating_point() and t.is_leaf and not t.is_inference()
            else None
        ),
    ),
    "overlapping": (EITHER, _overlapping),
    "other dtype": (EITHER, _other_dtype),
    "other shape": (EITHER, _other_shape),
    "elsewhere": (EITHER, _elsewhere),  # a meta input returns a meta result
    "wrapped": (EITHER, _wrapped),
    "nested": (EITHER, _nested),
    "sparse": (REFUSED, _sparse),
    "no tensor": (REFUSED, lambda t, n: (1, 2.5, "x", object())[n % 4]),
}

# Rows that do not match the splits of one rank, or splits that only the device knows, are detected
# only inside the call, so these changes are not made to tensors of alltoallv.
CHANGES_ROWS = ("other shape", "overlapping")

# A Meta kernel does not look up the group.
ONLY_TRACED = ("elsewhere", "wrapped")

# The input and an output share memory.
ALIASED = "aliased"

TEXTS: tuple[Any, ...] = ("", "x", "sum\0", " auto", "AUTO", "0", "é" * 5000, None, 1, [])
SCALARS: dict[str, tuple[Any, ...]] = {
    "root": (-2, WORLD, *HUGE, None, "0", 0.5),
    "axis": (99, -99, *HUGE, "0", 0.5),
    "group_size": (0, -2, 17, *HUGE, "2"),
    "total": (-2, *HUGE, "2"),
    "capacity": (-2, -99, "2"),
    "max_blocks": (-2, *HUGE[:1], *HUGE[2:], "2"),
    "eps": ("x", None),
    "reduce_op": TEXTS,
    "algorithm": TEXTS,
    "group_name": TEXTS[:1] + TEXTS[2:5] + TEXTS[6:],
    "expression": TEXTS[1:],
    "rounding": TEXTS,
    "fp8_dtype": TEXTS,
    "scale_mode": TEXTS,
    "scale_dtype": TEXTS,
    "scale_layout": TEXTS,
}
LOOSE: dict[str, tuple[Any, ...]] = {
    "eps": (0.0, -1.0, float("nan"), float("inf"), 1e300, 2**63),
    "weight_offset": (float("nan"), -float("inf"), 1e300, "x"),
    "scale_ub": (0.0, -1.0, float("nan"), float("inf"), "x"),
    "quant_group_size": (0, -1, 3, *HUGE),
    "ue8m0": (True, 2, "x", None),
    "expression": ("value.float32;", ";" * 999, "value.float32;neg.float32 " + "0 " * 999),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {"algorithm": ("auto", "fallback"), "max_blocks": (1, 7)}


def _splits(given: Any, number: int, rank: Rank) -> Any:
    """Returns invalid splits that this rank can detect on its own."""
    spoiled = list(given)
    mine = rank.rank
    changes: list[Callable[[], Any]] = [
        lambda: spoiled.__setitem__(mine, -1),
        lambda: spoiled.__setitem__(mine, spoiled[mine] + 1),
        lambda: spoiled.__setitem__(mine, 2**63 - 1),
        lambda: spoiled.__setitem__(slice(None), [2**63 - 1] * len(spoiled)),
        lambda: spoiled.__setitem__(slice(None), [-(2**63)] * len(spoiled)),
        lambda: spoiled.__setitem__(mine, 2**63),
        lambda: spoiled.append(0),
        lambda: spoiled.pop(),
        spoiled.clear,
        lambda: spoiled.__setitem__(mine, 0.5),
        lambda: spoiled.__setitem__(mine, None),
    ]
    changes[number % len(changes)]()
    return spoiled


def _alias(overload: str, arguments: Fields, change: Change, rank: Rank) -> bool:
    """Places the input and this output in the same memory. Returns False if that is impossible.

    An operator decides by the distance between the two whether to accept them. It accepts an input
    or output that is the rank's own part of the other, so the position of the smaller tensor
    depends on the rank. If sizes differ between ranks, the decision can differ too, and nothing is
    changed.
    """
    source, out = arguments["input"], arguments[change.argument]
    small, large = sorted((source.numel(), out.numel()))
    uneven = "alltoallv" in overload or (
        "reducescatter" in overload and any(size % rank.size for size in source.shape)
    )
    if source.dtype != out.dtype or uneven or large not in (small, rank.size * small):
        return False
    step = rank.rank * small
    if small == large:
        step = max(0, (0, 1, small // 2, small - 1)[change.number % 4])
    places = (0, step) if source.numel() >= out.numel() else (step, 0)
    memory = torch.zeros(2 * large + 1, dtype=torch.uint8, device=source.device).to(source.dtype)
    inside = [
        memory.as_strided(tensor.shape, strides_of("contiguous", tuple(tensor.shape)), place)
        for tensor, place in zip((source, out), places, strict=True)
    ]
    arguments["input"], arguments[change.argument] = inside[0].copy_(source), inside[1]
    return True


def _changed(example: Example, change: Change, value: Any, rank: Rank) -> tuple[str, Any] | None:
    """Returns the verdict and the new value, or None if there is no new value."""
    if isinstance(value, torch.Tensor):
        if "alltoallv" in example.overload and change.what in CHANGES_ROWS:
            return None
        verdict, make = TENSORS[change.what]
        made = make(value, change.number)
        # Some algorithms require symmetric tensors, and the value of an epilogue is contiguous.
        asked = not isinstance(example.call, str) and example.call.algorithm != "auto"
        if verdict == SAME and (asked or change.argument == "value"):
            verdict = RIGHT
        return None if made is None else (verdict, made)
    if change.argument in ("input_splits", "output_splits"):
        return REFUSED, _splits(value, change.number, rank)
    if change.argument == "extras":
        if not isinstance(value, list):
            return None
        wrong: tuple[Any, ...] = ([*value, torch.ones(3, device=rank.device)], [None], 1, ["x"])
        return REFUSED, wrong[change.number % len(wrong)]
    verdict, table = {
        "wrong": (REFUSED, SCALARS),
        "loose": (EITHER, LOOSE),
        "neutral": (SAME, NEUTRAL),
    }[change.what]
    values = table.get(change.argument)
    if not values:
        return None
    made = values[change.number % len(values)]
    return verdict, rank.size if made == WORLD and isinstance(made, int) else made


# --- The calls.


@dataclass
class Made:
    """A valid call on a rank: its overload, its arguments by name and the expected results."""

    overload: Any
    arguments: Fields
    expected: list[torch.Tensor]


def _overload_of(example: Example) -> Any:
    packet, _, name = example.overload.partition(".")
    return getattr(getattr(torch.ops.collx, packet), name)


def _made(rank: Rank, communicator: Any, example: Example) -> Made:
    overload, call = _overload_of(example), example.call
    if isinstance(call, str):
        arguments = arguments_for(rank, communicator.name, overload)
        return Made(overload, arguments, _mapped(rank, overload, arguments))
    prepared = Prepared(rank, communicator, call)
    outs = dict(zip(call.outputs(), prepared.outs, strict=True))
    given, expected = prepared.given, prepared.expected
    written = set(written_by(overload)) - set(given)
    assert written <= set(outs), overload
    arguments = {**given, **{name: outs[name].view for name in outs if name in written}}
    return Made(overload, arguments, list(expected))


def _mapped(rank: Rank, overload: Any, arguments: Fields) -> list[torch.Tensor]:
    """Returns the expected results. The arguments' `expression` negates."""
    inputs = [
        torch.randn(arguments["input"].shape, generator=torch.Generator().manual_seed(1 + other))
        for other in range(rank.size)
    ]
    if "reducescatter" in str(overload):
        value = reference.reducescatter(inputs, "sum")[rank.rank]
    else:
        value = reference.allreduce(inputs, "sum")
    return [-value, value] if "with_value" in str(overload) else [-value]


def _call(example: Example, overload: Any, arguments: Fields) -> Any:
    if not example.by_function:
        return overload(**arguments)
    function, given = as_function_call(overload, arguments)
    made_from_others = {"group_name", "group_size", "expression", "extras", "numbers"}
    if function is None or made_from_others & {change.argument for change in example.changes}:
        return overload(**arguments)
    return function(**given)


def _unequal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Compares the bits; all NaNs are equal."""
    plain = got.detach().resolve_conj().resolve_neg().cpu().as_subclass(torch.Tensor)
    if plain.shape != want.shape or plain.dtype != want.dtype:
        return True
    differs = unequal(plain, want)
    if want.is_floating_point() and want.element_size() > 1:
        differs &= ~(plain.isnan() & want.isnan()).contiguous().view(-1)
    return bool(differs.any())


def _run(rank: Rank, example: Example) -> tuple[str, str, Attempt]:
    """Returns the verdict, a description of a wrong result, and the outcome of the call."""
    communicator = rank.communicator("argument-fuzz", payload_bytes=1 << 20, timeout=30.0)
    verdicts = {SAME}
    returned: list[Any] = []
    with MODES[example.mode]():
        made = _made(rank, communicator, example)
        for change in example.changes:
            if change.argument not in made.arguments:
                continue
            if change.what == ALIASED:
                if _alias(example.overload, made.arguments, change, rank):
                    verdicts.add(RIGHT)
                continue
            changed = _changed(example, change, made.arguments[change.argument], rank)
            if changed is not None:
                verdicts.add(changed[0])
                made.arguments[change.argument] = changed[1]
        found = attempt(lambda: returned.append(_call(example, made.overload, made.arguments)))
    communicator.synchronize()
    wrong = ""
    if verdicts <= {SAME, RIGHT} and not found.error:
        # This does not hold if another rank's input has changed; `_judge` checks that.
        for got, want in zip(
            results_of(made.overload, returned[0], made.arguments), made.expected, strict=True
        ):
            if _unequal(got, want):
                wrong = "not the bits of the reference"
    assert works(rank, communicator), example
    verdict = next(verdict for verdict in reversed(VERDICTS) if verdict in verdicts)
    if any(change.what in ONLY_TRACED for change in example.changes):
        verdict = EITHER
    return verdict, wrong, replace(found, seconds=0.0, started=0.0)


# --- Strategies.


def _collective(draw: Any, op: str, world: int) -> Call:
    described = collectives.OPS[op]
    # Draw half of the dtypes from those that have conjugate or negative views.
    lazy = [name for name in ("float32", "complex64") if name in described.dtypes]
    dtype = draw(strategies.sampled_from(draw(strategies.sampled_from([described.dtypes, lazy]))))
    dims = draw(strategies.integers(described.least_dims, 3))
    shape = tuple(draw(strategies.integers(0, 5)) for _ in range(dims))
    forms = [form for form in described.forms if form in ("functional", "out", "inplace")]
    return collectives.Call(
        op=op,
        dtype=dtype,
        shape=shape,
        form=draw(strategies.sampled_from(forms)),
        style="random",
        reduce_op=draw(strategies.sampled_from(legal_ops(dtype) if described.reduces else ["sum"])),
        root=draw(strategies.integers(0, world - 1)),
        axis=draw(strategies.integers(-dims, dims - 1)) if dims else 0,
        algorithm=draw(strategies.sampled_from(["auto", *described.algorithms])),
        symmetric=draw(strategies.sampled_from(collectives.SYMMETRIC)),
        splits=draw(strategies.sampled_from(collectives.SPLITS)),
        layout=draw(strategies.sampled_from(["contiguous", "transposed", "sliced"])),
        seed=draw(strategies.integers(1, 5)),
    ).legal()


def _norm(draw: Any) -> Call:
    choose = draw(strategies.randoms(use_true_random=False))
    form = draw(strategies.sampled_from(["functional", "out"]))
    return replace(norms.random_call(choose, LARGEST), form=form).legal()


def _change(draw: Any, overload: Any) -> Change:
    arguments = overload._schema.arguments
    outs = [argument for argument in arguments if argument.alias_info is not None]
    argument = draw(strategies.sampled_from([*arguments, *outs * 4]))
    tensor = "Tensor" in str(argument.type) and "List" not in str(argument.type)
    what = sorted(TENSORS) if tensor else ["loose", "neutral", "wrong"]
    if argument in outs:
        places = ["lazy", "spread", "transposed", *[ALIASED] * argument.kwarg_only]
        what = draw(strategies.sampled_from([places, what]))
    return Change(
        argument.name,
        draw(strategies.sampled_from(what)),
        draw(strategies.integers(0, 20)),
    )


@strategies.composite
def examples(draw: Any, world: int) -> Example:
    op = draw(strategies.sampled_from((*collectives.NAMES, *norms.NAMES, *MAPS)))
    call: Call | str = op
    if op in MAPS:
        packet = getattr(torch.ops.collx, op)
        overload = getattr(packet, draw(strategies.sampled_from(["default", "out"])))
    else:
        call = _norm(draw) if op in norms.NAMES else _collective(draw, op, world)
        overload = call.overload(call.form)
    count = draw(strategies.sampled_from([0, 1, 1, 1, 2]))
    return Example(
        call,
        str(overload).removeprefix("collx."),
        tuple({c.argument: c for c in (_change(draw, overload) for _ in range(count))}.values()),
        draw(strategies.sampled_from(sorted(MODES))),
        draw(strategies.booleans()),
    )


AFTER_THE_LAUNCH = ("CollectiveTimeout", "CollectiveMismatch", "CommunicatorPoisoned")


def _judge(answers: list[tuple[str, str, Attempt]]) -> None:
    verdict = max((verdict for verdict, _, _ in answers), key=VERDICTS.index)
    for _, wrong, found in answers:
        assert found.error not in AFTER_THE_LAUNCH, found
        assert "INTERNAL ASSERT" not in found.message, found
        assert verdict not in (SAME, RIGHT) or not wrong
        assert verdict != SAME or not found.error, found
        assert verdict != REFUSED or found.error, "a wrong argument was taken"
    assert len({bool(found.error) for _, _, found in answers}) == 1, answers


@pytest.mark.worlds(2)
def test_an_argument_is_taken_as_the_reference_does_or_refused(pool: Pool) -> None:
    """For any replaced argument: no crash, no wrong bits, and the next call works."""
    usual = CALLS_SHARED if pool.takes_turns else CALLS[pool.world.device]
    for_all(
        examples(pool.size), usual, lambda example: _judge(pool.run(_run, example, deadline=120))
    )


def test_every_overload_can_be_drawn() -> None:
    """Every operator needs a valid call here, so that its arguments can be changed."""
    drawn = set()
    for op in collectives.NAMES:
        for form in {"functional", "out", "inplace"} & set(collectives.OPS[op].forms):
            drawn.add(collectives.Call(op).overload(form))
    for op in norms.NAMES:
        for keep_norm in (False, True)[: 1 + norms.quantizes(op)]:
            call = norms.Call(op, keep_norm=keep_norm)
            drawn |= {call.overload("functional"), call.overload("out")}
    for op in MAPS:
        drawn |= {getattr(torch.ops.collx, op).default, getattr(torch.ops.collx, op).out}
    not_collective = {torch.ops.collx.barrier.default, torch.ops.collx.epilogue.default}
    assert drawn == set(all_overloads()) - not_collective
