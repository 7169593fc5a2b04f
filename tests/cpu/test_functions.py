"""Tests which calls of the Python functions the extension handles itself, and which it passes to
the Python twins."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import collx
from collx import Quantization
from collx._extension import extension
from collx.ops import arguments
from collx.ops.functions import built_in, twins


class Subclass(torch.Tensor):
    pass


class Text(str):
    pass


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


X = rows(2, 16)
WEIGHT = rows(16)
SPLITS = rows(4, dtype=torch.int64)
Q = rows(2, 16, dtype=torch.float8_e4m3fn)
MINE = X.as_subclass(Subclass)
FP8_ROWS = Quantization("fp8")
FP8_GROUPS = Quantization("fp8", scale_mode="group", quant_group_size=16)
NOT_INTERNED = "".join(["algo", "rithm"])


class Counting:
    """A built-in function like collx's own that counts the calls that it passes to its twin."""

    def __init__(self, name: str) -> None:
        self.calls = 0
        self._twin = twins[name]
        signature = inspect.signature(getattr(collx, name))
        parameters = signature.parameters.values()
        namespace: dict[str, Any] = {}
        exec(f"def {name}{signature}: pass", namespace)
        self.function = extension.built_in(
            name=name,
            module=__name__,
            doc="",
            names=tuple(p.name for p in parameters),
            defaults=tuple(... if p.default is p.empty else p.default for p in parameters),
            positional=sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters),
            declaration=namespace[name],
            twin=self.twin,
            conversions=arguments,
        )

    def twin(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return self._twin(*given, **named)


COUNTING: dict[str, Counting] = {}


@pytest.fixture
def counting() -> Callable[[str], Counting]:
    """Returns a function that returns the Counting of a name. Each name has only one, because
    built-in functions are never freed."""

    def get(name: str) -> Counting:
        if name not in COUNTING:
            COUNTING[name] = Counting(name)
        COUNTING[name].calls = 0
        return COUNTING[name]

    return get


PLAIN = [
    ("allreduce", (X,), {"group": "nobody"}),
    ("allreduce", (X, "max", "nobody"), {"out": rows(2, 16), "max_blocks": 2}),
    ("allreduce", (X, torch.distributed.ReduceOp.MAX, "nobody"), {NOT_INTERNED: "oneshot_push"}),
    ("allreduce", (X, "sum", "nobody"), {"epilogue": torch.relu}),
    ("allreduce", (X, "sum", "nobody"), {"epilogue": torch.add, "extras": [X], "out": rows(2, 16)}),
    ("allreduce", (X, "sum", "nobody"), {"epilogue": torch.add, "extras": (2.0,)}),
    ("allreduce_", (torch.nn.Parameter(X, requires_grad=False), "sum", "nobody"), {}),
    ("alltoallv", (X, [1, 1], (1, 1), "nobody"), {}),
    ("alltoallv", (X,), {"group": "nobody", "device_splits": SPLITS, "capacity": 3}),
    (
        "alltoallv",
        (X, rows(4, dtype=torch.int64), None, "nobody"),
        {"device_splits": SPLITS, "capacity": 3, "out": rows(3, 16)},
    ),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"rounding": "parity"}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1, "nobody"), {"residual": X, "out": [rows(2, 16), X]}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"epilogue": torch.add, "extras": [X]}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"quantization": "fp8", "keep_norm": True}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"quantization": FP8_GROUPS}),
    (
        "allreduce_rmsnorm",
        (X, WEIGHT, 1e-6, "nobody"),
        {"quantization": Quantization("int8", scale_mode="tensor"), "scale": rows(1)},
    ),
]


@pytest.mark.parametrize(("name", "given", "named"), PLAIN)
def test_plain_arguments_go_to_the_operator(
    counting: Callable[[str], Counting], name: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    ours = counting(name)
    returned, wanted = ours.function(*given, **named), twins[name](*given, **named)
    assert ours.calls == 0
    assert type(returned) is type(wanted)
    if named.get("out") is not None and name != "alltoallv":
        assert returned is named["out"]
    elif name.endswith("_"):
        assert returned is given[0]
    else:
        made, expected = (r if isinstance(r, tuple) else (r,) for r in (returned, wanted))
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in expected]


def test_threads_that_call_a_function_have_their_own_quantization() -> None:
    """The trace of an epilogue lets the other thread run in the middle of a call."""
    norm = partial(collx.allreduce_rmsnorm, X, WEIGHT, 1e-6, "nobody")
    done = threading.Event()

    def call_with_another() -> None:
        while not done.is_set():
            norm(quantization=Quantization("fp8", fp8_dtype="e5m2"))

    other = threading.Thread(target=call_with_another)
    other.start()
    try:
        dtypes = {
            norm(quantization=Quantization("fp8"), epilogue=lambda v, i=i: v * i)[0].dtype
            for i in range(50)
        }
    finally:
        done.set()
        other.join()
    assert dtypes == {torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("allreduce", (MINE, "sum", "nobody"), {}),
        ("allreduce", (X, "sum", "nobody"), {"out": rows(2, 16).as_subclass(Subclass)}),
        ("allreduce", (X, "sum", "nobody"), {"epilogue": torch.add, "extras": [MINE]}),
        ("allreduce", (X, "sum", "nobody"), {"algorithm": Text("auto")}),
        ("allreduce", (X, "sum", "nobody"), {"extras": []}),
        ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"keep_norm": 0}),
        ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"residual": MINE}),
    ],
)
def test_other_arguments_go_to_the_twin(
    counting: Callable[[str], Counting], name: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    ours = counting(name)
    ours.function(*given, **named)
    assert ours.calls == 1


def test_a_mode_sees_the_overload() -> None:
    class Seeing(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Seeing():
        collx.allreduce(X, "sum", "nobody")
    assert torch.ops.collx.allreduce.default in seen


def test_the_last_text_is_not_taken_for_another_one(
    counting: Callable[[str], Counting],
) -> None:
    ours = counting("allreduce_rmsnorm")
    for _ in range(2):
        for word in ("fp32", "parity", "".join(["par", "ity"])):
            ours.function(X, WEIGHT, 1e-6, "nobody", rounding=word)
        with pytest.raises(ValueError, match="rounding: got"):
            ours.function(X, WEIGHT, 1e-6, "nobody", rounding="parity?")
    assert ours.calls == 0


def test_the_last_quantization_is_not_taken_for_another_one(
    counting: Callable[[str], Counting],
) -> None:
    ours = counting("allreduce_rmsnorm")
    shapes = {FP8_ROWS: (2,), FP8_GROUPS: (2, 1), "fp8": (2,), "int8": (2,)}
    for _ in range(2):
        for quantization, shape in shapes.items():
            q, scale = ours.function(X, WEIGHT, 1e-6, "nobody", quantization=quantization)
            assert scale.shape == shape
            assert (q.dtype == torch.int8) == (quantization == "int8")
            with pytest.raises(ValueError, match="kind"):
                ours.function(X, WEIGHT, 1e-6, "nobody", quantization="fp9")
            with pytest.raises(TypeError, match="quantization: got 8; accepted: "):
                ours.function(X, WEIGHT, 1e-6, "nobody", quantization=8)
    assert ours.calls == 0


REFUSED = [
    ("allreduce", (X, 5, "nobody"), {}),
    ("allreduce", (X, "nonsense", "nobody"), {}),
    ("allreduce", (X, "sum", 5), {}),
    ("allreduce", (X, "sum", []), {}),
    ("allreduce", ("x", "sum", "nobody"), {}),
    ("allreduce", (X, "sum", "nobody"), {"algorithm": 5}),
    ("allreduce", (X, "sum", "nobody"), {"max_blocks": "many"}),
    ("allreduce", (X, "sum", "nobody"), {"max_blocks": 2**70}),
    ("allreduce", (X, "sum", "nobody"), {"out": (rows(2, 16),)}),
    ("allreduce", (X, "sum", "nobody"), {"out": rows(3)}),
    ("allreduce", (X, "sum", "nobody"), {"index": True}),
    ("allreduce", (X, "sum", "nobody"), {"extras": [X]}),
    ("allreduce", (X, "sum", "nobody"), {"epilogue": torch.add, "extras": [[X]]}),
    ("allreduce", (X.to(torch.complex64), "sum", "nobody"), {}),
    ("allgather", (X, "nobody"), {}),
    ("alltoallv", (X, [1, 1], None, "nobody"), {}),
    ("alltoallv", (X, [1, "1"], [1, 1], "nobody"), {}),
    ("alltoallv", (X, None, [1], "nobody"), {"device_splits": SPLITS, "capacity": 3}),
    ("alltoallv", (X, None, None, "nobody"), {"device_splits": SPLITS}),
    ("alltoallv", (X, [2], None, "nobody"), {"device_splits": SPLITS, "capacity": 3, "out": X}),
    ("alltoallv", (X, SPLITS, None, "nobody"), {"device_splits": SPLITS, "capacity": 3}),
    ("allreduce_rmsnorm", (X, WEIGHT, "1", "nobody"), {}),
    ("allreduce_rmsnorm", (X, None, 1e-6, "nobody"), {}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"keep_norm": True}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"quantization": torch.float8_e4m3fn}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"scale": rows(1)}),
    ("allreduce_rmsnorm", (X, WEIGHT, 1e-6, "nobody"), {"out": (X, X)}),
    ("reducescatter_rmsnorm", (X, None, WEIGHT, 1e-6, "nobody"), {}),
    ("reducescatter_rmsnorm", (X, X, WEIGHT, 1e-6, "nobody"), {"quantization": "int8"}),
]


@pytest.mark.parametrize(("name", "given", "named"), REFUSED)
def test_refusals_are_those_of_the_twin(
    name: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as wanted:
        twins[name](*given, **named)
    with pytest.raises(wanted.type) as got:
        getattr(collx, name)(*given, **named)
    assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((), {}, "missing 1 required positional argument: 'input'"),
        ((X, "sum", "nobody", X), {}, "takes from 1 to 3 positional arguments but 4 were given"),
        ((X,), {"input": X}, "got multiple values for argument 'input'"),
        ((X,), {"outs": X}, "got an unexpected keyword argument 'outs'"),
    ],
)
def test_a_wrong_number_or_name_is_refused_in_the_words_of_python(
    given: tuple[Any, ...], named: dict[str, Any], words: str
) -> None:
    for function in (collx.allreduce, twins["allreduce"]):
        with pytest.raises(TypeError) as got:
            function(*given, **named)
        assert words in str(got.value)


def test_each_is_a_built_in_function_of_its_module() -> None:
    assert len(twins) == 17
    for name in twins:
        function = getattr(collx, name)
        assert inspect.isbuiltin(function)
        assert (function.__name__, function.__qualname__) == (name, name)
        assert "algorithm" in inspect.signature(function).parameters or name == "barrier"
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__doc__


def test_a_declaration_without_a_parameter_of_the_operator_is_refused() -> None:
    def broadcast(input: torch.Tensor, group: Any = None) -> None:
        pass

    with pytest.raises(ValueError, match="needs a parameter root"):
        built_in(broadcast)

    def unknown(input: torch.Tensor) -> None:
        pass

    with pytest.raises(ValueError, match="no operator"):
        built_in(unknown)


def test_a_call_without_a_process_group_names_the_remedy() -> None:
    remedy = "call torch.distributed.init_process_group and collx.init first"
    for call in (collx.barrier, collx.get, partial(collx.allreduce, X)):
        with pytest.raises(ValueError, match=remedy):
            call()
