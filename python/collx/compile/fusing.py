"""Replaces a reduction in a graph, and the ops after it, with a fused operator."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from collx.compile.matching import CONVERTS, is_contiguous, prune, value
from collx.compile.norms import Norm
from collx.compile.quantization import Quantized

__all__ = ["REDUCTIONS", "fuse", "operator_for", "positional"]

_aten = torch.ops.aten
_ops = torch.ops.collx

REDUCTIONS: dict[Any, str] = {
    _ops.allreduce.default: "allreduce",
    _ops.reducescatter.default: "reducescatter",
}
"""The reductions that can be fused with a norm, and their names within the operators' names."""


def operator_for(reduced: Node, norm: Norm, quantized: Quantized | None) -> str:
    """Returns the name that the fused operator has if it exists."""
    residual = "" if norm.residual is None else "_residual"
    quantization = "" if quantized is None else f"_{quantized.kind}"
    return f"{REDUCTIONS[reduced.target]}{residual}_{norm.kind}{quantization}"


def fuse(
    graph: Graph, reduced: Node, norm: Norm, quantized: Quantized | None, rounding: str
) -> str:
    """Replaces a reduction, its norm and the quantization with the fused operator. Returns "", or
    the reason if it cannot."""
    name = operator_for(reduced, norm, quantized)
    if not hasattr(_ops, name):
        return f"there is no {name}"
    if reduced.args[1] != "sum":
        return f"the reduction is {reduced.args[1]}, not sum"
    given: dict[str, Any] = {
        "input": reduced.args[0],
        "residual": norm.residual,
        "weight": norm.weighted.weight,
        "bias": norm.weighted.bias,
        "eps": norm.eps,
        "group_name": reduced.args[-1],
        "weight_offset": norm.weighted.offset,
        "rounding": rounding,
        **({} if quantized is None else quantized.options),
    }
    for what, node in given.items():
        # The call is inserted at the position of the sum.
        if isinstance(node, Node) and not node < norm.acc:
            return f"the {what} is computed after the sum"
    replaced = _replaced(norm, quantized)
    if not all(old is None or is_contiguous(value(old)) for old in replaced):
        return "its result is not contiguous"
    made = _Made(graph, norm.acc)
    try:
        if norm.kind == "layernorm" and norm.weighted.bias is None:
            given["bias"] = made.negative_zeros(norm.weighted.weight)
        leading = _leading(reduced)
        if leading:
            for what in ("input", "residual"):
                rows = (-1, value(reduced).shape[-1])
                given[what] = made.call(_aten.reshape.default, given[what], rows)
        keep_norm = quantized is not None and quantized.keeps_norm
        op = getattr(getattr(_ops, name), "keep_norm" if keep_norm else "default")
        results = made.results(op, positional(op, given))
        fitting = [
            (old, made.like(old, new, leading))
            for old, new in zip(replaced, results, strict=True)
            if old is not None
        ]
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as refusal:
        prune(graph, made.nodes[::-1])
        return str(refusal).splitlines()[0]
    for old, new in fitting:
        old.replace_all_uses_with(new)
    prune(graph, [old for old, _ in fitting])
    graph.erase_node(reduced)
    return ""


def _replaced(norm: Norm, quantized: Quantized | None) -> list[Node | None]:
    """Returns the nodes that the results of the fused operator replace, in order."""
    acc = [] if norm.residual is None else [norm.acc]
    if quantized is None:
        return [norm.weighted.result, *acc]
    kept = [norm.weighted.result] if quantized.keeps_norm else []
    return [quantized.q, quantized.scale, *acc, *kept]


def positional(op: OpOverload, given: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments in the order of the schema, without trailing defaults."""
    schema = op._schema.arguments
    named = [i for i, argument in enumerate(schema) if argument.name in given]
    return tuple(given.get(a.name, a.default_value) for a in schema[: named[-1] + 1])


def _leading(reduced: Node) -> list[int]:
    """Returns the leading dimensions to flatten, because the fused reduce-scatters only take
    matrices. Returns an empty list if no flattening is needed."""
    *leading, cols = value(reduced).shape
    if REDUCTIONS[reduced.target] != "reducescatter" or len(leading) < 2:
        return []
    sizes = [size if isinstance(size, int) else -1 for size in leading]
    if sizes.count(-1) > 1 or not isinstance(cols, int):
        raise ValueError("more than one dimension is dynamic")
    return sizes


class _Made:
    """Creates nodes before a given node."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.nodes: list[Node] = []
        self._graph = graph
        self._before = before

    def call(self, op: Any, *arguments: Any) -> Node:
        made = op(*torch.fx.map_arg(arguments, lambda node: node.meta["val"]))
        return self._added(made, op, arguments)

    def negative_zeros(self, weight: Node) -> Node:
        """Returns a bias that changes no value. A bias of +0 would turn -0 into +0."""
        made = value(weight).new_full(value(weight).shape, -0.0)
        if not isinstance(made.shape[0], int):
            raise ValueError("the columns are dynamic, and there is no bias")
        options = {"dtype": made.dtype, "layout": made.layout, "device": made.device}
        return self._added(
            made, _aten.full.default, ([made.shape[0]], -0.0), {**options, "pin_memory": False}
        )

    def results(self, op: OpOverload, arguments: tuple[Any, ...]) -> list[Node]:
        node = self.call(op, *arguments)
        if isinstance(node.meta["val"], torch.Tensor):
            return [node]
        return [self.call(operator.getitem, node, n) for n in range(len(node.meta["val"]))]

    def like(self, old: Node, new: Node, leading: list[int]) -> Node:
        """Converts a result to the shape and dtype of the node that it replaces."""
        if leading:
            new = self.call(_aten.reshape.default, new, (*leading, *value(new).shape[1:]))
        if value(new).dim() < value(old).dim():
            new = self.call(_aten.unsqueeze.default, new, -1)
        elif value(new).dim() > value(old).dim():
            new = self.call(_aten.squeeze.dim, new, -1)
        if value(new).dtype != value(old).dtype:
            new = self.call(CONVERTS[0], new, value(old).dtype)
        return new

    def _added(
        self, made: Any, op: Any, arguments: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, arguments, options)
        node.meta["val"] = made
        self.nodes.append(node)
        return node
