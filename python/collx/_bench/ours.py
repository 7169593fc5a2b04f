"""Implementations of collx: an algorithm on ordinary or symmetric tensors."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import collx
from collx._bench.call import Call, Kind
from collx._bench.implementation import PART_INSIDE, Implementation, ends_inside
from collx._bench.job import Case
from collx._bench.norm_case import NormCall, NormCase
from collx._bench.norm_problem import EPS
from collx._bench.op import Op
from collx._bench.ops import even_splits
from collx._bench.ops_norm import NormOp

EITHER_WAY = ("staged", "fallback")  # equally fast on ordinary and symmetric tensors


class Compiled:
    """Calls in compiled code. Every tenth call runs a graph of ten calls, because graphs of models
    contain many calls and entering a graph takes time."""

    IN_A_GRAPH = 10

    def __init__(
        self,
        operator: Callable[..., Tensor],
        x: Tensor,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        def calls(x: Tensor) -> list[Tensor]:
            return [operator(x, *arguments, **options) for _ in range(self.IN_A_GRAPH)]

        self._calls = partial(torch.compile(calls, fullgraph=True, dynamic=False), x)
        self._made = 0

    def __call__(self) -> None:
        if self._made % self.IN_A_GRAPH == 0:
            self._calls()
        self._made += 1


class Collx(Implementation):
    kind = Kind.OURS
    form = "operator, out"

    def __init__(self, algorithm: str, symmetric: bool, above: int, max_blocks: int) -> None:
        """`above`: sizes up to this number of bytes are not measured."""
        self.name = "collx-symmetric" if symmetric else "collx"
        self._algorithm = algorithm
        self._symmetric = symmetric
        self._above = above
        self._max_blocks = max_blocks

    @property
    def label(self) -> str:
        mark = "collx(sym)" if self._symmetric else "collx"
        return mark if self._algorithm == "auto" else f"{mark}:{self._algorithm}"

    def wanted(self, case: Case) -> bool:
        return case.nbytes > self._above

    def unfit(self, case: Case) -> str | None:
        if self._algorithm == "fallback" and case.job.device.type == "cuda":
            return "fallback is refused while a CUDA graph is captured"
        return None

    def prepare(self, case: Case) -> Call:
        x, y = self._empty(case, case.input_numel), self._empty(case, case.output_numel)
        operator = getattr(torch.ops.collx, case.op.name)
        run = partial(operator.out, x, *case.op.arguments(case), **self._options, out=y)
        return Call.of(case, run, x, y, algorithm=self._explained(case))

    def in_place(self, case: Case) -> Callable[[], Call] | None:
        if case.op.name == "alltoall" and self._algorithm == "direct":
            return None  # peers would overwrite data that has not been sent yet
        if hasattr(collx, f"{case.op.name}_"):
            return partial(self._prepare_in_place, case)
        if case.op.name in PART_INSIDE:
            return partial(self._prepare_part_inside, case)
        return None

    def _prepare_in_place(self, case: Case) -> Call:
        x = self._empty(case, case.numel)
        operator = getattr(torch.ops.collx, f"{case.op.name}_").default
        return Call.of(case, partial(operator, x, *case.op.arguments(case), **self._options), x, x)

    def _prepare_part_inside(self, case: Case) -> Call:
        x, y = ends_inside(case, self._empty(case, case.numel))
        operator = getattr(torch.ops.collx, case.op.name)
        run = partial(operator.out, x, *case.op.arguments(case), **self._options, out=y)
        return Call.of(case, run, x, y, in_place=True)

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        name, arguments, options = case.op.name, case.op.arguments(case), self._options
        x, y = self._empty(case, case.input_numel), self._empty(case, case.output_numel)
        case.load(x)
        splits = (even_splits(case),) * 2 if name == "alltoallv" else ()
        given: dict[str, Any] = {"reduce_op": case.reduce_op} if case.op.reduces else {}
        function = partial(
            getattr(collx, name),
            *(x, *splits),
            group=case.comm,
            **options,
            **given,
        )
        found: dict[str, Callable[[], object]] = {
            "operator, functional": partial(
                getattr(torch.ops.collx, name).default, x, *arguments, **options
            ),
            "function, out": partial(function, out=y),
            "function, functional": function,
            "operator, compiled by tens": Compiled(
                getattr(torch.ops.collx, name).default, x, arguments, options
            ),
        }
        if hasattr(collx, f"{name}_"):
            in_place = getattr(torch.ops.collx, f"{name}_").default
            found["operator, in place"] = partial(in_place, x, *arguments, **options)
            found["function, in place"] = partial(
                getattr(collx, f"{name}_"), *function.args, **function.keywords
            )
        return found

    @property
    def _options(self) -> dict[str, Any]:
        """The options that are not the default. Passed options must be converted, and function and
        operator should convert the same ones."""
        asked = {"algorithm": self._algorithm, "max_blocks": self._max_blocks}
        return {name: value for name, value in asked.items() if value not in ("auto", 0)}

    def _empty(self, case: Case, numel: int) -> Tensor:
        if not self._symmetric:
            return case.empty(numel)
        return case.comm.empty(numel, dtype=case.job.dtype)

    def _explained(self, case: Case) -> str:
        """Returns the algorithm that executes the call."""
        explanation = case.comm.explain(
            case.op.operator,
            case.shape,
            case.job.dtype,
            input_symmetric=self._symmetric,
            output_symmetric=self._symmetric,
            algorithm=self._algorithm,
            max_blocks=self._max_blocks,
        )
        return explanation.algorithm


class CollxDeviceSplits(Collx):
    """alltoallv with splits on the device. The capacity is the number of rows that arrive."""

    def __init__(self, algorithm: str, symmetric: bool, max_blocks: int) -> None:
        super().__init__(algorithm, symmetric, 0, max_blocks)
        self.name = self.name.replace("collx", "collx-device-splits", 1)

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        return {}

    @property
    def label(self) -> str:
        return super().label.replace("collx", "collx(device splits)", 1)

    def prepare(self, case: Case) -> Call:
        x, y = self._empty(case, case.input_numel), self._empty(case, case.output_numel)
        splits = torch.tensor(even_splits(case), device=case.job.device)
        arrived = torch.zeros_like(splits)
        run = partial(
            torch.ops.collx.alltoallv.device_splits_out,
            x,
            splits,
            case.output_numel,
            case.comm.name,
            **self._options,
            out=y,
            output_splits=arrived,
        )
        return Call.of(
            case,
            run,
            x,
            y,
            algorithm=self._explained(case),
            besides=lambda: int((arrived != splits).sum()),
        )


class CollxNorm(Collx):
    """A fused normalization."""

    def prepare(self, case: Case) -> NormCall:
        assert isinstance(case, NormCase)
        tensors, options, outputs = self._arguments(case)
        operator = getattr(torch.ops.collx, case.op.operator)
        run = partial(operator.out, *tensors, EPS, case.comm.name, **options, **outputs)
        results = tuple(outputs.values())
        return NormCall(
            run,
            lambda: case.load(tensors[0]),
            lambda: results[0],
            self._explained(case),
            results=lambda: results,
        )

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        assert isinstance(case, NormCase)
        tensors, options, outputs = self._arguments(case)
        case.load(tensors[0])
        operator = getattr(torch.ops.collx, case.op.operator).default
        function = self._function(case, tensors[0])
        out, *more = outputs.values()
        return {
            "operator, functional": partial(operator, *tensors, EPS, case.comm.name, **options),
            "function, out": partial(function, out=(out, *more) if more else out),
            "function, functional": function,
        }

    def _function(self, case: NormCase, x: Tensor) -> Callable[..., object]:
        """Returns the call of the Python function for the operator."""
        op, scale = case.op, case.problem.options.get("scale")
        assert isinstance(op, NormOp)
        return partial(
            collx.allreduce_rmsnorm,
            x,
            case.weight,
            EPS,
            case.comm,
            residual=case.residual,
            quantization=collx.Quantization(op.kind, scale_mode=op.scale_mode) if op.kind else None,
            scale=scale,
            **self._rounding(case),
            **self._options,
        )

    def _arguments(
        self, case: NormCase
    ) -> tuple[tuple[Tensor, ...], dict[str, Any], dict[str, Tensor]]:
        """Returns the tensor arguments, the options, and the outputs by name."""
        x = case.as_rows(self._empty(case, case.numel))
        tensors = (x, case.weight) if case.residual is None else (x, case.residual, case.weight)
        options = {**case.problem.options, **self._rounding(case), **self._options}
        named = zip(case.problem.op.results, case.wanted_results, strict=True)
        return tensors, options, {name: torch.empty_like(result) for name, result in named}

    def _rounding(self, case: NormCase) -> dict[str, Any]:
        rounding = case.problem.rounding
        return {} if rounding == "fp32" else {"rounding": rounding}

    def _explained(self, case: Case) -> str:
        """Returns the requested algorithm if the communicator cannot explain the operator."""
        try:
            return super()._explained(case)
        except ValueError:
            return self._algorithm


class CollxBarrier(Implementation):
    name = "collx"
    kind = Kind.OURS
    form = "operator"

    def prepare(self, case: Case) -> Call:
        nothing = case.empty(0)
        run = partial(torch.ops.collx.barrier.default, *case.op.arguments(case))
        return Call.of(case, run, nothing, nothing)


def chosen(options: argparse.Namespace, op: Op) -> list[Implementation]:
    """Returns the implementations: ordinary tensors and, where it makes a difference, symmetric
    ones; or only symmetric tensors."""
    if not op.has_tensor:
        return [CollxBarrier()]
    symmetric, max_blocks = options.symmetric, options.max_blocks
    made = CollxNorm if isinstance(op, NormOp) else Collx
    found: list[Implementation] = []
    for algorithm in _algorithms(options, op):
        only = symmetric or algorithm == op.symmetric_only
        if not only:
            found.append(made(algorithm, False, 0, max_blocks))
        if only or _gains(op, algorithm):
            above = 0 if only else op.symmetric_above
            found.append(made(algorithm, True, above, max_blocks))
        if op.name == "alltoallv":
            found.append(CollxDeviceSplits(algorithm, only, max_blocks))
    return found


def _algorithms(options: argparse.Namespace, op: Op) -> Sequence[str]:
    if options.algorithms != ["all"]:
        return list(options.algorithms)
    return ("auto", *op.algorithms(options.multicast))


def _gains(op: Op, algorithm: str) -> bool:
    """Whether peers can read or write symmetric tensors in place."""
    tried = op.algorithms() if algorithm == "auto" else (algorithm,)
    return any(name not in EITHER_WAY for name in tried)
