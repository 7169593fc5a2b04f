"""One all-reduce to be checked, as plain values that travel to the ranks; and sets of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .values import DTYPES, FLOATS, dtype_of, legal_ops

ALGORITHMS = (
    "oneshot_push",
    "twoshot_push",
    "pull_push",
    "oneshot_pull",
    "twoshot_pull",
    "fallback",
)
FORMS = ("functional", "out", "inplace")
LAYOUTS = ("contiguous", "transposed", "sliced", "reversed_dims", "spread", "scalar")
SYMMETRIC = ("none", "input", "output", "both")

TILE_BYTES = 1024
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Case:
    """An all-reduce: the call, where its tensors lie, and what they hold."""

    dtype: str = "float32"
    reduce_op: str = "sum"
    numel: int = 1000
    algorithm: str = "auto"
    form: str = "out"
    style: str = "random"
    max_blocks: int = 0
    input_offset: int = 0  # elements before the view
    output_offset: int = 0
    layout: str = "contiguous"
    output_layout: str = "contiguous"
    symmetric: str = "none"
    seed: int = 1

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize


def legal(case: Case) -> Case:
    """The case, made one that exists: pull_push needs symmetric, dense tensors that are given."""
    if case.algorithm == "pull_push":
        case = replace(case, symmetric="both", layout="contiguous", output_layout="contiguous")
        if case.form == "functional":
            case = replace(case, form="out")  # a new tensor is never symmetric
    if case.form == "inplace":
        case = replace(case, output_offset=case.input_offset, output_layout=case.layout)
        if case.symmetric in ("input", "output"):
            case = replace(case, symmetric="both")
    return case


def border_sizes(dtype: str, world: int) -> list[int]:
    """Numbers of elements at and around the borders of vectors, tiles and parts of tiles."""
    itemsize = dtype_of(dtype).itemsize
    borders = [VECTOR_BYTES, TILE_BYTES, 2 * TILE_BYTES, world * VECTOR_BYTES, world * TILE_BYTES]
    sizes = {0, 1, 2, 3, 7, 13, 1000, 2047}
    for border in borders:
        sizes |= {border // itemsize + step for step in (-1, 0, 1)}
    return sorted(size for size in sizes if size >= 0)


def every_dtype_and_op(algorithm: str, sizes: Iterable[int]) -> Iterator[Case]:
    """dtype x op x size for one algorithm, with random bits every other time."""
    for count, (dtype, size) in enumerate(itertools.product(DTYPES, sizes)):
        for reduce_op in legal_ops(dtype):
            style = ("random", "bits", "special")[count % 3]
            yield legal(Case(dtype, reduce_op, size, algorithm, style=style, seed=count + 1))


def random_case(choose: random.Random, largest: int, algorithms: tuple[str, ...]) -> Case:
    """A case drawn from all that exists. The same on every rank that has the same `choose`."""
    dtype = choose.choice(DTYPES)
    # Small sizes as often as large ones.
    numel = int(2 ** choose.uniform(0, largest.bit_length() - 1)) - choose.randrange(2)
    return legal(
        Case(
            dtype=dtype,
            reduce_op=choose.choice(legal_ops(dtype)),
            numel=max(0, min(numel, largest)),
            algorithm=choose.choice(algorithms),
            form=choose.choice(FORMS),
            style=choose.choice(("random", "bits", "special", "ones")),
            max_blocks=choose.choice((0, 0, 1, 2, 3, 8, 64)),
            input_offset=choose.choice((0, 0, 1, 3, 8)),
            output_offset=choose.choice((0, 0, 1, 5, 16)),
            layout=choose.choice(("contiguous", "contiguous", "transposed", "sliced")),
            output_layout=choose.choice(("contiguous", "contiguous", "transposed", "spread")),
            symmetric=choose.choice(SYMMETRIC),
            seed=choose.randrange(1, 1000),
        )
    )


def sampled(cases: Iterable[Case], count: int, seed: int = 7) -> list[Case]:
    """At most `count` of the cases, spread over them, in their order."""
    everything = list(cases)
    if len(everything) <= count:
        return everything
    chosen = sorted(random.Random(seed).sample(range(len(everything)), count))
    return [everything[index] for index in chosen]


def float_dtypes() -> tuple[str, ...]:
    return FLOATS
