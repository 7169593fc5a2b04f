"""Steps from node to node of a graph of ATen operators, for what looks for patterns in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

__all__ = [
    "CONVERTS",
    "alike",
    "constant",
    "converted",
    "in_float32",
    "is_last",
    "only_user",
    "other_operand",
    "prune",
    "value",
]

CONVERTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def value(node: Node) -> torch.Tensor:
    return cast(torch.Tensor, node.meta["val"])


def converted(node: Node) -> Node | None:
    """What a conversion converts."""
    return cast(Node, node.args[0]) if node.target in CONVERTS else None


def in_float32(node: Node) -> Iterator[Node]:
    """A tensor in float32: itself, and the conversions to it."""
    if value(node).dtype == torch.float32:
        yield node
    for user in node.users:
        if converted(user) is node and value(user).dtype == torch.float32:
            yield user


def only_user(node: Node, *targets: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def other_operand(node: Node, known: Node, target: Any) -> Node | None:
    """The operand beside `known` of an addition or a product of two tensors."""
    if node.target is not target or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    other = b if a is known else a if b is known else None
    return other if isinstance(other, Node) else None


def constant(node: Node, *targets: Any) -> float | None:
    """The number that such an operator has beside its tensor."""
    if node.target not in targets or node.kwargs or len(node.args) != 2:
        return None
    number = node.args[1]
    return float(number) if isinstance(number, (int, float)) else None


def is_last(dims: Any, node: Node) -> bool:
    """Whether a reduction of `node` over these dimensions is one over its rows."""
    given = list(dims) if isinstance(dims, Sequence) else [dims]
    last = value(node).dim() - 1
    return given in ([last], [-1])


def alike(a: Node, b: Node) -> bool:
    x, y = value(a), value(b)
    return bool(x.shape == y.shape and x.dtype == y.dtype)


def prune(graph: Graph, nodes: Sequence[Node]) -> None:
    """Erases nodes without users, and nodes that have no users afterwards: the parts of a pattern,
    without a look at the whole graph."""
    waiting, gone = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in gone or node.users or node.op != "call_function" or node.is_impure():
            continue
        waiting += node.all_input_nodes
        graph.erase_node(node)
        gone.add(node)
