"""Matrix products that overlap with a collective on their operands or results.

The operators are defined in Python on top of PyTorch's products and posted calls. They divide the
product along its rows. The results have the same bits as the collective and the whole product, one
after the other, if PyTorch computes each row of a product independently of the number of rows.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from collx._groups import Group, get
from collx.communicator import Communicator
from collx.ops.collectives import allgather, reducescatter
from collx.ops.functions import post

__all__ = ["allgather_matmul", "matmul_reducescatter"]

COPIES_FROM = 1 << 20
"""The number of bytes from which copy engines are used. Below it, kernels are faster."""


def allgather_matmul(
    input: torch.Tensor, weight: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """Gathers the rows of all ranks and multiplies them: `allgather(input) @ weight`.

    On CUDA, the rank multiplies its own rows while the copy engines transfer the rows of the other
    ranks. On the CPU, and below 1 MiB of gathered rows, the product follows the all-gather. The
    gathered rows are in symmetric memory that the communicator keeps. A call that needs more memory
    than all previous calls allocates it. The allocation is collective, and an error during the
    capture of a CUDA graph.

    Args:
        input: a floating-point tensor [rows, ..., inner], of the same shape on all ranks.
        weight: a tensor [inner, cols] of the same dtype, in any layout, such as the transposed
            weight of a `torch.nn.Linear`. Autocast casts both, as for `torch.mm`.
        group: the communicator, as in `collx.allreduce`.

    Returns:
        A tensor [rows * world size, ..., cols], in the order of the ranks. It is differentiable;
        the backward pass gathers `input` again.

    Raises:
        ValueError: the shapes, dtypes or devices do not match.
    """
    communicator = get(group)
    first = input.size(0) * communicator.world_size if input.dim() > 0 else 0
    return _run(torch.ops.collx.allgather_matmul, input, weight, communicator, first)


def matmul_reducescatter(
    input: torch.Tensor, weight: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """Multiplies, and sums the products of the ranks: `reducescatter(input @ weight, "sum")`.

    Between two GPUs, a rank first multiplies the rows of the other rank. The copy engines transfer
    them while it multiplies its own rows. In other cases the reduce-scatter follows the product.

    Args:
        input: a floating-point tensor [rows, ..., inner]. `rows` is a multiple of the world size.
        weight: a tensor [inner, cols] of the same dtype, in any layout, such as the transposed
            weight of a `torch.nn.Linear`. Autocast casts both, as for `torch.mm`.
        group: the communicator, as in `collx.allreduce`.

    Returns:
        A tensor [rows / world size, ..., cols], this rank's part of the rows. It is differentiable.

    Raises:
        ValueError: the shapes, dtypes or devices do not match.
    """
    communicator = get(group)
    rows = input.size(0) if input.dim() > 0 else 0
    if rows % communicator.world_size:
        raise ValueError(
            f"collx.nn.matmul_reducescatter: input: got {rows} rows; accepted: a multiple "
            f"of the world size of {communicator.name!r}, {communicator.world_size}"
        )
    first = rows // communicator.world_size
    return _run(torch.ops.collx.matmul_reducescatter, input, weight, communicator, first)


def _run(
    op: Any, input: torch.Tensor, weight: torch.Tensor, communicator: Communicator, first: int
) -> torch.Tensor:
    """Checks the arguments and calls the operator. `first`: the number of rows of the result."""
    name = f"collx.nn.{op.__name__}"
    input, weight = _cast(input), _cast(weight)
    if input.dim() < 2 or weight.dim() != 2 or input.size(-1) != weight.size(0):
        raise ValueError(
            f"{name}: got shapes {tuple(input.shape)} and {tuple(weight.shape)}; accepted: "
            "[rows, ..., inner] and [inner, cols]"
        )
    if input.dtype != weight.dtype or not input.dtype.is_floating_point:
        raise ValueError(
            f"{name}: got dtypes {input.dtype} and {weight.dtype}; accepted: the same "
            "floating-point dtype for both"
        )
    for tensor in (input, weight):
        if tensor.device.type not in (communicator.device.type, "meta"):
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}; communicator {communicator.name!r} "
                f"accepts tensors on {communicator.device}"
            )
    rows = input.flatten(0, -2)
    made: torch.Tensor = op(rows, weight, communicator.world_size, communicator.name)
    return made.reshape(first, *input.shape[1:-1], weight.size(1))


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Casts an operand as autocast does for PyTorch's products."""
    kind = tensor.device.type
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    if not casts or kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


# --- memory for gathered rows ---------------------------------------------------------------------


class _Space:
    """The symmetric memory of one communicator, which its calls use one after the other.

    A peer stores into the memory after this rank has entered the call, and a call follows the
    previous work of its stream. A call therefore only has to wait for products on other streams."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._retired: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._used: torch.cuda.Event | None = None

    def bytes(self) -> int:
        return self._memory.numel()

    def replace(self, memory: torch.Tensor) -> None:
        """Replaces the memory. Keeps the old memory, because calls on the device and graphs may
        still use it."""
        self._retired.append(self._memory)
        self._memory = memory

    def enter(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._memory.is_cuda:
            current = torch.cuda.current_stream(self._memory.device)
            # A CUDA graph may be replayed at any time, and cannot wait for an event from outside of
            # its capture.
            outside = not torch.cuda.is_current_stream_capturing()
            if self._used is not None and self._stream != current and outside:
                current.wait_event(self._used)
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[:count].view(dtype).view(shape)

    def leave(self) -> None:
        if self._memory.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._stream = torch.cuda.current_stream(self._memory.device)
            self._used = self._used or torch.cuda.Event()
            self._used.record(self._stream)


_spaces: WeakKeyDictionary[Communicator, _Space] = WeakKeyDictionary()


def _space(communicator: Communicator, count: int) -> _Space:
    found = _spaces.get(communicator)
    if found is not None and found.bytes() >= count:
        return found
    memory = communicator.empty(1 << (count - 1).bit_length(), dtype=torch.uint8)
    if found is None:
        found = _spaces[communicator] = _Space(memory)
    else:
        found.replace(memory)
    return found


# --- operators ------------------------------------------------------------------------------------


def _overlaps(communicator: Communicator, count: int) -> bool:
    """Whether copy engines transfer `count` bytes during a product. On the CPU, the copies would
    use the cores of the product."""
    direct = communicator.device.type == "cuda" and communicator.fallback_reason is None
    return direct and count >= COPIES_FROM


def _gather_and_multiply(
    input: torch.Tensor, weight: torch.Tensor, group_size: int, group_name: str, out: torch.Tensor
) -> None:
    communicator = get(group_name)
    count = input.numel() * group_size * input.element_size()
    if group_size == 1 or not _overlaps(communicator, count):
        torch.mm(allgather(input, communicator), weight, out=out)
        return
    rows, rank = input.size(0), communicator.rank
    space = _space(communicator, count)
    gathered = space.enter((group_size * rows, input.size(1)), input.dtype)
    given = input.contiguous()
    handle = post(allgather, given, communicator, out=gathered, algorithm="copy_engine")
    first, last = rank * rows, (rank + 1) * rows
    torch.mm(given, weight, out=out[first:last])
    handle.wait()
    for start, end in ((0, first), (last, group_size * rows)):
        torch.mm(gathered[start:end], weight, out=out[start:end])
    space.leave()


def _multiply_and_reduce(
    input: torch.Tensor, weight: torch.Tensor, group_size: int, group_name: str, out: torch.Tensor
) -> None:
    communicator = get(group_name)
    count = out.numel() * group_size * out.element_size()
    if group_size == 2 and _overlaps(communicator, count):
        _multiply_and_exchange(input, weight, communicator, out)
    else:
        reducescatter(torch.mm(input, weight), "sum", communicator, out=out)


def _multiply_and_exchange(
    input: torch.Tensor, weight: torch.Tensor, communicator: Communicator, out: torch.Tensor
) -> None:
    """Between two ranks: multiplies the rows of the peer first, and transfers them during the other
    product. A sum of two values is the same in both orders."""
    rows, rank = out.size(0), communicator.rank
    peer = 1 - rank
    space = _space(communicator, 2 * out.numel() * out.element_size())
    products = space.enter((2, *out.shape), out.dtype)
    torch.mm(input[peer * rows : (peer + 1) * rows], weight, out=products[rank])
    whole = products.flatten(0, 1)
    handle = post(allgather, products[rank], communicator, out=whole, algorithm="copy_engine")
    torch.mm(input[rank * rows : (rank + 1) * rows], weight, out=out)
    handle.wait()
    out.add_(products[peer])
    space.leave()


def _define(name: str, write: Any, rows: Any, backward: Any) -> None:
    """Defines an operator and its `.out` form. `rows`: computes the number of rows of the result
    from that of the input and the world size."""
    taken = "Tensor input, Tensor weight, int group_size, str group_name"
    # Accepts any layout, so that a transposed weight is not copied.
    tags = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
    _library.define(f"{name}({taken}) -> Tensor", tags=tags)
    writes = (*tags, torch.Tag.out_variant)
    _library.define(f"{name}.out({taken}, *, Tensor(a!) out) -> ()", tags=writes)

    def shaped(input: torch.Tensor, weight: torch.Tensor, group_size: int) -> torch.Tensor:
        return input.new_empty((rows(input.size(0), group_size), weight.size(1)))

    def make(
        input: torch.Tensor, weight: torch.Tensor, group_size: int, group_name: str
    ) -> torch.Tensor:
        out = shaped(input, weight, group_size)
        write(input, weight, group_size, group_name, out)
        return out

    def fake(
        input: torch.Tensor, weight: torch.Tensor, group_size: int, group_name: str
    ) -> torch.Tensor:
        return shaped(input, weight, group_size)

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        input, weight, ctx.size, ctx.name = inputs
        ctx.save_for_backward(input, weight)

    for key in ("CPU", "CUDA"):
        _library.impl(name, make, key)
        _library.impl(f"{name}.out", write, key)
    _library.impl(f"{name}.out", lambda *args, **named: None, "Meta")
    torch.library.register_fake(f"collx::{name}", fake, lib=_library)
    torch.library.register_autograd(f"collx::{name}", backward, setup_context=save, lib=_library)


def _gather_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    ops = torch.ops.collx
    of_input = of_weight = None
    if ctx.needs_input_grad[0]:
        of_input = ops.matmul_reducescatter(gradient, weight.t(), ctx.size, ctx.name)
    if ctx.needs_input_grad[1]:
        of_weight = ops.allgather(input, ctx.size, ctx.name).t() @ gradient
    return of_input, of_weight, None, None


def _reduce_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    ops = torch.ops.collx
    of_input = of_weight = None
    if ctx.needs_input_grad[0]:
        of_input = ops.allgather_matmul(gradient, weight.t(), ctx.size, ctx.name)
    if ctx.needs_input_grad[1]:
        of_weight = input.t() @ ops.allgather(gradient, ctx.size, ctx.name)
    return of_input, of_weight, None, None


_library = torch.library.Library("collx", "FRAGMENT")
_define(
    "allgather_matmul",
    _gather_and_multiply,
    lambda rows, size: rows * size,
    _gather_backward,
)
_define(
    "matmul_reducescatter",
    _multiply_and_reduce,
    lambda rows, size: rows // size,
    _reduce_backward,
)
