"""A Llama for decoding, split over ranks, with the weights and formulas of transformers. It has a
key-value cache of fixed size, so every decoding step has the same shapes.

Each rank has its attention heads and its units of the MLPs; all ranks have the vocabulary. The
caller passes the modules that sum the products of the ranks, add the residual and normalize:
`Decoder` calls a norm module with (product, residual), twice per layer, which returns (normalized,
sum). The norm after an MLP is the first one of the next layer, or the last one of the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from collx.nn import shard_range

MakeNorm = Callable[[nn.Module], nn.Module]  # from a LlamaRMSNorm


@dataclass(frozen=True)
class Size:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    length: int  # of prompt and answer


def seeded(size: Size, seed: int) -> LlamaForCausalLM:
    """Returns a model with random weights, the same on every rank, in float32.

    Its output layer strongly prefers one successor of each token, like a trained model. Its choices
    are therefore not near-ties, which would depend on the rounding of bfloat16.
    """
    torch.manual_seed(seed)
    options: dict[str, Any] = {"attn_implementation": "eager", "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.length,
        eos_token_id=None,
        **options,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for norm in norms_of(model):
            norm.get_parameter("weight").normal_(1.0, 0.1)
        embedding = model.model.embed_tokens.weight.normal_(0.0, 0.2)
        model.lm_head.weight[torch.randperm(size.vocabulary)] = embedding.clone()
    model.eval()
    return model


def norms_of(model: LlamaForCausalLM) -> list[nn.Module]:
    """Returns the norms in the order of their use, beginning with the norm of the embeddings."""
    found: list[nn.Module] = []
    layer: Any
    for layer in model.model.layers:
        found += [layer.input_layernorm, layer.post_attention_layernorm]
    return [*found, model.model.norm]


def rotated(x: Tensor) -> Tensor:
    """Rotates each pair of elements, which are half a head apart, by 90 degrees."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Attention(nn.Module):
    """This rank's heads: [batch, tokens, hidden] -> its summand of the same shape."""

    keys: Tensor  # [batch, heads, length, head size]
    values: Tensor

    def __init__(self, full: Any, mine: slice, batch: int, size: Size) -> None:
        """`mine`: the key-value heads of this rank, each with the query heads that share it."""
        super().__init__()
        self.head = full.head_dim
        self.kv_heads = mine.stop - mine.start
        kv = slice(mine.start * self.head, mine.stop * self.head)
        shared = size.heads // size.kv_heads
        query = slice(kv.start * shared, kv.stop * shared)
        self.query_units = query.stop - query.start
        projections = [full.q_proj.weight[query], full.k_proj.weight[kv], full.v_proj.weight[kv]]
        self.inner = nn.Parameter(torch.cat(projections))
        self.outer = nn.Parameter(full.o_proj.weight[:, query].clone())
        room = (batch, self.kv_heads, size.length, self.head)
        self.register_buffer("keys", torch.zeros(room), persistent=False)
        self.register_buffer("values", torch.zeros(room), persistent=False)

    def forward(
        self, x: Tensor, positions: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """`turn`: cosines and sines [tokens, head size]; `mask`: bool [tokens, length]."""
        heads = functional.linear(x, self.inner).unflatten(-1, (-1, self.head)).transpose(1, 2)
        query, key, value = heads.split(
            [self.query_units // self.head, self.kv_heads, self.kv_heads], 1
        )
        cosine, sine = turn
        query, key = (h * cosine + rotated(h) * sine for h in (query, key))
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        seen = functional.scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        return functional.linear(seen.transpose(1, 2).flatten(2), self.outer)


class Mlp(nn.Module):
    """This rank's units: [batch, tokens, hidden] -> its summand of the same shape."""

    def __init__(self, full: Any, mine: slice) -> None:
        super().__init__()
        self.inner = nn.Parameter(
            torch.cat([full.gate_proj.weight[mine], full.up_proj.weight[mine]])
        )
        self.outer = nn.Parameter(full.down_proj.weight[:, mine].clone())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.inner).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.outer)


class Shard(nn.Module):
    """A rank's part of a model, and its caches. Several decoders may use it one after the other.

    Raises ValueError if there are more ranks than key-value heads.
    """

    cosines: Tensor  # [length, head size]
    sines: Tensor

    @torch.no_grad()
    def __init__(
        self, full: LlamaForCausalLM, size: Size, batch: int, world_size: int, rank: int
    ) -> None:
        super().__init__()
        if world_size > size.kv_heads:
            raise ValueError(
                f"{size.kv_heads} key-value heads cannot be split over {world_size} ranks"
            )
        heads = shard_range(size.kv_heads, world_size, rank)
        units = shard_range(size.intermediate, world_size, rank)
        layers: Any = full.model.layers
        self.attention = nn.ModuleList(
            Attention(layer.self_attn, heads, batch, size) for layer in layers
        )
        self.mlp = nn.ModuleList(Mlp(layer.mlp, units) for layer in layers)
        self.embedding = nn.Parameter(full.model.embed_tokens.weight.clone())
        self.output = nn.Parameter(full.lm_head.weight.clone())
        self.first_norm, *self.norms = norms_of(full)
        every = torch.arange(size.length, device=self.embedding.device)[None]
        cosines, sines = full.model.rotary_emb(self.embedding, every)
        self.register_buffer("cosines", cosines[0], persistent=False)
        self.register_buffer("sines", sines[0], persistent=False)


class Decoder(nn.Module):
    """A shard with the norms that `make_norm` creates from those of the model."""

    def __init__(self, shard: Shard, make_norm: MakeNorm) -> None:
        super().__init__()
        self.shard = shard
        self.norms = nn.ModuleList(make_norm(norm) for norm in shard.norms)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits of the last token, [batch, vocabulary].

        ids: int64 [batch, tokens]; positions: int64 [tokens], the positions of `ids`. The decoder
        must have processed all previous tokens.
        """
        shard = self.shard
        turn = (shard.cosines[positions], shard.sines[positions])
        everywhere = torch.arange(len(shard.cosines), device=positions.device)
        mask = everywhere <= positions[:, None]
        residual = functional.embedding(ids, shard.embedding)
        x = shard.first_norm(residual)
        norms: Iterator[nn.Module] = iter(self.norms)
        for attention, mlp in zip(shard.attention, shard.mlp, strict=True):
            x, residual = next(norms)(attention(x, positions, turn, mask), residual)
            x, residual = next(norms)(mlp(x), residual)
        return functional.linear(x[:, -1], shard.output)


class UnfusedNorm(nn.Module):
    """All-reduce, addition and norm as separate steps, as in a split model without fusion."""

    def __init__(self, norm: nn.Module, all_reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.all_reduce = all_reduce

    def forward(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + self.all_reduce(partial)
        return self.norm(total), total
