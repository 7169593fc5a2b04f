"""Tests that the examples complete and that their own checks pass."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.compiling import needs_compiler
from tests.common.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "tensor_parallel_llama.py"

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def run(program: str, *arguments: str, **environment: str) -> str:
    """Returns the output of an example on two CPU ranks."""
    return run_program(ROOT / "examples" / program, *arguments, **environment)


def checked(printed: str) -> list[str]:
    """Returns the verdicts of an example's checks."""
    return re.findall(r"^  (ok|WRONG) ", printed, re.MULTILINE)


def timed(printed: str) -> list[str]:
    """Returns the names of the rows with a rate in the table of the split Llama."""
    return re.findall(r"^  (\S.*?) +\d+$", printed.partition("tokens a second")[2], re.MULTILINE)


@needs_transformers
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_split_llama_chooses_the_tokens_of_the_unsplit_one(dtype: str) -> None:
    sizes = {
        "layers": 2,
        "hidden-size": 96,
        "intermediate-size": 130,
        "heads": 6,
        "kv-heads": 3,  # two on one rank, one on the other
        "vocabulary": 200,
        "batch-size": 2,
        "prompt": 5,
        "tokens": 8,
        "rounds": 1,
    }
    options = [f"--{name}={value}" for name, value in sizes.items()]
    printed = run(LLAMA, "--device=cpu", f"--dtype={dtype}", *options)
    assert checked(printed) == ["ok", "ok"]
    assert timed(printed) == ["collx, fused", "collx, unfused", "gloo, unfused"]


@pytest.mark.parametrize(
    ("dtype", "activation", "same"), [("float32", "relu", True), ("bfloat16", "gelu", False)]
)
def test_an_epilogue_is_as_near_as_the_unfused_layer(
    dtype: str, activation: str, same: bool
) -> None:
    """A sum and relu are exact or rounded equally often in both forms. gelu is rounded once less
    in the fused form."""
    sizes = [
        "--rows=5",
        "--features=33",
        "--outputs=70",
    ]  # 17 features on one rank, 16 on the other
    given = ["--device=cpu", f"--dtype={dtype}", f"--activation={activation}", *sizes]
    printed = run("tensor_parallel_epilogue.py", *given)
    assert checked(printed) == ["ok", "ok"]
    found = re.search(r"^  (\d+) of 350 elements differ", printed, re.MULTILINE)
    assert found is not None, printed
    assert (int(found[1]) == 0) is same
    assert len(re.findall(r"^  (float64|fused|unfused) ", printed, re.MULTILINE)) == 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Yields a function that imports a module of the examples as rank 0 of two ranks."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.split(".")[0] in ("_shared", LLAMA[:-3])]:
        del sys.modules[name]


def saved_llama(folder: Path, **options: Any) -> Any:
    """Saves a Llama of one layer with random weights, using transformers. Returns the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,  # large, so that answers do not repeat one token
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))
    model.save_pretrained(folder)
    return model.eval()


def saved_tokenizer(folder: Path, sentences: list[str]) -> Any:
    """Saves a tokenizer whose vocabulary is the words of some sentences. Returns the tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="[?]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(sentences, trainers.WordLevelTrainer(special_tokens=["[?]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[?]")
    tokenizer.save_pretrained(folder)
    return tokenizer


@needs_transformers
def test_a_saved_llama_continues_sentences_as_transformers_does(tmp_path: Path) -> None:
    """The model has a tokenizer, scaled rotary embeddings, tied embeddings and an end token."""
    sentences = ["A cat sleeps on the sofa.", "The bank of the nation lifted its rates."]
    (tmp_path / "sentences.txt").write_text("\n".join(["# two", *sentences]))
    tokenizer = saved_tokenizer(tmp_path, sentences)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = saved_llama(
        tmp_path,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        rope_parameters=rope,
        eos_token_id=None,
    )
    ids = torch.tensor([tokenizer(sentence)["input_ids"][:5] for sentence in sentences])
    chosen = model.generate(ids, do_sample=False, max_new_tokens=8)[:, 5:].tolist()
    last = chosen[0][5]
    assert last not in chosen[0][:5]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": last}))

    printed = run(
        LLAMA,
        "--device=cpu",
        "--dtype=float32",
        f"--model={tmp_path}",
        f"--sentences={tmp_path / 'sentences.txt'}",
        "--batch-size=2",
        "--prompt=5",
        "--tokens=8",
        "--rounds=1",
    )
    assert checked(printed) == ["ok", "ok"]
    for prompt, answer in zip(ids, chosen, strict=True):
        length = answer.index(last) if last in answer else len(answer)
        said = f"  {tokenizer.decode(prompt)} | {tokenizer.decode(answer[:length])}"
        assert said in printed.splitlines(), printed


@needs_transformers
def test_tokens_may_part_at_a_near_tie_alone(module: Callable[[str], Any]) -> None:
    """Trained models have near-ties, which rounding decides. Tokens after a near-tie are not
    compared. Everything else is."""
    decoding = module("_shared.decoding")
    logits = torch.tensor([[9.0, 0.0, 1.0], [4.0, 0.0, 3.9999], [8.0, 2.0, 0.0]])
    logits = logits.repeat(2, 1, 1)  # two prompts, three steps
    expected = decoding.Decoded(logits.argmax(-1), logits)
    last = logits[:, -1].clone()
    assert decoding.difference(expected.tokens, last, expected) == (0, 0.0, 0)
    last[0] += 1.0
    assert decoding.difference(expected.tokens, last, expected).logits == pytest.approx(1 / 9)
    tied = torch.tensor([[0, 2, 1], [0, 0, 0]])
    assert decoding.difference(tied, last, expected) == (0, 0.0, 1)
    last[1] = float("nan")
    assert decoding.difference(tied, last, expected).logits == float("inf")
    wrong = torch.tensor([[0, 2, 1], [0, 0, 1]])
    assert decoding.difference(wrong, last, expected)[::2] == (1, 1)


@needs_transformers
def test_a_saved_llama_that_lacks_weights_is_refused(
    tmp_path: Path, module: Callable[[str], Any]
) -> None:
    """transformers would continue with random weights, which differ between ranks."""
    from safetensors.torch import load_file, save_file

    saved_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(dict(list(load_file(file).items())[1:]), file, {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 tensors, such as "):
        module("_shared.checkpoint").load(tmp_path, False)


@needs_transformers
@needs_compiler
def test_the_compiled_decoders_choose_the_same_tokens(tmp_path: Path) -> None:
    """The test uses a saved model without a tokenizer. The decoder that does not use collx is
    rewritten to call the fused operator for every norm."""
    saved_llama(tmp_path)
    printed = run(
        LLAMA,
        "--device=cpu",
        f"--model={tmp_path}",
        "--compile",
        "--batch-size=2",
        "--prompt=5",
        "--tokens=6",
        "--rounds=1",
        # The ranks use all cores, so the compiler starts no processes and compiles no probes.
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_VEC_ISA_OK="1",
    )
    assert checked(printed) == ["ok"] * 6
    assert "2 of 2 norms rewritten" in printed
    assert "2 x allreduce_residual_rmsnorm, parity_weight" in printed
    compiled = ["collx, fused, compiled", "gloo, unfused, compiled", "rewritten to collx"]
    assert timed(printed)[3:] == compiled


REFUSED = {
    "no-directory": ("{}", ["--model={}/none"], "no such directory"),
    "empty": ("{}", ["--model={}/.."], "no config.json"),
    "no-llama": ('{"model_type": "bert"}', [], "holds a model of type bert, not llama"),
    "ropes": (
        '{"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}',
        [],
        "does not do rotary embeddings of type dynamic",
    ),
    "biases": ('{"attention_bias": true, "mlp_bias": true}', [], "do attention_bias, mlp_bias"),
    "activation": ('{"hidden_act": "gelu"}', [], "hidden_act gelu"),
    "quantized": ('{"quantization_config": {"bits": 4}}', [], "quantized weights"),
    "few-heads": (
        '{"num_key_value_heads": 1}',
        [],
        "1 key-value heads cannot be split over 2 ranks",
    ),
    "long": ("{}", ["--tokens=60"], "made for 64 tokens at most"),
    "layers": ("{}", ["--layers=1"], "--layers: the config.json of --model says it"),
}


@needs_transformers
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_split_llama_cannot_do_is_refused_by_name(
    case: str,
    tmp_path: Path,
    module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes, options, said = REFUSED[case]
    folder = tmp_path / "model"
    saved_llama(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **json.loads(changes)}))
    given = [f"--model={folder}", *(option.format(folder) for option in options)]
    monkeypatch.setattr(sys, "argv", [LLAMA, *given])
    with pytest.raises(SystemExit) as stopped:
        module(LLAMA[:-3]).parse_arguments()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_wrong_options_end_with_status_2(
    module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for example, option, said in (
        ("train", "--steps=0", "--steps is at least 1"),
        ("train", "--batch=0", "--batch is at least 1"),
        ("train", "--heads=3", "--heads must divide --width"),
        ("train", "--backend=foo", "--backend: invalid choice: 'foo'"),
        ("tensor_parallel_embedding", "--weights=/nowhere", "no such file: /nowhere"),
        ("tensor_parallel_embedding", "--sentences=/nowhere", "no such file: /nowhere"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{example}.py", option])
        with pytest.raises(SystemExit) as stopped:
            module(example).parse_arguments()
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


def test_posted_calls_overlap_with_the_results_of_synchronous_ones() -> None:
    sizes = {"layers": 3, "width": 64, "rows": 16, "product": 64, "gathered": 1, "rounds": 2}
    printed = run("overlap.py", "--device=cpu", *(f"--{name}={n}" for name, n in sizes.items()))
    assert checked(printed) == ["ok", "ok"]
    assert len(re.findall(r"^  \S.*? +\d+\.\d{3}$", printed, re.MULTILINE)) == 8
