"""Replaces PyTorch's functional collectives in a graph with the equivalent operators of collx."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from collx.communicator import of_group
from collx.compile.matching import equal
from collx.compile.operators import making

__all__ = [
    "COALESCED",
    "REPLACED",
    "Collective",
    "collectives",
    "mark",
    "others",
    "replace",
    "replacement",
    "separate",
]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_ops = torch.ops.collx

# Maps a collective to a function that takes its arguments, with the name of the communicator as
# the last one, and returns the operator that replaces it and the arguments of that operator.
REPLACED: dict[Any, Callable[..., tuple[OpOverload, tuple[Any, ...]]]] = {
    _c10d.all_reduce.default: lambda x, op, name: (_ops.allreduce.default, (x, _word(op), name)),
    _c10d.reduce_scatter_tensor.default: lambda x, op, size, name: (
        _ops.reducescatter.default,
        (x, _word(op), size, name),
    ),
    _c10d.all_gather_into_tensor.default: lambda x, size, name: (
        _ops.allgather.default,
        (x, size, name),
    ),
    _c10d.all_to_all_single.default: lambda x, to, from_, name: (
        _ops.alltoallv.default,
        (x, to, from_, name),
    ),
    _c10d.broadcast.default: lambda x, root, name: (_ops.broadcast.default, (x, root, name)),
}


COALESCED = {
    _c10d.all_reduce_coalesced.default: _c10d.all_reduce.default,
    _c10d.reduce_scatter_tensor_coalesced.default: _c10d.reduce_scatter_tensor.default,
    _c10d.all_gather_into_tensor_coalesced.default: _c10d.all_gather_into_tensor.default,
}
"""Maps each collective of several tensors to the collective of one tensor."""

# The ops that read the size of a tensor, not its elements.
_SIZES = (
    _aten.sym_size.int,
    _aten.sym_stride.int,
    _aten.sym_numel.default,
    _aten.sym_storage_offset.default,
)

# How a collective changes the size of a dimension, by the number of ranks.
_CHANGES: dict[Any, Callable[[Any, Any], Any]] = {
    _c10d.all_gather_into_tensor.default: operator.mul,
    _c10d.reduce_scatter_tensor.default: operator.floordiv,
}

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class Collective(NamedTuple):
    """A PyTorch collective that is started at one node and awaited at another."""

    started: Node
    awaited: Node
    group: str

    @property
    def name(self) -> str:
        """The name of the operator in the model's graph."""
        return str(self.started.meta.get("coalesced", self.started.target))


def collectives(graph: Graph) -> Iterator[Collective]:
    """Yields the collectives that collx has an operator for, in graph order."""
    for node in list(graph.nodes):
        if node.target is _c10d.wait_tensor.default and isinstance(node.args[0], Node):
            started = node.args[0]
            if started.target in REPLACED:
                yield Collective(started, node, str(started.args[-1]))


def others(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yields PyTorch's collectives that remain in a graph, each with the reason."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace not in _NAMESPACES:
            continue
        if target in REPLACED:
            yield node, "its result is not awaited by a wait_tensor of its own"
        elif not target._opname.startswith("wait_tensor"):
            yield node, "collx has no operator that does the same"


def separate(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Splits coalesced collectives, and waits for several tensors, into single-tensor ones.

    A coalesced collective remains if collx does not support all of its tensors, because the
    process group is faster with several at once. Yields these collectives and the reasons."""
    for node in list(graph.nodes):
        # Compared by name: not every version of PyTorch has this operator.
        is_wait = str(node.target) == "_c10d_functional.wait_tensors.default"
        if node.target not in COALESCED and not is_wait:
            continue
        given, *rest = node.args
        values = node.meta.get("val")
        if is_wait and not isinstance(values, (list, tuple)):
            continue
        if any(user.target is not operator.getitem for user in node.users):
            if not is_wait:
                yield node, "its results are used as a list"
            continue
        single = _c10d.wait_tensor.default if is_wait else COALESCED[node.target]
        if not is_wait:
            refused = (_chosen(single, (x, *rest), y) for x, y in zip(given, values, strict=True))
            why = next((each for each in refused if isinstance(each, str)), "")
            if why:
                yield node, why
                continue
        made = []
        with graph.inserting_before(node):
            for tensor, value in zip(given, values, strict=True):
                made.append(graph.call_function(single, (tensor, *rest)))
                made[-1].meta.update({"val": value, "coalesced": str(node.target)})
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def replacement(
    collective: Any, given: tuple[Any, ...], name: str
) -> tuple[OpOverload, tuple[Any, ...]]:
    """Returns the operator of collx that replaces `collective`, and its arguments.

    `given`: the arguments of `collective` without the group. `name`: the communicator's name."""
    return REPLACED[collective](*given, name)


class _Chosen(NamedTuple):
    """An operator of collx that replaces a PyTorch collective."""

    op: OpOverload
    arguments: tuple[Any, ...]
    value: torch.Tensor
    """The result, as a fake tensor."""


def _chosen(collective: OpOverload, given: tuple[Any, ...], value: torch.Tensor) -> _Chosen | str:
    """Returns the replacement of a collective that returns `value`, or why there is none."""
    arguments, group = given[:-1], given[-1]
    try:
        communicator = of_group(str(group), value.device.type)
    except ValueError as ambiguous:
        return str(ambiguous)
    if communicator is None:
        return f"group {group!r} has no communicator"
    if communicator.fallback_reason is not None:
        why = communicator.fallback_reason
        return f"{communicator.name!r} uses the process group: {why}"
    if value.device.type != communicator.device.type:
        return f"the tensor is on {value.device}, and the communicator on {communicator.device}"
    op, arguments = replacement(collective, arguments, communicator.name)
    try:
        made = op(*torch.fx.map_arg(arguments, lambda node: node.meta["val"]))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as refusal:
        return str(refusal).splitlines()[0]
    if not equal(made.stride(), value.stride()):
        return "its result is not contiguous"
    return _Chosen(op, arguments, made)


def replace(graph: Graph, found: Collective) -> Node | str:
    """Replaces a collective with an operator of collx. Returns the new node, or the reason if
    it cannot."""
    collective = cast(OpOverload, found.started.target)
    chosen = _chosen(collective, found.started.args, found.awaited.meta["val"])
    if isinstance(chosen, str):
        return chosen
    sizes = [user for user in found.started.users if user.target in _SIZES]
    if len(found.started.users) != 1 + len(sizes):
        return "its result is used before it is awaited, or awaited twice"
    op, arguments, made = chosen
    sizes = [size for size in sizes if not _read_from_input(graph, found.started, size)]
    with graph.inserting_before(min(found.awaited, *sizes) if sizes else found.awaited):
        node = graph.call_function(op, arguments)
    node.meta["val"] = made
    for size in sizes:
        size.replace_input_with(found.started, node)
    found.awaited.replace_all_uses_with(node)
    graph.erase_node(found.awaited)
    graph.erase_node(found.started)
    if op is _ops.allreduce.default:
        _reshape_before(graph, node)
    return node


def _read_from_input(graph: Graph, started: Node, size: Node) -> bool:
    """Computes a size of a collective's result from the size of its input. Otherwise it would be a
    use of the result, and the ops that follow would not be fused with the collective. Returns
    whether it could."""
    if size.target is not _aten.sym_size.int:
        return False
    given, dim = cast(Node, started.args[0]), cast(int, size.args[1])
    whole, wanted = given.meta["val"].size(dim), size.meta["val"]
    change: Callable[[Any, Any], Any] | None = None
    if not equal([whole], [wanted]):
        change = _CHANGES.get(started.target)
        if change is None or not equal([change(whole, started.args[-2])], [wanted]):
            return False
    with graph.inserting_before(size):
        read = graph.call_function(_aten.sym_size.int, (given, dim))
        read.meta["val"] = whole
        if change is not None:
            read = graph.call_function(change, (read, started.args[-2]))
            read.meta["val"] = wanted
    size.replace_all_uses_with(read)
    graph.erase_node(size)
    return True


def _reshape_before(graph: Graph, reduced: Node) -> None:
    """Moves a reshape of the sum before the all-reduce. The result is the same, and the residual
    addition or the norm becomes the next user of the sum."""
    if len(reduced.users) != 1:
        return
    (reshaped,) = reduced.users
    if reshaped.target not in (_aten.view.default, _aten.reshape.default):
        return
    shape = cast(Sequence[Any], reshaped.args[1])
    if not all(size < reduced for size in shape if isinstance(size, Node)):
        return
    given = cast(Node, reduced.args[0])
    with graph.inserting_before(reduced):
        moved = graph.call_function(_aten.reshape.default, (given, shape))
    value = reshaped.meta["val"]
    moved.meta["val"] = given.meta["val"].reshape(value.shape)
    reduced.replace_input_with(given, moved)
    reduced.meta["val"] = value
    reshaped.replace_all_uses_with(reduced)
    graph.erase_node(reshaped)


def _word(reduce_op: str) -> str:
    """Returns the name that collx uses for a reduction of torch.distributed."""
    return {"product": "prod"}.get(reduce_op.lower(), reduce_op.lower())


def mark() -> None:
    """Marks the operators as having side effects. Operators that are inserted after AOTAutograd
    have no effect tokens, and would be removed if unused."""
    for op in making():
        torch.fx.node.has_side_effect(op)
