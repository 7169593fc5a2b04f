"""Lazy conjugate and negative views as arguments of every overload: reads see the view's values,
and writes set the view's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..attempt import attempt, works
from ..overloads import (
    all_overloads,
    arguments_for,
    name_in_errors,
    results_of,
    writing_overloads,
    written_by,
)
from ..pool import on_ranks
from ..rank import Rank
from ..values import unequal

GUARD = 7.0  # the real parts next to negative views


def _lazy(tensor: torch.Tensor, dense: bool = False) -> torch.Tensor | None:
    """Returns a lazy view with the same values, or None if PyTorch cannot negate the dtype."""
    if tensor.is_complex():
        return tensor.conj_physical().conj()
    if not dense and tensor.dtype in (torch.float32, torch.float64):
        parts = torch.stack([torch.full_like(tensor, GUARD), -tensor], -1)
        return torch.view_as_complex(parts).conj().imag
    if tensor.dtype in (torch.float32, torch.int8, torch.int64):
        return torch._neg_view(-tensor)
    return None


def _make_lazy(call: dict[str, Any], names: list[str]) -> list[str]:
    """Replaces these arguments of the call by lazy views where possible. Returns their names."""
    found = []
    for name in names:
        # The reduced value of an epilogue must be contiguous.
        lazy = _lazy(call[name], dense=name == "value")
        if lazy is not None:
            call[name] = lazy
            found.append(name)
    return found


def _is_lazy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _copied(call: dict[str, Any]) -> dict[str, Any]:
    """Returns the call with cloned tensors."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()}


def _spoiled(call: dict[str, Any], names: list[str]) -> dict[str, Any]:
    for name in names:
        if name != "input":  # not written in place
            call[name].view(torch.uint8).fill_(1)
    return call


def _results(overload: Any, call: dict[str, Any]) -> list[torch.Tensor]:
    returned = overload(**call)
    assert returned is None or not written_by(overload)
    return results_of(overload, returned, call)


def _compare(overload: Any, plain: dict[str, Any], chosen: list[str]) -> str:
    """Makes these arguments lazy where possible and returns the error, if any."""
    written = written_by(overload)
    expected = _results(overload, _spoiled(_copied(plain), written))
    call = _spoiled(_copied(plain), written)
    lazy_ones = _make_lazy(call, chosen)
    versions = {name: call[name]._version for name in lazy_ones}
    results = _results(overload, call)
    for name in lazy_ones:
        if not _is_lazy(call[name]):
            return f"{name} is no longer lazy"
        if call[name]._version - versions[name] != (name in written):
            return f"{name} got {call[name]._version - versions[name]} new versions"
        if not call[name].is_contiguous() and not bool((call[name]._base[..., 0] == GUARD).all()):
            return f"memory beside {name} changed"
    for number, (got, want) in enumerate(zip(results, expected, strict=True)):
        if bool(unequal(got.resolve_conj().resolve_neg(), want).any()):
            return f"result {number} differs"
    return ""


def _dtypes(overload: Any) -> list[torch.dtype]:
    """Includes a complex dtype if the operator only copies."""
    names = {argument.name for argument in overload._schema.arguments}
    reduces = names & {"reduce_op", "eps", "expression", "value"}
    return [torch.float32] if reduces else [torch.float32, torch.complex64]


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_every_overload_reads_and_writes_lazy_views(rank: Rank) -> None:
    """Each tensor of each overload by itself, and all of them together: the same bits as for plain
    tensors, one new version of each written tensor, and no writes next to it."""
    communicator = rank.communicator()
    wrong, count = [], 0
    for overload in all_overloads():
        for dtype in _dtypes(overload):
            plain = arguments_for(rank, communicator.name, overload, dtype)
            tensors = [name for name, value in plain.items() if isinstance(value, torch.Tensor)]
            if not tensors:
                continue
            for chosen in (*([name] for name in tensors), tensors):
                count += 1
                found = _compare(overload, plain, chosen)
                if found:
                    wrong.append(f"{overload} of {dtype}, lazy {chosen}: {found}")
    communicator.raise_if_failed()
    assert not wrong, "\n".join(wrong)
    assert count > 150


@pytest.mark.worlds(2)
@on_ranks
def test_lazy_inference_tensors_are_written(rank: Rank) -> list[str]:
    communicator = rank.communicator()
    wrong = []
    with torch.inference_mode():
        for overload in writing_overloads():
            plain = arguments_for(rank, communicator.name, overload)
            expected = _results(overload, _copied(plain))
            call = _copied(plain)
            _make_lazy(call, written_by(overload))
            for got, want in zip(_results(overload, call), expected, strict=True):
                if bool(unequal(got.resolve_neg(), want).any()):
                    wrong.append(str(overload))
    return wrong


@pytest.mark.worlds(2)
@on_ranks
def test_a_refused_call_leaves_lazy_views_as_they_are(rank: Rank) -> None:
    communicator = rank.communicator()
    wrong = []
    for overload in writing_overloads():
        call = arguments_for(rank, communicator.name, overload)
        call["group_name"] = "no such group"
        before = {name: call[name].clone() for name in _make_lazy(call, written_by(overload))}
        found = attempt(lambda: overload(**call))  # noqa: B023
        if found.error != "ValueError" or "no such group" not in found.message:
            wrong.append(f"{overload}: {found}")
        wrong += [
            f"{overload}: {name} changed"
            for name, value in before.items()
            if bool(unequal(call[name].resolve_neg(), value).any())
        ]
    assert works(rank, communicator)
    assert not wrong, "\n".join(wrong)


@pytest.mark.worlds(2)
@on_ranks
def test_a_lazy_view_that_overlaps_itself_is_refused(rank: Rank) -> None:
    """Before anything is launched, as for plain tensors."""
    communicator = rank.communicator()
    wrong = []
    for overload in writing_overloads():
        for name in written_by(overload):
            call = arguments_for(rank, communicator.name, overload)
            if not _make_lazy(call, [name]):
                continue
            call[name] = call[name].narrow(0, 0, 1).expand(call[name].shape)
            found = attempt(lambda: overload(**call))  # noqa: B023
            op = name_in_errors(overload).partition("_map")[0]
            if found.error != "ValueError" or f"collx.{op}: {name}: " not in found.message:
                wrong.append(f"{overload}: {name}: {found}")
    assert works(rank, communicator)
    assert not wrong, "\n".join(wrong)


def _write(z: torch.Tensor, memory: torch.Tensor, other: torch.Tensor, name: str) -> None:
    torch.ops.collx.broadcast.out(memory, 0, name, out=other.conj())
    torch.ops.collx.allreduce_(memory.conj().imag, "sum", name)
    torch.ops.collx.broadcast_(z.conj(), 0, name)


def _tensors(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.arange(12.0, device=rank.device) + rank.rank
    return torch.complex(x, -x), torch.complex(x, x), torch.complex(-x, x)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks
def test_compiled_graphs_write_lazy_views(rank: Rank, backend: str) -> None:
    name = rank.communicator().name
    eager, compiled = _tensors(rank), _tensors(rank)
    _write(*eager, name)
    torch.compile(_write, backend=backend, fullgraph=True)(*compiled, name)
    assert [bool(unequal(a, b).any()) for a, b in zip(eager, compiled, strict=True)] == [False] * 3


@pytest.mark.worlds(2)
@on_ranks
def test_lazy_views_of_symmetric_memory_stay_symmetric(rank: Rank) -> None:
    communicator = rank.communicator()
    x = torch.arange(64.0, device=rank.device) + rank.rank
    memory = communicator.empty(64)
    out = torch._neg_view(memory)
    # Both algorithms require symmetric memory: they would refuse a temporary.
    torch.ops.collx.allgather.out(
        x[: 64 // rank.size].contiguous(), rank.size, communicator.name, 0, None, "direct", out=out
    )
    parts = [torch.arange(64.0)[: 64 // rank.size] + other for other in range(rank.size)]
    gathered = out.cpu().equal(torch.cat(parts))
    source = communicator.empty(64).copy_(x)
    torch.ops.collx.allreduce.out(source, "sum", communicator.name, "pull_push", out=out)
    total = rank.size * torch.arange(64.0) + sum(range(rank.size))
    assert [gathered, out.cpu().equal(total)] == [True, True]
