"""Fuses the pointwise ops after a reduction into an epilogue of the reduction.

    sum     the all-reduce, or the reduce-scatter
    chain   pointwise ops on the sum, on extras and on each other. Only the result of the last one
            is used outside of the chain:

                sum -> add(bias) -> mul(0.5) ---------> mul -> matmul
                                 -> erf ----> add(1) ->

An extra is a tensor of the sum's dtype that broadcasts to the sum. The result of each op is rounded
to the dtype that it has in the graph, as in the model.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from collx.compile.fusing import REDUCTIONS, positional
from collx.compile.matching import converted, equal, prune, value
from collx.epilogues.lowering import MOST_EXTRAS, MOST_STATEMENTS, Lowering, Refusal, accepts

__all__ = ["Chain", "Reduced", "chain_after", "put", "reductions"]

_aten = torch.ops.aten
_with_effects = torch.ops.higher_order.with_effects
_COMMUNICATING = ("collx", "_c10d_functional", "c10d")
_LAST_CASTS = 2  # maximum number of statements that round the result


class Reduced(NamedTuple):
    """A call of a reduction of collx. The pass inserted it, or the model called it. In the latter
    case it has an effect token."""

    call: Node
    result: Node
    op: OpOverload
    given: dict[str, Any]
    """The arguments by name."""
    token: Node | None

    @property
    def mapped(self) -> str:
        """The name of the operator that also takes an epilogue."""
        return f"{REDUCTIONS[self.op]}_map"


class Chain(NamedTuple):
    """Pointwise ops after a reduction."""

    last: Node
    text: str
    extras: list[Node]
    after: Node
    """The node after which all arguments of the fused operator are available."""
    names: list[str]
    """The names of the ops, without conversions."""


def reductions(graph: Graph) -> Iterator[Reduced]:
    """Yields the reductions of a graph, in graph order. The arguments are only read when a
    reduction is yielded: its input may be a node that replaced an earlier reduction."""
    for node in list(graph.nodes):
        if node.target in REDUCTIONS:
            yield _reduced(node, node, node.target, node.args, None)
        elif node.target is _with_effects and node.args[1] in REDUCTIONS:
            token, op, *arguments = node.args
            results = [user for user in node.users if user.args == (node, 1)]
            if results:
                yield _reduced(node, results[0], op, arguments, token)


def _reduced(call: Node, result: Node, op: Any, arguments: Sequence[Any], token: Any) -> Reduced:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, arguments, strict=False)), **call.kwargs}
    return Reduced(call, result, op, given, token)


def chain_after(reduced: Reduced, rounding: str) -> tuple[Chain | None, str]:
    """Returns the longest chain after a reduction, None if there is none, and the reason why it is
    not longer. The reason is "" if the next op is not a pointwise op.

    rounding: "model", or "fp32", which only rounds the final result."""
    growing = _Growing(reduced, rounding)
    waiting = list(reduced.result.users)
    heapq.heapify(waiting)  # in graph order
    known, why = set(waiting), ""
    while waiting and not why:
        node = heapq.heappop(waiting)
        if not accepts(node.target) or not isinstance(node.meta["val"], torch.Tensor):
            break
        try:
            growing.add(node)
        except Refusal as refusal:
            why = f"{_name(node)}: {refusal}"
        for user in node.users.keys() - known:
            known.add(user)
            heapq.heappush(waiting, user)
    return growing.chain(), why or growing.left_over()


class _Growing:
    """Collects consecutive pointwise ops after a reduction, and finds the longest chain of them."""

    def __init__(self, reduced: Reduced, rounding: str) -> None:
        self._sum = value(reduced.result)
        self._lowering = Lowering(self._sum.dtype if rounding == "fp32" else None)
        self._lowering.leaf(reduced.result, self._sum.dtype, "value")
        self._inside = {reduced.result}
        self._open = {reduced.result}  # nodes with users outside of _inside
        self._nodes: list[Node] = []
        self._extras: list[Node] = []
        self._after = reduced.call
        # The longest chain so far: its numbers of nodes and extras, and the node to insert after.
        self._length, self._takes, self._stands = 0, 0, reduced.call

    def add(self, node: Node) -> None:
        """Adds the next user of the nodes. Raises Refusal if it cannot be part of a chain."""
        made = value(node)
        if not equal(made.shape, self._sum.shape) or made.device != self._sum.device:
            raise Refusal("its result has another shape or device than the sum")
        for operand in node.all_input_nodes:
            if operand not in self._lowering.numbers:
                self._take(operand)
        if _rounds_an_operand(node):
            raise Refusal("its operand without dimensions has another dtype")
        self._lowering.node(node)
        if len(self._lowering.writer.types) > MOST_STATEMENTS - _LAST_CASTS:
            raise Refusal("the epilogue has its maximum length")
        self._nodes.append(node)
        self._inside.add(node)
        self._open.add(node)
        self._open -= {n for n in node.all_input_nodes if n.users.keys() <= self._inside}
        if self._open == {node} and not _widens(node):
            self._length, self._takes = len(self._nodes), len(self._extras)
            self._stands = self._after

    def chain(self) -> Chain | None:
        nodes = self._nodes[: self._length]
        if not nodes:
            return None
        last = nodes[-1]
        text = self._lowering.text(last, value(last).dtype)
        names = [_name(node) for node in nodes if converted(node) is None]
        return Chain(last, text, self._extras[: self._takes], self._stands, names)

    def left_over(self) -> str:
        """Returns why the last pointwise ops are not in the chain, "" if there is no reason."""
        if len(self._nodes) == self._length or len(self._open) == 1:
            return ""
        names = [_name(node) if node in self._nodes else "the sum" for node in sorted(self._open)]
        return f"the results of {', '.join(names)} are used elsewhere"

    def _take(self, operand: Node) -> None:
        """Adds an operand that is not computed from the sum: a number, an extra, or a converted
        extra. Raises Refusal if it is none of these."""
        tensor = operand.meta["val"]
        if not isinstance(tensor, torch.Tensor):
            raise Refusal("its operand is a size, or computed from sizes")
        if not _broadcasts(tensor.shape, self._sum.shape):
            raise Refusal("its operand does not broadcast to the sum")
        number = operand.args[1] if operand.target is _aten.full.default else None
        if isinstance(number, (bool, int, float)):
            self._lowering.constant(operand, number)
            return
        source = converted(operand) if tensor.dtype != self._sum.dtype else operand
        if source is None or value(source).dtype != self._sum.dtype:
            raise Refusal(f"its operand has dtype {tensor.dtype}, and the sum {self._sum.dtype}")
        if tensor.device != self._sum.device:
            raise Refusal(f"its operand is on {tensor.device}, and the sum on {self._sum.device}")
        if source not in self._lowering.numbers:
            self._take_extra(source)
        if source is not operand:
            self._lowering.node(operand)

    def _take_extra(self, source: Node) -> None:
        if len(self._extras) == MOST_EXTRAS:
            raise Refusal(f"it needs more than {MOST_EXTRAS} extras")
        node = self._after
        while node < source:
            node = node.next
            if _keeps_its_place(node):
                raise Refusal("its operand is computed after another collective")
        self._after = node
        self._lowering.leaf(source, self._sum.dtype, "extra", str(len(self._extras)))
        self._extras.append(source)


def put(graph: Graph, reduced: Reduced, chain: Chain) -> str:
    """Replaces a reduction and the chain after it with one operator. Returns "", or the reason if
    it cannot."""
    op = getattr(torch.ops.collx, reduced.mapped).default
    given = {**reduced.given, "expression": chain.text, "extras": chain.extras}
    arguments = positional(op, given)
    try:
        made = op(*torch.fx.map_arg(arguments, lambda node: node.meta["val"]))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as refusal:
        return str(refusal).splitlines()[0]
    if not equal(made.stride(), value(chain.last).stride()):
        return "its result is not contiguous"
    with graph.inserting_after(chain.after):
        if reduced.token is None:
            call = result = graph.call_function(op, arguments)
        else:
            call = graph.call_function(_with_effects, (reduced.token, op, *arguments))
    if reduced.token is not None:
        result = _with_token(graph, reduced.call, call, made)
    result.meta["val"] = made
    chain.last.replace_all_uses_with(result)
    prune(graph, [chain.last])
    if reduced.token is None:
        graph.erase_node(reduced.call)
    return ""


def _with_token(graph: Graph, old: Node, call: Node, made: torch.Tensor) -> Node:
    """Returns the result of `call`, which also creates a token. This token replaces that of
    `old`."""
    made_token, *_ = old.meta["val"]
    call.meta["val"] = (made_token, made)
    with graph.inserting_after(call):
        result = graph.call_function(operator.getitem, (call, 1))
        token = graph.call_function(operator.getitem, (call, 0))
    token.meta["val"] = made_token
    for user in list(old.users):
        if user.args == (old, 0):
            user.replace_all_uses_with(token)
            graph.erase_node(user)
    return result


def _keeps_its_place(node: Node) -> bool:
    """Whether a collective must not be moved past the node."""
    if node.target is _with_effects or node.is_impure():
        return True
    target = node.target
    return isinstance(target, OpOverload) and (
        target.namespace in _COMMUNICATING or target._schema.is_mutable
    )


def _widens(node: Node) -> bool:
    """Whether the node converts to a wider dtype. Inductor makes no copy for it, because it
    converts when it reads."""
    narrower = converted(node)
    return narrower is not None and value(node).itemsize > value(narrower).itemsize


def _rounds_an_operand(node: Node) -> bool:
    """Whether PyTorch converts an operand without dimensions to the dtype of another operand. If
    this rounds, it depends on the op and the device whether PyTorch computes with the result."""
    given = [value(operand) for operand in node.all_input_nodes]
    floats = [tensor for tensor in given if tensor.is_floating_point()]
    return any(
        a.dim() == 0 and a.dtype != b.dtype and a.itemsize >= b.itemsize
        for a in floats
        for b in floats
    )


def _broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(
        statically_known_true(size == 1) or statically_known_true(size == whole)
        for size, whole in pairs
    )


def _name(node: Node) -> str:
    return str(cast(OpOverload, node.target).overloadpacket.__name__)
