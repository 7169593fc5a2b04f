"""PyTorch's functional collectives in a graph, as the operators of collx that do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from collx.communicator import Communicator, of_group
from collx.compile.operators import making

__all__ = ["REPLACED", "Collective", "collectives", "mark", "replace", "replacement"]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_ops = torch.ops.collx

# What stands for a collective whose arguments these are; the last is the communicator's name.
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


class Collective(NamedTuple):
    """A collective of PyTorch's that is started at one node and awaited at another."""

    started: Node
    awaited: Node
    group: str

    @property
    def communicator(self) -> Communicator | None:
        return of_group(self.group)


def collectives(graph: Graph) -> Iterator[Collective]:
    """Those of a graph that collx has an operator for, in its order."""
    for node in list(graph.nodes):
        if node.target is _c10d.wait_tensor.default and isinstance(node.args[0], Node):
            started = node.args[0]
            if started.target in REPLACED:
                yield Collective(started, node, str(started.args[-1]))


def replacement(
    collective: Any, given: tuple[Any, ...], name: str
) -> tuple[OpOverload, tuple[Any, ...]]:
    """The operator of collx in the place of one of PyTorch's, and its arguments.

    `given`: the other's, without its group. `name`: of the communicator."""
    return REPLACED[collective](*given, name)


def replace(graph: Graph, found: Collective) -> Node | str:
    """Puts an operator of collx in the place of a collective; or says why it cannot be."""
    communicator = found.communicator
    if communicator is None:
        return f"group {found.group!r} has no communicator"
    if communicator.fallback_reason is not None:
        why = communicator.fallback_reason
        return f"{communicator.name!r} goes through the process group: {why}"
    if len(found.started.users) != 1:
        return "its result is used before it is awaited, or awaited twice"
    value = found.awaited.meta["val"]
    if value.device.type != communicator.device.type:
        return f"the tensor is on {value.device}, the communicator on {communicator.device}"
    op, arguments = replacement(found.started.target, found.started.args[:-1], communicator.name)
    try:
        made = op(*torch.fx.map_arg(arguments, lambda node: node.meta["val"]))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as refusal:
        return str(refusal).splitlines()[0]
    if made.stride() != value.stride():
        return "its result is not contiguous"
    with graph.inserting_before(found.awaited):
        node = graph.call_function(op, arguments)
    node.meta["val"] = made
    found.awaited.replace_all_uses_with(node)
    graph.erase_node(found.awaited)
    graph.erase_node(found.started)
    if op is _ops.allreduce.default:
        _reshape_before(graph, node)
    return node


def _reshape_before(graph: Graph, reduced: Node) -> None:
    """Moves the reshaping of a sum to before it, which is the same: what adds to the sum, or
    normalizes it, is then its next user."""
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
    """What collx calls a reduction that torch.distributed has another word for."""
    return {"product": "prod"}.get(reduce_op.lower(), reduce_op.lower())


def mark() -> None:
    """Keeps what is put into a graph behind AOTAutograd, which has no tokens there any more."""
    for op in making():
        torch.fx.node.has_side_effect(op)
