"""explain() and the call make the same choice, also with options of a norm and tuned blocks and
threads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import collx
from collx._extension import extension

from ..attempt import Attempt, assert_raised, attempt, works
from ..norms import NAMES, quantizes
from ..pool import on_ranks
from ..rank import Rank

FUSED = "allreduce_residual_rmsnorm_fp8"


@pytest.mark.worlds(2, 4)
@on_ranks
def test_explain_knows_the_options_of_a_norm(rank: Rank) -> None:
    """What the owners of rows pass on depends on the options, and so does the workspace: a plane
    of float8 and one of bfloat16, two of bfloat16 with keep_norm, or only the sums."""
    communicator = rank.communicator()

    def explained(**options: Any) -> Any:
        return communicator.explain(
            FUSED, (4096, 1024), torch.bfloat16, algorithm="twoshot_push", **options
        )

    found = {
        "usual": explained(),
        "keep_norm": explained(keep_norm=True),
        "parity": explained(keep_norm=True, rounding="parity"),
        "tensor": explained(scale_mode="tensor"),
        "group": explained(scale_mode="group"),
        "wide group": explained(scale_mode="group", quant_group_size=1024),
    }
    workspace = {name: plan.workspace_bytes for name, plan in found.items()}
    rows = 4096 // rank.size
    row = 1024 * 2  # bytes of bfloat16; a row and its results take whole tiles of 1024 bytes
    assert workspace["usual"] == 4 * rank.size * rows * (row + row // 2 + 1024)
    assert workspace["keep_norm"] == workspace["usual"] + 4 * rank.size * rows * row
    assert workspace["parity"] == 4 * rank.size * rows * row  # only the sums
    assert workspace["tensor"] == workspace["usual"] - 4 * rank.size * rows * 1024
    assert workspace["group"] >= workspace["tensor"]


@pytest.mark.worlds(2, 4)
@on_ranks
def test_explain_says_what_carries_a_call_out(rank: Rank) -> None:
    """A name may stand for several kernels; the size and the tensors select one."""
    communicator = rank.communicator()

    def runs(op: str, numel: int, algorithm: str, **options: Any) -> str:
        found = communicator.explain(op, numel, torch.float32, algorithm=algorithm, **options)
        assert found.algorithm == algorithm
        return str(found.executed_by)

    small = {"cpu": "staged", "cuda": "channels"}[rank.device.type]
    lanes = rank.device.type == "cuda" and rank.size == 2
    assert runs("broadcast", 1000, "onestage") == small
    large = runs("broadcast", 4 << 20, "onestage", output_symmetric=True)
    assert large == ("lanes" if lanes else "direct")
    assert runs("allreduce", 1000, "oneshot_push") == "oneshot_push"


@pytest.mark.worlds(2)
@on_ranks
def test_explain_refuses_what_the_call_refuses(rank: Rank) -> None:
    """No option is silently ignored."""
    communicator = rank.communicator()

    def explained(op: str, **options: Any) -> Attempt:
        return attempt(lambda: communicator.explain(op, (4, 256), torch.float32, **options))

    for op in NAMES:
        assert_raised(explained(op), "")
        assert_raised(explained(op, keep_norm=True), "" if quantizes(op) else "ValueError")
    wrong: dict[str, dict[str, Any]] = {
        "rounding": {"rounding": "up"},
        "scale_mode": {"scale_mode": "column"},
        "quant_group_size": {"scale_mode": "group", "quant_group_size": 96},
    }
    for name, options in wrong.items():
        assert_raised(explained(FUSED, **options), "ValueError", f"collx.{FUSED}: {name}: got")
    assert_raised(explained(NAMES[0], scale_mode="group"), "ValueError")
    assert_raised(explained("allreduce", rounding="parity"), "ValueError")


BAD_SHAPES: dict[str, tuple[tuple[Any, Any], str, str]] = {
    "tensor": ((torch.ones(3), torch.float32), "TypeError", "shape: got a Tensor"),
    "float": ((4.0, torch.float32), "TypeError", "shape: got a float"),
    "floats": (((4, 2.0), torch.float32), "TypeError", "shape: got a tuple"),
    "text": (("4", torch.float32), "TypeError", "shape: got a str"),
    "negative": ((-4, torch.float32), "ValueError", "shape: got -4; accepted: dimensions of 0"),
    "negatives": (((-4, -2), torch.float32), "ValueError", "shape: got (-4, -2)"),
    "huge": (((2**40, 2**40), torch.float32), "ValueError", "9223372036854775807 elements"),
    "dtype": ((4, "float32"), "TypeError", "dtype: got 'float32'; accepted: a torch.dtype"),
}


@pytest.mark.worlds(1)
@on_ranks
def test_explain_and_workspace_bytes_name_a_wrong_shape_or_dtype(rank: Rank) -> None:
    explain = partial(rank.communicator().explain, "allreduce")
    found = {
        name: (
            attempt(partial(explain, shape, dtype)),
            attempt(partial(collx.workspace_bytes, "allreduce", shape, dtype, rank.size)),
        )
        for name, ((shape, dtype), *_) in BAD_SHAPES.items()
    }
    for name, (_, kind, words) in BAD_SHAPES.items():
        for call, refused in zip(("explain", "workspace_bytes"), found[name], strict=True):
            assert refused.error == kind, refused
            assert refused.message.startswith(f"{call}: "), refused
            assert words in refused.message, refused


@pytest.mark.worlds(2)
@on_ranks
def test_explain_and_the_call_check_an_algorithm_alike(rank: Rank) -> None:
    """Peers access no tensor of a call without elements, so any tensor is accepted."""
    communicator = rank.communicator()
    found = {}
    for op in ("allreduce", "reducescatter", "allgather"):
        for numel in (0, 256):
            x = torch.ones(numel, device=rank.device)
            shape = numel * rank.size if op == "allgather" else numel
            for algorithm in ("pull_push", "direct", "staged", "multimem", "oneshot_pull"):
                call = partial(getattr(collx, op), x, group=communicator, algorithm=algorithm)
                explain = partial(communicator.explain, op, shape, x.dtype, algorithm=algorithm)
                called, explained = attempt(call), attempt(explain)
                found[f"{op} {numel} {algorithm}"] = (called.error, explained.error)
    assert all(called == explained for called, explained in found.values()), found
    assert found["allreduce 256 pull_push"][0] == "ValueError"
    assert found["allreduce 0 pull_push"][0] == ""


@pytest.mark.worlds(2)
@on_ranks
def test_explain_tells_what_a_tuner_asked_for(rank: Rank) -> None:
    """On the CPU, where there is no grid, tuning changes nothing. Large calls with few blocks use
    a fixed number of threads."""
    communicator = rank.communicator("tuned")
    found: dict[str, Any] = {}
    for blocks, threads in ((0, 0), (3, 128), (1, 64), (0, 0)):
        communicator._native.tune(blocks, threads)
        for op, shape in (("allreduce", 1 << 16), (FUSED, (64, 4096)), ("alltoall", 1 << 16)):
            plan = communicator.explain(op, shape, torch.float32)
            found[f"{op} {blocks} x {threads}"] = (plan.blocks, plan.threads)
        assert works(rank, communicator)
    if rank.device.type == "cpu":
        assert set(found.values()) == {(1, 1)}, found
        return
    for op in ("allreduce", "alltoall"):
        assert found[f"{op} 3 x 128"] == (3, 128), found
        assert found[f"{op} 1 x 64"] == (1, 64), found
        assert found[f"{op} 0 x 0"] not in ((3, 128), (1, 64)), found
    # For a norm, threads are only a request: its blocks follow from the rows.
    assert found[f"{FUSED} 1 x 64"] != found[f"{FUSED} 0 x 0"], found


@pytest.mark.worlds(2)
@on_ranks
def test_a_tuner_gets_what_the_device_holds_at_once(rank: Rank) -> None:
    """Resident blocks would wait for blocks that are not resident."""
    native = rank.communicator("tuned")._native
    for blocks, threads in ((1025, 64), (0, 64), (1, 63), (1, 1024)):
        found = attempt(lambda: native.tune(blocks, threads))  # noqa: B023
        assert found.error == "ValueError", found
    resident = 1024
    if rank.device.type == "cuda":
        resident = extension.load_kernels(rank.device, rank.size)["blocks"]
        native.tune(resident, 512)
        assert works(rank, rank.communicator("tuned"))
        more = attempt(lambda: native.tune(resident + 1, 512))
        assert_raised(more, "ValueError", f"accepted: 1 to {resident},", "can run at once")
    most = attempt(lambda: native.tune(1024, 512))
    assert most.error == ("" if resident >= 1024 else "ValueError"), most
    native.tune(0, 0)
