"""Fuses a matrix product and the adjacent collective into one operator that overlaps them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node

from collx.compile.matching import equal, only_user, prune, value

__all__ = ["COLLECTIVES", "overlap"]

_aten = torch.ops.aten
_ops = torch.ops.collx
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)

COLLECTIVES = (_ops.allgather.default, _ops.reducescatter.default)
"""The collectives that can be fused with an adjacent product."""


def overlap(graph: Graph, node: Node) -> str:
    """Replaces an all-gather and the product after it, or a reduce-scatter and the product before
    it. Returns the name of the operator, or "" if there is no such product.

    Raises:
        ValueError: there is such a product, but it cannot be fused. The message has the reason."""
    if node.target is _ops.allgather.default:
        return _gathered(graph, node)
    return _reduced(graph, node)


def _gathered(graph: Graph, node: Node) -> str:
    product = only_user(node, _aten.mm.default, *_RESHAPES)
    if product is not None and product.target in _RESHAPES:
        flattens = value(product).dim() == 2 and _same_rows(product, node)
        product = only_user(product, _aten.mm.default) if flattens else None
    forms = (node, *node.users)
    if product is None or product.args[0] not in forms or product.args[1] in forms:
        return ""
    _require(len(node.args) == 3 and not node.kwargs, "the all-gather has other arguments")
    given, size, name = node.args
    between = node.next
    while between is not product:
        _require(not _communicates(between), "another collective stands between")
        between = between.next
    with graph.inserting_before(product):
        rows = _flat(graph, cast(Node, given))
        made = _call(graph, _ops.allgather_matmul.default, rows, product.args[1], size, name)
    product.replace_all_uses_with(made)
    gathered = cast(Node, product.args[0])
    graph.erase_node(product)
    if gathered is not node:  # a reshaped view
        graph.erase_node(gathered)
    graph.erase_node(node)
    return "allgather_matmul"


def _reduced(graph: Graph, node: Node) -> str:
    given = cast(Node, node.args[0])
    product = given
    if given.target in _RESHAPES and len(given.users) == 1:
        product = cast(Node, given.args[0])
        if value(product).dim() != 2 or not _same_rows(product, given):
            return ""
    if product.target is not _aten.mm.default or len(product.users) != 1:
        return ""
    _require(len(node.args) == 4 and not node.kwargs, "the reduce-scatter has other arguments")
    _, reduce_op, size, name = node.args
    _require(reduce_op == "sum", f"the reduction is {reduce_op}, not sum")
    count = value(given).size(0)
    _require(isinstance(count, int) and count % cast(int, size) == 0, "parts are not equal")
    left, right = product.args
    shape = list(value(node).shape)
    with graph.inserting_before(node):
        made = _call(graph, _ops.matmul_reducescatter.default, left, right, size, name)
        if len(shape) != 2:
            reshaped = graph.call_function(_aten.reshape.default, (made, shape))
            reshaped.meta["val"] = value(node)
            made = reshaped
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    prune(graph, [given])
    return "matmul_reducescatter"


def _same_rows(a: Node, b: Node) -> bool:
    """Whether a reshape of one to the other keeps the rows."""
    x, y = value(a), value(b)
    return min(x.dim(), y.dim()) > 1 and equal(x.shape[-1:], y.shape[-1:])


def _flat(graph: Graph, node: Node) -> Node:
    if value(node).dim() == 2:
        return node
    flat = value(node).flatten(0, -2)
    cols: Any = flat.shape[-1]
    if not isinstance(cols, int):  # a symbol cannot be an argument, only a node that reads it
        cols = graph.call_function(_aten.sym_size.int, (node, value(node).dim() - 1))
        cols.meta["val"] = flat.shape[-1]
    made = graph.call_function(_aten.reshape.default, (node, [-1, cols]))
    made.meta["val"] = flat
    return made


def _call(graph: Graph, op: Any, *arguments: Any) -> Node:
    result = op(*torch.fx.map_arg(arguments, lambda node: node.meta["val"]))  # may raise
    made = graph.call_function(op, arguments)
    made.meta["val"] = result
    return made


def _communicates(node: Node) -> bool:
    called = node.args[1] if node.target is torch.ops.higher_order.with_effects else node.target
    return getattr(called, "namespace", "") in ("collx", "_c10d_functional")


def _require(fits: bool, why: str) -> None:
    if not fits:
        raise ValueError(why)
