"""Helpers for matching patterns in a graph of ATen operators."""

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
    "equal",
    "in_float32",
    "is_contiguous",
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
    """Returns the input of a conversion, None for other nodes."""
    return cast(Node, node.args[0]) if node.target in CONVERTS else None


def in_float32(node: Node) -> Iterator[Node]:
    """Yields the float32 forms of a tensor: itself if it is float32, and its conversions."""
    if value(node).dtype == torch.float32:
        yield node
    for user in node.users:
        if converted(user) is node and value(user).dtype == torch.float32:
            yield user


def only_user(node: Node, *targets: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def other_operand(node: Node, known: Node, target: Any) -> Node | None:
    """Returns the operand other than `known` of an addition, product or similar of two tensors."""
    if node.target is not target or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    other = b if a is known else a if b is known else None
    return other if isinstance(other, Node) else None


def constant(node: Node, *targets: Any) -> float | None:
    """Returns the constant operand of a node with one of these targets, None if there is none."""
    if node.target not in targets or node.kwargs or len(node.args) != 2:
        return None
    number = node.args[1]
    return float(number) if isinstance(number, (int, float)) else None


def is_last(dims: Any, node: Node) -> bool:
    """Whether these dimensions are exactly the last dimension of `node`."""
    given = list(dims) if isinstance(dims, Sequence) else [dims]
    last = value(node).dim() - 1
    return given in ([last], [-1])


def alike(a: Node, b: Node) -> bool:
    x, y = value(a), value(b)
    return equal(x.shape, y.shape) and x.dtype == y.dtype


def equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are equal. They may be symbolic; the comparison adds no guards."""
    # This module imports the compiler, which `import collx` must not do.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor has the strides of a new tensor. The comparison adds no guards."""
    return equal(tensor.stride(), tensor.new_empty(tensor.shape).stride())


def prune(graph: Graph, nodes: Sequence[Node]) -> None:
    """Erases the nodes that have no users, and those that lose their last user by it. Only visits
    the parts of a pattern, not the whole graph."""
    waiting, gone = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in gone or node.users or node.op != "call_function" or node.is_impure():
            continue
        waiting += node.all_input_nodes
        graph.erase_node(node)
        gone.add(node)
