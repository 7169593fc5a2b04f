"""Greedy decoding: a step that can be compiled and captured, and the comparison of the results.

Two decoders that round differently may choose different tokens if the best two are nearly tied, and
then continue with different texts. Random weights can be created without near-ties, but trained
weights have them. A prompt is therefore only compared up to such a step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from _shared.llama import Decoder

LOGITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far logits may differ, as a share of the largest one."""

Compile = Callable[[Decoder], Callable[[Tensor, Tensor], Tensor]]


@dataclass(frozen=True)
class Decoded:
    tokens: Tensor  # int64 [batch, count]
    logits: Tensor  # [batch, count, vocabulary], from which the tokens were chosen


class Greedy:
    """Greedy decoding. Its state is on the device, so a step can be replayed from a CUDA graph."""

    def __init__(
        self, model: Decoder, prompts: Tensor, count: int, compiled: Compile | None = None
    ) -> None:
        """
        Args:
            prompts: int64 [batch, tokens].
            count: the number of tokens to add.
            compiled: compiles the model for the steps. The model itself reads the prompts, because
                their shape differs and would require another compilation for a single call.
        """
        self.model = model
        self.compiled = model if compiled is None else compiled(model)
        self.prompts = prompts
        self.count = count
        batch, self.start_at = prompts.shape
        self.tokens = prompts.new_zeros(batch, self.start_at + count)
        self.position = prompts.new_zeros(1)  # of the last known token
        output = model.shard.output
        self.logits = output.new_empty(batch, len(output))  # of the last step

    def begin(self) -> None:
        """Reads the prompts and chooses the first token."""
        self.tokens[:, : self.start_at] = self.prompts
        self.position.fill_(self.start_at - 1)
        every = torch.arange(self.start_at, device=self.prompts.device)
        self._append(self.model(self.prompts, every))

    def step(self) -> None:
        """Chooses the next token."""
        last = self.tokens.index_select(1, self.position)
        self._append(self.compiled(last, self.position))

    def _append(self, logits: Tensor) -> None:
        self.logits.copy_(logits)
        self.position += 1
        self.tokens.index_copy_(1, self.position, logits.argmax(-1, keepdim=True))

    @property
    def answer(self) -> Tensor:
        return self.tokens[:, self.start_at :].clone()


def decode(greedy: Greedy, step: Callable[[], object]) -> float:
    """Returns the seconds of all tokens except the first, which is chosen with the prompts."""
    synchronize = torch.cuda.synchronize if greedy.tokens.is_cuda else lambda: None
    greedy.begin()
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(greedy.count - 1):
        step()
    synchronize()
    return time.perf_counter() - start


def captured(greedy: Greedy) -> torch.cuda.CUDAGraph:
    """Captures a decoding step in a CUDA graph. Must follow a pass that was not captured."""
    greedy.begin()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        greedy.step()
    return graph


def with_logits(greedy: Greedy) -> Decoded:
    greedy.begin()
    logits = [greedy.logits.clone()]
    for _ in range(greedy.count - 1):
        greedy.step()
        logits.append(greedy.logits.clone())
    return Decoded(greedy.answer, torch.stack(logits, 1))


def greedy_of_transformers(model: LlamaForCausalLM, prompts: Tensor, count: int) -> Decoded:
    """Returns the tokens that the unsplit model chooses, and their logits."""
    ids, cache = prompts, None
    chosen, logits = [], []
    for _ in range(count):
        output: Any = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
        chosen.append(ids)
    return Decoded(torch.cat(chosen, 1), torch.stack(logits, 1))


class Difference(NamedTuple):
    """The differences between the results of two decoders."""

    wrong: int
    """Tokens that differ, without those that a near-tie explains."""
    logits: float
    """The largest difference after the last step, as a share of the largest logit."""
    ties: int
    """Prompts that are compared up to a near-tie."""


def difference(tokens: Tensor, logits: Tensor, expected: Decoded) -> Difference:
    """Compares tokens [batch, count] and the logits [batch, vocabulary] of the last step with the
    expected ones."""
    bound = LOGITS[expected.logits.dtype]
    scale = expected.logits.abs().max().clamp(min=1e-30)
    differs = tokens != expected.tokens
    # At the first difference, both decoders have read the same tokens. The expected logits of both
    # choices determine whether it is a near-tie.
    step = differs.int().argmax(1)
    every = torch.arange(len(tokens), device=tokens.device)
    given = expected.logits[every, step]
    gap = given[every, expected.tokens[every, step]] - given[every, tokens[every, step]]
    tied = differs.any(1) & (gap <= bound * scale)
    off = ((logits - expected.logits[:, -1]).abs() / scale).nan_to_num(nan=float("inf"))
    return Difference(
        int(differs[~tied].sum()), off.amax(1).masked_fill(tied, 0).max().item(), int(tied.sum())
    )


class Checks:
    """Runs comparisons and combines the results of all ranks. `largest`: returns the maximum over
    the ranks."""

    def __init__(self, largest: Callable[[float], float]) -> None:
        self._largest = largest
        self.good = True

    def add(self, what: str, got: Greedy, expected: Decoded) -> None:
        """Compares the tokens of the last pass, and the logits of its last step."""
        own = difference(got.answer, got.logits, expected)
        wrong, off, ties = (self._largest(value) for value in own)
        bound = LOGITS[expected.logits.dtype]
        note = f"; {ties:.0f} prompts are compared up to a near-tie" if ties else ""
        self.judge(
            wrong == 0 and off <= bound,
            f"{what}: {wrong:.0f} of {expected.tokens.numel()} tokens differ,"
            f" logits by {off:.1e} of the largest (at most {bound:.0e}){note}",
        )

    def judge(self, fine: bool, text: str) -> None:
        """Records and prints a result that is the same on all ranks."""
        self.good = self.good and fine
        if dist.get_rank() == 0:
            print(f"  {'ok' if fine else 'WRONG':5}  {text}")
