"""A Llama as transformers saves one: config.json, safetensors and, if it is there, a tokenizer.

What the split decoder would compute otherwise than the model is refused by name. Nothing is
fetched.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from _shared.llama import Size

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long a text is by now."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def config_of(folder: Path) -> Any:
    """Raises ValueError where `folder` holds no model that `_shared.llama` computes."""
    if not folder.is_dir():
        raise ValueError(f"no such directory: {folder}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"no config.json in {folder}")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind != "llama":
        raise ValueError(f"{folder} holds a model of type {kind}, not llama")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"no safetensors in {folder}")
    config: Any = LlamaConfig.from_pretrained(folder)
    rope = config.rope_parameters["rope_type"]
    refused = {
        f"rotary embeddings of type {rope} (but {', '.join(ROPES)})": rope not in ROPES,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        f"hidden_act {config.hidden_act} (but silu)": config.hidden_act != "silu",
        "quantized weights": getattr(config, "quantization_config", None) is not None,
    }
    found = [what for what, there in refused.items() if there]
    if found:
        raise ValueError(f"the split decoder does not do {', '.join(found)}")
    return config


def size_of(config: Any, length: int) -> Size:
    """Raises ValueError where `length` tokens are more than the model was made for."""
    if length > config.max_position_embeddings:
        raise ValueError(
            f"--prompt and --tokens are {length} together, and the model is made for"
            f" {config.max_position_embeddings} tokens at most"
        )
    return Size(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        length=length,
    )


def load(folder: Path, show_progress: bool) -> LlamaForCausalLM:
    """The whole model, in float32. Raises ValueError when weights are missing."""
    transformers_logging.set_verbosity_error()
    if not show_progress:
        transformers_logging.disable_progress_bar()
    loaded: Any = LlamaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    model: LlamaForCausalLM = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:  # transformers would go on with random ones
        raise ValueError(f"{folder} lacks {len(missing)} tensors, such as {missing[0]}")
    model.eval()
    return model


def tokenizer_of(folder: Path) -> Any:
    """None where there is none."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def prompts_of(tokenizer: Any, sentences: list[str], longest: int) -> Tensor:
    """The beginnings of sentences, of `longest` tokens at most and all of the same number, since
    the decoder knows no padding: int64 [sentences, tokens]."""
    rows = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    length = min(longest, *map(len, rows))
    if length == 0:
        raise ValueError("a sentence has no tokens")
    return torch.tensor([row[:length] for row in rows])


def text_of(tokenizer: Any, tokens: list[int], ends: int | list[int] | None) -> str:
    """Up to the first token of `ends`, which the model was trained to end with."""
    ended = {ends} if isinstance(ends, int) else set(ends or ())
    length = next((n for n, token in enumerate(tokens) if token in ended), len(tokens))
    text: str = tokenizer.decode(tokens[:length], skip_special_tokens=True)
    return text
