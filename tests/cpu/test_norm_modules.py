"""Tests which norms TensorParallelRMSNorm.from_module accepts and refuses, and its warning about
eval mode with gradients. The tests use one rank. tests/common/suites/nn_norm.py tests the results
of several ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from collx.nn import TensorParallelRMSNorm
from collx.nn import gradients as module_under_test
from collx.nn.known_norms import KNOWN
from tests.common.pool import on_ranks
from tests.common.posing import posing
from tests.common.rank import Rank

COLS, EPS = 96, 1e-5

# The folders in transformers of classes whose model is not the beginning of their name.
MODELS = {
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "FlexOlmo": "flex_olmo",
    "GptOss": "gpt_oss",
    "GraniteMoe": "granitemoe",
    "GraniteMoeHybrid": "granitemoehybrid",
    "HunYuanDenseV1": "hunyuan_v1_dense",
    "HunYuanMoEV1": "hunyuan_v1_moe",
    "Ernie4_5_Moe": "ernie4_5_moe",
    "Glm4Moe": "glm4_moe",
    "Lfm2Moe": "lfm2_moe",
    "Llama4Text": "llama4",
    "MiniMaxM2": "minimax_m2",
    "MllamaText": "mllama",
    "NemotronH": "nemotron_h",
    "Qwen2Moe": "qwen2_moe",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3Moe": "qwen3_moe",
    "Qwen3VLMoeText": "qwen3_vl_moe",
    "Qwen3VLText": "qwen3_vl",
    "Qwen3Next": "qwen3_next",
    "Qwen3_5Moe": "qwen3_5_moe",
    "RecurrentGemma": "recurrent_gemma",
    "SeedOss": "seed_oss",
}


def of_transformers(name: str) -> type[torch.nn.Module]:
    model = name.removesuffix("RMSNorm")
    folder = MODELS.get(model, model.lower())
    file = f"transformers.models.{folder}.modeling_{folder}"
    module = pytest.importorskip(file, reason=f"this transformers has no {file}")
    found: type[torch.nn.Module] = getattr(module, name)
    return found


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.worlds(1)
@pytest.mark.parametrize("name", sorted(KNOWN))
@on_ranks
def test_a_known_norm_of_transformers_is_computed_as_there(rank: Rank, name: str) -> None:
    """Checks the weight, its offset and the rounding against the class with the name."""
    norm: Any = of_transformers(name)(COLS, eps=EPS)
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        norm.to(dtype)
        x = (4 * torch.randn(64, COLS, generator=generator)).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(norm.weight + torch.randn(COLS, generator=generator) / 4)
            made: Any = TensorParallelRMSNorm.from_module(norm, group=rank.communicator())
            got, want = made(x), norm(x)
        near = 1e-5 if dtype == torch.float32 else 2**-7
        assert torch.allclose(got.float(), want.float(), rtol=near, atol=1e-6)
    # At most one bfloat16 ulp, and rarely. With rounding elsewhere, a third of the values differ.
    assert (got != want).float().mean() < 0.02


def named(name: str) -> type[torch.nn.Module]:
    return type(name, (torch.nn.Module,), {"forward": lambda self, x: x})


def like(name: str, **attributes: Any) -> torch.nn.Module:
    """Returns a module with a weight whose class poses as the class of transformers."""
    return made_of(posing(named(name)), **attributes)


def made_of(kind: type[torch.nn.Module], **attributes: Any) -> torch.nn.Module:
    made = kind()
    made.weight = torch.nn.Parameter(torch.ones(COLS))
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def test_what_is_known_is_taken_over() -> None:
    """Checks the options for known names, without transformers."""
    llama = TensorParallelRMSNorm.from_module(like("LlamaRMSNorm", variance_epsilon=EPS))
    assert (llama.eps, llama.rounding, llama.weight_offset) == (EPS, "parity_weight", 0.0)
    gemma = TensorParallelRMSNorm.from_module(like("GemmaRMSNorm", eps=EPS))
    assert (gemma.eps, gemma.rounding, gemma.weight_offset) == (EPS, "parity", 1.0)
    olmo = TensorParallelRMSNorm.from_module(like("Olmo2RMSNorm", variance_epsilon=EPS))
    assert (olmo.eps, olmo.rounding, olmo.weight_offset) == (EPS, "parity", 0.0)
    again = TensorParallelRMSNorm.from_module(gemma, quantization="fp8")
    assert (again.eps, again.rounding, again.weight_offset) == (EPS, "parity", 1.0)
    assert again.weight is gemma.weight
    told = TensorParallelRMSNorm.from_module(like("GemmaRMSNorm", eps=EPS), rounding="fp32")
    assert (told.rounding, told.weight_offset) == ("fp32", 1.0)


class Changed(torch.nn.RMSNorm):
    """A derived class, which may compute something else."""


def changed(name: str) -> torch.nn.Module:
    made = like(name, variance_epsilon=EPS)
    type(made).forward = lambda self, x: -x
    return made


def pretending(name: str) -> torch.nn.Module:
    """Returns an instance of a class whose module contains another class with the same name."""
    kind = posing(named(name))
    posing(named(name))
    return made_of(kind, variance_epsilon=EPS)


UNKNOWN: dict[str, torch.nn.Module] = {
    "a norm with a mean and a bias": torch.nn.LayerNorm(COLS),
    "an unknown name": like("RMSNorm", eps=EPS),
    "an unknown name with Llama's attribute": like("CohereLayerNorm", variance_epsilon=EPS),
    "a norm with a gate": like("Qwen3NextRMSNormGated", variance_epsilon=EPS),
    "a known name without its eps": like("LlamaRMSNorm", eps=EPS),
    "a class of one's own with a known name": made_of(named("LlamaRMSNorm"), variance_epsilon=EPS),
    "a known class with another forward": changed("MistralRMSNorm"),
    "a class in place of a known one": pretending("MixtralRMSNorm"),
    "a class derived from a known one": Changed(COLS),
    "two dimensions": torch.nn.RMSNorm([2, COLS]),
    "no weight": torch.nn.RMSNorm(COLS, elementwise_affine=False),
    "no norm": torch.nn.Linear(COLS, COLS),
    "nothing at all": torch.nn.ReLU(),
}


@pytest.mark.parametrize("what", sorted(UNKNOWN))
def test_an_unknown_norm_is_refused(what: str) -> None:
    """Its mean, bias or gate would be dropped silently. The error contains the remedy."""
    norm = UNKNOWN[what]
    with pytest.raises(TypeError) as caught:
        TensorParallelRMSNorm.from_module(norm)
    kinds = (f"got a {type(norm).__name__}", "torch.nn.RMSNorm", "LlamaRMSNorm", "GemmaRMSNorm")
    for word in (*kinds, "call TensorParallelRMSNorm(", "assign its weight"):
        assert word in str(caught.value)


class Model(torch.nn.Module):
    """A model whose forward contains the line that a warning must refer to."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


@pytest.mark.worlds(1)
@on_ranks
def test_eval_mode_with_gradients_is_warned_of_once(rank: Rank) -> None:
    """This case uses the slower path. The warning contains the remedies and refers to the line in
    the user's model."""
    norm = TensorParallelRMSNorm(COLS, group=rank.communicator())
    model, x = Model(norm), torch.ones(2, COLS)

    def warned(model: Callable[[torch.Tensor], object] = model) -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x)
        return caught

    assert not warned()  # in training
    model.eval()
    with torch.no_grad():
        assert not warned()
    with torch.inference_mode():
        assert not warned()
    norm.requires_grad_(False)
    assert not warned()
    norm.requires_grad_(True)
    (warning,) = warned()
    assert not warned()  # again
    lines, start = inspect.getsourcelines(Model.forward)
    place = start + next(i for i, line in enumerate(lines) if "self.norm(x)" in line)
    assert warning.category is UserWarning
    assert (Path(warning.filename).name, warning.lineno) == (Path(__file__).name, place)
    assert "torch.inference_mode()" in str(warning.message)
    assert "requires_grad_(False)" in str(warning.message)
    module_under_test._warned = False
    (warning,) = warned(norm)
    assert Path(warning.filename).name == Path(__file__).name
    module_under_test._warned = False
    torch._dynamo.reset()
    assert not warned(torch.compile(model, fullgraph=True, backend="eager"))
