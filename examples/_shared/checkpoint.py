"""Loads a Llama as transformers saves it: config.json, safetensors and, optionally, a tokenizer.

Options of the model that the split decoder does not support are refused by name. Nothing is
downloaded.
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
    """Returns the config of a model. Raises ValueError if `folder` does not contain a model that
    `_shared.llama` supports."""
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
    """Returns the sizes of a model. Raises ValueError if it does not support `length` tokens."""
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
    """Loads the whole model in float32. Raises ValueError if weights are missing."""
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
    if missing:  # transformers would continue with random weights
        raise ValueError(f"{folder} lacks {len(missing)} tensors, such as {missing[0]}")
    model.eval()
    return model


def tokenizer_of(folder: Path) -> Any:
    """Returns the tokenizer of a model, None if there is none."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def prompts_of(tokenizer: Any, sentences: list[str], longest: int) -> Tensor:
    """Returns the beginnings of sentences, int64 [sentences, tokens]. All have the same number of
    tokens, at most `longest`, because the decoder does not support padding."""
    rows = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    length = min(longest, *map(len, rows))
    if length == 0:
        raise ValueError("a sentence has no tokens")
    return torch.tensor([row[:length] for row in rows])


def text_of(tokenizer: Any, tokens: list[int], ends: int | list[int] | None) -> str:
    """Decodes the tokens before the first one of `ends`, the end tokens of the model."""
    ended = {ends} if isinstance(ends, int) else set(ends or ())
    length = next((n for n, token in enumerate(tokens) if token in ended), len(tokens))
    text: str = tokenizer.decode(tokens[:length], skip_special_tokens=True)
    return text
