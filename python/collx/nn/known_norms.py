"""The RMSNorms that TensorParallelRMSNorm can replace, and their computations.

A module with a weight and an eps may compute anything (subtract a mean, add a bias, add 1 to the
weight), so only known types are accepted: those of PyTorch, and those of transformers, which collx
does not import. A class is one of transformers if it has a known name and transformers defines this
class and its forward.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["ACCEPTED", "KNOWN", "Form", "form_of", "placed"]


class Form(NamedTuple):
    """The computation of a norm, as options of TensorParallelRMSNorm."""

    eps: float | None
    rounding: str
    weight_offset: float


# Classes of transformers without their common suffix, by the attribute of the eps, the rounding,
# and the offset of the weight. Names are no indication: those of Olmo and GptOss multiply before
# they round, and that of Qwen3Next adds 1.
_FORMS = {
    ("variance_epsilon", "parity_weight", 0.0): (
        "Apertus Arcee DeepseekV2 DeepseekV3 Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 Glm Glm4 Glm4Moe "
        "Granite GraniteMoe GraniteMoeHybrid HunYuanDenseV1 HunYuanMoEV1 Lfm2 Lfm2Moe Llama "
        "MiniMax MiniMaxM2 Ministral Mistral Mixtral MllamaText Olmoe Phi3 Qwen2 Qwen2Moe "
        "Qwen2_5_VL Qwen3 Qwen3Moe Qwen3VLMoeText Qwen3VLText SeedOss SmolLM3"
    ),
    ("eps", "parity_weight", 0.0): "Llama4Text",
    ("variance_epsilon", "parity", 0.0): "FlexOlmo GptOss Helium NemotronH Olmo2 Olmo3",
    ("eps", "parity", 0.0): "Gemma3n Gemma4",
    ("eps", "parity", 1.0): (
        "Gemma Gemma2 Gemma3 Qwen3Next Qwen3_5 Qwen3_5Moe RecurrentGemma T5Gemma VaultGemma"
    ),
}

KNOWN = {f"{model}RMSNorm": form for form, models in _FORMS.items() for model in models.split()}
"""Maps the names of classes to the attribute of the eps, the rounding and the weight's offset."""

ACCEPTED = (
    "torch.nn.RMSNorm over the last dimension, with a weight; TensorParallelRMSNorm; and of "
    f"transformers {', '.join(sorted(KNOWN))}"
)


def form_of(norm: nn.Module) -> Form | None:
    """Returns the computation of a norm, None if the norm is not known."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if type(norm) is nn.RMSNorm:
        return Form(norm.eps, "parity", 0.0)
    known = KNOWN.get(type(norm).__name__)
    if known is None or not hasattr(norm, known[0]) or not _of_transformers(type(norm)):
        return None
    eps: Any = getattr(norm, known[0])
    return Form(eps, *known[1:])


def placed(
    parameter: nn.Parameter, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """Returns the parameter itself if it has this device and dtype, or else a copy. None stands for
    those of the parameter."""
    moved = parameter.to(device=device, dtype=dtype)
    return parameter if moved is parameter else nn.Parameter(moved, parameter.requires_grad)


def _of_transformers(kind: type[nn.Module]) -> bool:
    """Whether this is an unchanged class of transformers. Other packages define classes with the
    same name, or replace the forward of the class."""
    modules = (kind.__module__, getattr(kind.forward, "__module__", None))
    return all(
        isinstance(name, str) and name.startswith("transformers.models.") for name in modules
    ) and (getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind)
