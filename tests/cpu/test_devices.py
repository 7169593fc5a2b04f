"""Tests which device a communicator and the examples use, depending on the build, the GPUs and the
requested device."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collx
from collx._bootstrap import options, steps
from collx._extension import Build

ROOT = Path(__file__).resolve().parents[2]


def device_of(
    monkeypatch: pytest.MonkeyPatch, backends: str, *, built: bool, gpus: int, asked: Any = None
) -> torch.device:
    """Returns the device that init would use for a group with these backends."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    build = Build("2.11.0", "13.0" if built else None, ())
    monkeypatch.setattr(options, "build", build)
    group: Any = None
    return options._device(asked, group)


def test_the_build_says_whether_it_has_cuda_kernels() -> None:
    assert collx.cuda_built is (collx.build.cuda is not None)
    assert torch.__version__.startswith(".".join(collx.build.torch.split(".")[:2]) + ".")
    if collx.build.cuda is None:
        assert collx.build.architectures == ()
    else:
        assert re.fullmatch(r"\d+\.\d+", collx.build.cuda)
        assert all(re.fullmatch(r"\d+\.\d(\+PTX)?", a) for a in collx.build.architectures)
        assert collx.build.architectures
    assert {"build", "cuda_built"} <= set(collx.__all__)


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_for_gpus_gets_the_current_one(
    monkeypatch: pytest.MonkeyPatch, backends: str
) -> None:
    assert device_of(monkeypatch, backends, built=True, gpus=2) == torch.device("cuda", 1)


@pytest.mark.parametrize("built", [True, False])
def test_a_group_for_the_cpu_gets_it_without_a_word(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, built: bool
) -> None:
    found = device_of(monkeypatch, "cpu:gloo,cuda:gloo", built=built, gpus=2)
    assert found == torch.device("cpu")
    assert not recwarn.list


def test_without_kernels_a_group_for_gpus_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a group cannot use a communicator on the CPU. The error contains the remedies."""
    with pytest.raises(ValueError, match=r"no CUDA kernels.*COLLX_CUDA=1.*nvcc.*device='cpu'"):
        device_of(monkeypatch, "cuda:nccl", built=False, gpus=2)
    found = device_of(monkeypatch, "cuda:nccl", built=False, gpus=2, asked="cpu")
    assert found == torch.device("cpu")


def test_without_gpus_a_group_for_them_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no GPU"):
        device_of(monkeypatch, "cuda:nccl", built=True, gpus=0)


def test_without_kernels_a_group_for_both_gets_the_cpu_and_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match="accepts only CPU tensors.*no CUDA kernels"):
        found = device_of(monkeypatch, "cpu:gloo,cuda:nccl", built=False, gpus=2)
    assert found == torch.device("cpu")


def test_without_gpus_a_group_for_both_gets_the_cpu_without_a_word(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    found = device_of(monkeypatch, "cpu:gloo,cuda:nccl", built=False, gpus=0)
    assert found == torch.device("cpu")
    assert not recwarn.list


def test_steps_on_a_device_create_no_context_on_the_previous_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The functions of PyTorch that select a device are simulated. Two of them create a context."""
    current, contexts = 0, set()

    def select(device: int) -> None:
        nonlocal current
        current = device
        contexts.add(device)

    def exchange(device: int) -> int:
        previous = current
        select(device)
        return previous

    def maybe_exchange(device: int) -> int:
        nonlocal current
        current = device
        return device

    def stream_on(device: torch.device | None) -> Any:
        of = torch.device("cuda", current) if device is None else device
        return SimpleNamespace(device=of)

    for name, stand_in in {
        "is_available": lambda: True,
        "current_device": lambda: current,
        "_exchange_device": exchange,
        "_maybe_exchange_device": maybe_exchange,
        "set_stream": lambda stream: select(stream.device.index),
        "current_stream": stream_on,
        "Stream": stream_on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with steps._current(torch.device("cuda", 1)):
        assert current == 1
    assert (current, contexts) == (0, {1})


@pytest.fixture
def usable_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields the examples' function that counts usable GPUs, on a machine with two GPUs."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    from _shared.devices import usable_gpus

    yield usable_gpus
    for name in [name for name in sys.modules if name.split(".")[0] == "_shared"]:
        del sys.modules[name]


def test_examples_say_why_they_stay_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], usable_gpus: Any
) -> None:
    monkeypatch.setattr(collx, "cuda_built", False)
    assert usable_gpus("auto") == 0
    assert "without CUDA kernels" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--device cuda: collx was built without CUDA kernels"):
        usable_gpus("cuda")
    monkeypatch.setattr(collx, "cuda_built", True)
    assert usable_gpus("auto") == 2
    assert not capsys.readouterr().out
