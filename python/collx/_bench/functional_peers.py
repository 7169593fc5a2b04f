"""Defines PyTorch operators for all-reduces of other libraries and FlashInfer's fused norm, so that
models can call them, also in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from collx._bench import cuda_peers, flashinfer_peers
from collx._bench.flashinfer_peers import NORM, PLAIN, FlashInfer
from collx._bench.job import Case

Call = TypeVar("Call", bound=Callable[..., object])
AllReduce = Callable[[Tensor], Tensor]
SumAndNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""A function that computes (norm, sum) from (product, residual, weight, eps)."""


def all_reduces(case: Case) -> tuple[dict[str, AllReduce], Callable[[], None]]:
    """Returns all-reduces by the names of their libraries. Their tensors consist of rows with the
    job's number of columns, and are not larger than the case. Also returns the function that every
    rank must call between a capture of vLLM's all-reduce and its first replay."""
    flashinfer, vllm = flashinfer_peers.FlashInferOneshot(), flashinfer_peers.Vllm()
    oneshot = cuda_peers.TorchOneshot()
    group = case.job.group.group_name

    def of_flashinfer(x: Tensor) -> Tensor:
        rows = x.view(-1, case.job.cols)
        y = torch.empty_like(rows)
        flashinfer.call(case, rows, PLAIN, allreduce_out=y)()
        return y.view(x.shape)

    def of_vllm(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        vllm.reduce(case, x, y)
        return y

    def of_torch(x: Tensor) -> Tensor:
        buffer = oneshot.symmetric(case, x.numel()).view(x.shape)
        y: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer.copy_(x), "sum", group)
        return y

    calls: dict[str, AllReduce] = {
        flashinfer.name: of_flashinfer,
        vllm.name: of_vllm,
        oneshot.name: of_torch,
    }
    found = {n: _operator(f"sum_{n}", call, torch.empty_like) for n, call in calls.items()}
    return found, partial(vllm.exchange, case)


def fused_norms(case: Case) -> dict[str, SumAndNorm]:
    """Returns FlashInfer's fused norms for the same tensors, by the names of the kernels."""
    found: dict[str, SumAndNorm] = {}
    for kind in (flashinfer_peers.FlashInferOneshot, flashinfer_peers.FlashInferOneshotEnd):
        kernel = kind()
        found[kernel.name] = _operator(f"norm_{kernel.name}", _fused_norm(kernel, case), _two_like)
    return found


def _fused_norm(kernel: FlashInfer, case: Case) -> SumAndNorm:
    def norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows = x.view(-1, case.job.cols)
        made, total = torch.empty_like(rows), torch.empty_like(rows)
        run = kernel.call(
            case,
            rows,
            NORM,
            residual_in=residual.view(rows.shape),
            rms_gamma=weight,
            residual_out=total,
            norm_out=made,
            rms_eps=eps,
        )
        run()
        return made.view(x.shape), total.view(x.shape)

    return norm


def _two_like(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _operator(name: str, call: Call, shape: Callable[..., object]) -> Call:
    op: Any = torch.library.custom_op(
        f"collxbench::{name.replace('-', '_')}", call, mutates_args=()
    )
    op.register_fake(shape)
    made: Call = op
    return made
