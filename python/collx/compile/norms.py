"""Normalizations in a graph, behind an all-reduce, as models of several libraries spell them.

What is looked for, in the graph of ATen operators that AOTAutograd leaves:

    sum     the all-reduce
    acc     sum, or sum + residual
    wide    acc in float32
    norm    rsqrt(mean(wide ** 2) + eps)
    y       torch.nn.RMSNorm     dtype((wide * norm) * weight)
            LlamaRMSNorm         weight * dtype(wide * norm)
            Gemma's              dtype((wide * norm) * (1 + float32(weight)))

The conversions are there where the dtype is not float32. Operands may stand in either order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

__all__ = ["Norm", "fuse", "norm_behind"]

_aten = torch.ops.aten
_ADDS = (_aten.add.Tensor, _aten.add.Scalar)
_CONVERTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)


class Weighted(NamedTuple):
    """How what has been normalized is multiplied by the weight."""

    result: Node
    weight: Node
    offset: float
    """What is added to the weight."""
    rounding: str
    """Where that rounds: "parity", or "parity_weight"."""


class Norm(NamedTuple):
    """A normalization of an all-reduce's result."""

    acc: Node
    """The sum, with the residual added if there is one."""
    residual: Node | None
    eps: float
    weighted: Weighted


def norm_behind(reduced: Node) -> Norm | str:
    """The normalization of a reduction's result; or why there is none, "" where nothing is like
    one."""
    acc, residual = reduced, None
    if len(reduced.users) == 1:
        (user,) = reduced.users
        other = _other_operand(user, reduced, _aten.add.Tensor)
        if other is not None and _alike(other, reduced):
            acc, residual = user, other
    dtype = acc.meta["val"].dtype
    for wide in _as_float32(acc):
        scaled = _scaled(wide)
        if isinstance(scaled, str):
            return scaled
        if scaled is not None:
            normalized, eps = scaled
            found = _weighted(normalized, dtype)
            if isinstance(found, str):
                return found
            if residual is None and not _uses_within(acc, wide, normalized):
                return "the sum has other uses than the norm, and no residual is added to it"
            return Norm(acc, residual, eps, found)
    return ""


def fuse(graph: Graph, reduced: Node, norm: Norm, rounding: str) -> str:
    """Puts the fused operator in the place of an all-reduce and its norm; or says why it cannot."""
    _, reduce_op, name = reduced.args[:3]
    weighted = norm.weighted
    if reduce_op != "sum":
        return f"the reduction is {reduce_op}, not sum"
    if not weighted.weight < norm.acc:
        return "the weight is computed behind the sum"
    given = [reduced.args[0], weighted.weight, norm.eps, name, weighted.offset, rounding]
    op = torch.ops.collx.allreduce_rmsnorm.default
    if norm.residual is not None:
        op = torch.ops.collx.allreduce_residual_rmsnorm.default
        given.insert(1, norm.residual)
    try:
        made = op(*torch.fx.map_arg(tuple(given), lambda node: node.meta["val"]))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as refusal:
        return str(refusal).splitlines()[0]
    with graph.inserting_before(norm.acc):
        fused = graph.call_function(op, tuple(given))
        fused.meta["val"] = made
        results = [fused]
        if norm.residual is not None:
            results = [graph.call_function(operator.getitem, (fused, n)) for n in range(2)]
            for n, node in enumerate(results):
                node.meta["val"] = made[n]
    for old, new in zip((weighted.result, norm.acc), results, strict=False):
        old.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    graph.erase_node(reduced)
    return ""


def _as_float32(acc: Node) -> Iterator[Node]:
    if acc.meta["val"].dtype == torch.float32:
        yield acc
    for user in acc.users:
        if _converted(user) is acc and user.meta["val"].dtype == torch.float32:
            yield user


def _scaled(wide: Node) -> tuple[Node, float] | str | None:
    """wide * rsqrt(mean(wide ** 2) + eps), and eps."""
    for square in wide.users:
        if square.target is not _aten.pow.Tensor_Scalar or square.args[1] != 2:
            continue
        mean = _only_user(square, _aten.mean.dim)
        if mean is None:
            return "the squares have other uses than their mean"
        last = wide.meta["val"].dim() - 1
        dims = [d % (last + 1) for d in cast(Sequence[int], mean.args[1])]
        if dims != [last] or mean.args[2:3] != (True,):
            return f"the mean is over dimensions {dims}, not the last"
        added = next((_only_user(mean, add) for add in _ADDS if _only_user(mean, add)), None)
        if added is None or not isinstance(added.args[1], (int, float)):
            return "what is added to the mean is no constant"
        root = _only_user(added, _aten.rsqrt.default)
        if root is None or len(root.users) != 1:
            return "the mean with eps has other uses than its rsqrt"
        (product,) = root.users
        if _other_operand(product, root, _aten.mul.Tensor) is not wide:
            return "the rsqrt scales another tensor"
        return product, float(added.args[1])
    return None


def _uses_within(acc: Node, wide: Node, normalized: Node) -> bool:
    """Whether nothing but the norm uses the sum."""
    inner = {node for node in wide.users if node.target is _aten.pow.Tensor_Scalar} | {normalized}
    return set(wide.users) <= inner and (acc is wide or set(acc.users) == {wide})


def _weighted(normalized: Node, dtype: torch.dtype) -> Weighted | str:
    if len(normalized.users) != 1:
        return "the normalized tensor is used before it is weighted"
    (user,) = normalized.users
    # Without a dtype to round to, the order of the products is what there is to keep.
    rounding = "parity_weight" if dtype == torch.float32 else "parity"
    if _converted(user) is normalized and dtype != torch.float32:
        if len(user.users) != 1 or user.meta["val"].dtype != dtype:
            return "the normalized tensor is rounded otherwise, or used before it is weighted"
        rounding, normalized = "parity_weight", user
        (user,) = user.users
    given = _other_operand(user, normalized, _aten.mul.Tensor)
    if given is None:
        return "the normalized tensor is not weighted"
    weight, offset = _weight(given)
    value = weight.meta["val"]
    if value.dim() != 1 or value.shape[0] != normalized.meta["val"].shape[-1]:
        return "the weight is no vector of the last dimension"
    if value.dtype not in (dtype, torch.float32):
        return f"the weight is {value.dtype}, the tensor {dtype}"
    result = user
    if dtype != torch.float32 and user.meta["val"].dtype != dtype:
        converted = _only_user(user, *_CONVERTS)
        if converted is None or converted.meta["val"].dtype != dtype:
            return "the weighted tensor is not rounded to the dtype of the sum"
        result = converted
    return Weighted(result, weight, offset, rounding)


def _weight(given: Node) -> tuple[Node, float]:
    """The weight, and the constant that is added to it."""
    offset = 0.0
    if given.target in _ADDS and isinstance(given.args[1], (int, float)):
        offset, given = float(given.args[1]), cast(Node, given.args[0])
    before = _converted(given)
    if before is not None and given.meta["val"].dtype == torch.float32:
        given = before
    return given, offset


def _converted(node: Node) -> Node | None:
    """What a conversion converts."""
    return cast(Node, node.args[0]) if node.target in _CONVERTS else None


def _only_user(node: Node, *targets: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _other_operand(node: Node, known: Node, target: Any) -> Node | None:
    """The operand beside `known` of an addition or a product of two tensors."""
    if node.target is not target or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    other = b if a is known else a if b is known else None
    return other if isinstance(other, Node) else None


def _alike(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.shape == y.shape and x.dtype == y.dtype)
