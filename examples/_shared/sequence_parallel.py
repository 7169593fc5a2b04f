"""Sequence parallelism: between the split layers, every rank has its own tokens of each sentence.

The all-reduce after a row-parallel layer becomes a reduce-scatter along the tokens. Each rank adds
the residual and normalizes only for its tokens, and an all-gather before the next column-parallel
layer concatenates them. Together they transfer the same bytes as the all-reduce, and no computation
is repeated on several ranks.

Both classes implement `Exchange` of `_shared.tensor_parallel`, for inference. The number of tokens
need not be divisible by the number of ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import collx

TOKENS = 1  # the axis


class CollxSequence:
    """An exchange with collx, which supports uneven parts along any axis."""

    def __init__(self, comm: collx.Communicator) -> None:
        self.comm = comm
        self.tokens = 0  # of the current input

    def split(self, x: Tensor) -> Tensor:
        self.tokens = x.size(TOKENS)
        return collx.nn.split_to_ranks(x, self.comm, axis=TOKENS)

    def gather(self, x: Tensor) -> Tensor:
        return collx.nn.gather_from_sequence(x, self.comm, axis=TOKENS, total=self.tokens)

    def reduce(self, x: Tensor) -> Tensor:
        return collx.nn.scatter_to_sequence(x, self.comm, axis=TOKENS)


class TorchSequence:
    """An exchange with torch.distributed. Tokens are padded to equal parts, which are along the
    first axis during the transfer."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.tokens = 0  # of the current input

    def split(self, x: Tensor) -> Tensor:
        self.tokens = x.size(TOKENS)
        return self.padded(x).chunk(self.world_size, TOKENS)[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.world_size * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous())
        return torch.cat(parts.chunk(self.world_size), TOKENS).narrow(TOKENS, 0, self.tokens)

    def reduce(self, x: Tensor) -> Tensor:
        parts = self.padded(x).chunk(self.world_size, TOKENS)
        result = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(result, torch.cat(parts))
        return result

    def padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, -x.size(TOKENS) % self.world_size))
