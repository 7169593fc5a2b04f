"""Matches normalizations after a reduction, as the models of several libraries write them.

The pattern, in the graph of ATen operators that AOTAutograd produces:

    sum     the all-reduce, or the reduce-scatter
    acc     sum, or sum + residual
    wide    acc in float32
    norm    RMS norms      wide * rsqrt(mean(wide ** 2) + eps)
            layer norms    (wide - mean(wide)) * rsqrt(var(wide) + eps)
    y       torch.nn.RMSNorm        dtype(norm * weight)
            LlamaRMSNorm            weight * dtype(norm)
            Gemma's                 dtype(norm * (1 + float32(weight)))
            torch.nn.LayerNorm      dtype(norm * weight + bias), or without the bias

Conversions are present if the dtype is not float32. Operands may be in either order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from collx.compile.matching import (
    CONVERTS,
    alike,
    constant,
    converted,
    equal,
    in_float32,
    is_last,
    only_user,
    other_operand,
    value,
)

__all__ = ["Norm", "norm_after"]

_aten = torch.ops.aten
_ADDS = (_aten.add.Tensor, _aten.add.Scalar)


class Scaled(NamedTuple):
    """A tensor whose rows have been normalized, but not weighted."""

    kind: str
    """"rmsnorm" or "layernorm", as in the names of the operators."""
    normalized: Node
    eps: float
    inner: frozenset[Node]
    """The nodes of the normalization that read its input."""


class Weighted(NamedTuple):
    """The multiplication of a normalized tensor by the weight."""

    result: Node
    weight: Node
    bias: Node | None
    offset: float
    """The constant that is added to the weight."""
    rounding: str
    """Where the multiplication rounds: "parity" or "parity_weight"."""
    unlike: str
    """Why no operator rounds the same way, or "" if one does."""


class Norm(NamedTuple):
    """A normalization of a reduction's result."""

    kind: str
    acc: Node
    """The sum, with the residual added if there is one."""
    residual: Node | None
    eps: float
    weighted: Weighted


def norm_after(reduced: Node) -> Norm | str:
    """Returns the normalization of a reduction's result, or the reason why it does not match. The
    reason is "" if nothing resembles a normalization."""
    acc, residual = reduced, None
    if len(reduced.users) == 1:
        (user,) = reduced.users
        other = other_operand(user, reduced, _aten.add.Tensor)
        if other not in (None, reduced) and alike(other, reduced):
            acc, residual = user, other
    for wide in in_float32(acc):
        scaled = _scaled(wide)
        if isinstance(scaled, str):
            return scaled
        if scaled is not None:
            found = _weighted(scaled, value(acc).dtype)
            if isinstance(found, str):
                return found
            if residual is None and not _uses_within(acc, wide, scaled):
                return "the sum has other uses than the norm, and no residual is added to it"
            return Norm(scaled.kind, acc, residual, scaled.eps, found)
    return ""


def _uses_within(acc: Node, wide: Node, scaled: Scaled) -> bool:
    """Whether the norm is the only user of the sum."""
    return set(wide.users) <= scaled.inner and (acc is wide or set(acc.users) == {wide})


def _scaled(wide: Node) -> Scaled | str | None:
    kinds: dict[Any, Callable[[Node, Node], Scaled | str | None]] = {
        _aten.pow.Tensor_Scalar: _by_squares,
        _aten.var_mean.correction: _by_variance,
    }
    for user in wide.users:
        if user.target in kinds:
            found = kinds[user.target](wide, user)
            if found is not None:
                return found
    return None


def _by_squares(wide: Node, square: Node) -> Scaled | str | None:
    """Matches wide * rsqrt(mean(wide ** 2) + eps)."""
    if square.args[1] != 2:
        return None
    mean = only_user(square, _aten.mean.dim)
    if mean is None:
        return "the squares have other uses than their mean"
    if not is_last(mean.args[1], square) or mean.args[2:] != (True,) or mean.kwargs:
        return f"the mean is over dimensions {mean.args[1]}, not the last"
    root = _root(mean)
    if isinstance(root, str):
        return root
    (product,) = root.node.users
    if other_operand(product, root.node, _aten.mul.Tensor) is not wide:
        return "the rsqrt scales another tensor"
    return Scaled("rmsnorm", product, root.eps, frozenset((square, product)))


def _by_variance(wide: Node, moments: Node) -> Scaled | str:
    """Matches (wide - mean(wide)) * rsqrt(var(wide) + eps)."""
    options = dict(zip(("dim", "correction", "keepdim"), moments.args[1:], strict=False))
    options.update(moments.kwargs)
    if options.get("dim") is None or not is_last(options["dim"], wide):
        return f"the variance is over dimensions {options.get('dim')}, not the last"
    if options.get("correction") != 0 or options.get("keepdim") is not True:
        return "the variance is that of a sample (it divides by one less than the columns)"
    parts = {user.args[1]: user for user in moments.users if user.target is operator.getitem}
    if len(parts) != 2 or len(moments.users) != 2:
        return "the variance or the mean is unused, or used in another way"
    centered = only_user(parts[1], _aten.sub.Tensor)
    if centered is None or centered.args != (wide, parts[1]) or centered.kwargs:
        return "the mean has other uses than to be subtracted"
    root = _root(parts[0])
    if isinstance(root, str):
        return root
    (product,) = root.node.users
    only = len(centered.users) == 1
    if other_operand(product, root.node, _aten.mul.Tensor) is not centered or not only:
        return "the rsqrt scales another tensor, or the centered one is used elsewhere"
    return Scaled("layernorm", product, root.eps, frozenset((moments, centered)))


class _Root(NamedTuple):
    node: Node
    eps: float


def _root(mean: Node) -> _Root | str:
    """Matches rsqrt(mean + eps) with one user."""
    added = only_user(mean, *_ADDS)
    eps = None if added is None else constant(added, *_ADDS)
    if added is None or eps is None:
        return "the mean of the squares has other uses, or no constant is added to it"
    root = only_user(added, _aten.rsqrt.default)
    if root is None or len(root.users) != 1:
        return "the mean with eps has other uses than its rsqrt"
    return _Root(root, eps)


def _weighted(scaled: Scaled, dtype: torch.dtype) -> Weighted | str:
    normalized, narrow = scaled.normalized, dtype != torch.float32
    cols = value(normalized).shape[-1]
    if len(normalized.users) != 1:
        return "the normalized tensor is used before it is weighted"
    (user,) = normalized.users
    # float32 has no narrower dtype to round to, so the modes differ in the order of the products.
    rounding = "parity" if narrow or scaled.kind == "layernorm" else "parity_weight"
    if narrow and converted(user) is normalized:
        if len(user.users) != 1 or value(user).dtype != dtype:
            return "the normalized tensor is rounded elsewhere, or used before it is weighted"
        rounding, normalized = "parity_weight", user
        (user,) = user.users
    given = other_operand(user, normalized, _aten.mul.Tensor)
    if given is None:
        return "the normalized tensor is not weighted"
    weight, offset, unlike = _gain(given, dtype, rounding)
    reason = _no_vector("weight", weight, cols, dtype)
    if reason:
        return reason
    result, bias = user, None
    if scaled.kind == "layernorm":
        if offset != 0:
            return "a constant is added to the weight of a layer norm"
        added = only_user(user, _aten.add.Tensor)
        other = None if added is None else other_operand(added, user, _aten.add.Tensor)
        if added is not None and other is not None:
            vector = _stored(other)
            if not _no_vector("bias", vector, cols, dtype):
                result, bias = added, vector
    if narrow and value(result).dtype != dtype:
        rounded = only_user(result, *CONVERTS)
        # Inductor merges two consecutive conversions. A rounding whose result is widened again
        # becomes a conversion from float32 to float32.
        if rounded is None or value(rounded).dtype not in (dtype, torch.float32):
            return "the weighted tensor is not rounded to the dtype of the sum, or gets no bias"
        result = rounded
    return Weighted(result, weight, bias, offset, rounding, unlike)


def _gain(given: Node, dtype: torch.dtype, rounding: str) -> tuple[Node, float, str]:
    """Returns the weight, the constant that is added to it, and why no operator rounds the same
    way ("" if one does)."""
    offset, unlike = 0.0, ""
    narrow = dtype != torch.float32
    if narrow and rounding == "parity_weight" and value(given).dtype != dtype:
        unlike = f"the rounded tensor is multiplied by a weight in {value(given).dtype}"
    number = constant(given, *_ADDS)
    if number is not None:
        if narrow and rounding == "parity" and value(given).dtype == dtype:
            unlike = "weight and offset are added in the dtype of the sum"
        if float(torch.tensor(number, dtype=dtype)) != number:
            unlike = f"{number}, which is added to the weight, is no value of {dtype}"
        offset, given = number, cast(Node, given.args[0])
    return _stored(given), offset, unlike


def _stored(given: Node) -> Node:
    """Returns a vector before its conversion to float32."""
    before = converted(given)
    return before if before is not None and value(given).dtype == torch.float32 else given


def _no_vector(what: str, given: Node, cols: Any, dtype: torch.dtype) -> str:
    """Returns why a tensor cannot be a weight or bias of the operators, "" if it can."""
    tensor = value(given)
    if not equal(tensor.shape, [cols]):
        return f"the {what} is not a vector over the last dimension"
    if tensor.dtype not in (dtype, torch.float32):
        return f"the {what} has dtype {tensor.dtype}, and the tensor {dtype}"
    return ""
