"""Incremental text equals the text of all tokens, wherever it is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from coordinator.gateway.detokenize import Detokenizer
from coordinator.gateway.tokenizer import TextTokenizer
from tests.support.gateway import eos_id, ids_of, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = "hello wörld 漢字 🇩🇪 the 👩‍💻 end \u00e9\u0301 \ufffd literal"


def fed(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*(detokenizer.step(i) for i in ids), detokenizer.flush()])


@pytest.mark.parametrize("cut", range(len(ids_of(TEXT)) + 1))
def test_every_split_of_prompt_and_output_joins_to_the_text(cut: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = ids_of(TEXT)
    prompt_text = tokenizer.decode(ids[:cut])
    whole_characters = len(prompt_text) if TEXT.startswith(prompt_text) else len(prompt_text.rstrip("\ufffd"))
    output = fed(tokenizer.detokenizer(ids[:cut], skip_special_tokens=True), ids[cut:])
    assert prompt_text[:whole_characters] + output == TEXT


def test_a_character_is_shown_whole_or_not_at_all() -> None:
    detokenizer = tiny_tokenizer().detokenizer([], skip_special_tokens=True)
    pieces = [detokenizer.step(i) for i in ids_of("🙂")]
    assert pieces[:-1] == [""] * (len(pieces) - 1)
    assert pieces[-1] == "🙂"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = ids_of("a🙂")[:-1]
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
    assert "".join(detokenizer.step(i) for i in ids) == "a"
    assert detokenizer.flush() == tokenizer.decode(ids)[1:] == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character_gives_the_whole_character_once() -> None:
    ids = ids_of("Hi 🙂!")
    detokenizer = tiny_tokenizer().detokenizer(ids[:-2], skip_special_tokens=True)
    assert fed(detokenizer, ids[-2:]) == "🙂!"


def test_a_prompt_whose_last_character_is_never_finished_adds_nothing() -> None:
    ids = ids_of("Hi 🙂")
    detokenizer = tiny_tokenizer().detokenizer(ids[:-1], skip_special_tokens=True)
    assert fed(detokenizer, ids_of("x")) == "x"


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<|im_end|>b")])
def test_special_tokens(skip: bool, expected: str) -> None:
    detokenizer = tiny_tokenizer().detokenizer([], skip_special_tokens=skip)
    assert fed(detokenizer, [*ids_of("a"), eos_id(), *ids_of("b")]) == expected


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    ids = ids_of("🙂")
    detokenizer = tiny_tokenizer().detokenizer([], skip_special_tokens=True)
    assert fed(detokenizer, [ids[0], eos_id(), *ids[1:]]) == "🙂"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(3, 258), max_size=40))
def test_garbage_bytes_equal_the_full_decode(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    assert fed(tokenizer.detokenizer([], skip_special_tokens=True), ids) == tokenizer.decode(ids)


def test_endless_garbage_is_given_out_as_it_comes() -> None:
    tokenizer = tiny_tokenizer()
    continuation = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\x85")
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
    shown = "".join(detokenizer.step(continuation) for _ in range(500))
    assert len(shown) >= 490
    assert shown + detokenizer.flush() == "\ufffd" * 500


def metaspace_tokenizer() -> Tokenizer:
    """A sentencepiece-like vocabulary: words with a leading space, and bytes."""
    words = ["<unk>", "▁Hello", "▁world", "ly", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def byte_ids(text: str) -> list[int]:
    return [4 + b for b in text.encode()]


@pytest.mark.parametrize("prompt", [[1], [1, *byte_ids("é")], [1, 2, 1, 2, 1, 2, 1, 2]])
def test_a_leading_space_survives_the_prompts_end(prompt: list[int]) -> None:
    detokenizer = Detokenizer(metaspace_tokenizer(), prompt, special_ids=frozenset())
    assert fed(detokenizer, [2, 3]) == " worldly"


def test_without_a_prompt_the_tokenizer_strips_the_first_space() -> None:
    assert fed(Detokenizer(metaspace_tokenizer(), [], special_ids=frozenset()), [1, 2]) == "Hello world"


def test_byte_fallback_characters() -> None:
    detokenizer = Detokenizer(metaspace_tokenizer(), [1], special_ids=frozenset())
    assert fed(detokenizer, [2, *byte_ids("漢🙂"), 3]) == " world漢🙂ly"


def test_broken_byte_fallback_does_not_fail() -> None:
    detokenizer = Detokenizer(metaspace_tokenizer(), [1], special_ids=frozenset())
    text = fed(detokenizer, [*byte_ids("é"), 4 + 0xFF, 2, 3])
    assert text.endswith(" worldly")


def test_token_bytes_are_the_true_bytes() -> None:
    tokenizer = tiny_tokenizer()
    assert b"".join(tokenizer.token_bytes(i) for i in ids_of(TEXT)) == TEXT.encode()
    assert tokenizer.token_bytes(eos_id()) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.timeout(120)  # the first import of transformers brings torch: seconds, more on a busy machine
@pytest.mark.vllm
@pytest.mark.slow
def test_the_real_tokenizer_at_every_split(checkpoint: Path) -> None:
    tokenizer = TextTokenizer.load(checkpoint)
    assert tokenizer.eos_token_ids == {tokenizer.primary_eos_token_id} == {tokenizer.backend.token_to_id("<|im_end|>")}
    ids = tokenizer.backend.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == TEXT.encode()
    for cut in range(len(ids) + 1):
        prompt_text = tokenizer.decode(ids[:cut])
        shown = len(prompt_text) if TEXT.startswith(prompt_text) else len(prompt_text.rstrip("\ufffd"))
        assert prompt_text[:shown] + fed(tokenizer.detokenizer(ids[:cut], skip_special_tokens=True), ids[cut:]) == TEXT
    rendered = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


WITHOUT_TORCH = """
import importlib.util, json, sys
import json
import subprocess
import sys
from pathlib import Path
from coordinator.gateway.tokenizer import TextTokenizer, import_without_torch
import_without_torch()
tokenizer = TextTokenizer.load(Path(sys.argv[1]))
ids = tokenizer.backend.encode(sys.argv[2]).ids
print(json.dumps([ids, tokenizer.render_chat([{"role": "user", "content": sys.argv[2]}]), sorted(tokenizer.eos_token_ids)]))
print("torch" in sys.modules, importlib.util.find_spec("torch") is not None)
"""


@pytest.mark.timeout(240)  # two processes import transformers, one of them with torch
@pytest.mark.vllm
@pytest.mark.slow
def test_without_torch_the_real_tokenizer_is_the_same_and_torch_stays_to_be_had(checkpoint: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(checkpoint), TEXT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said, torch = done.stdout.splitlines()
    tokenizer = TextTokenizer.load(checkpoint)
    chat = tokenizer.render_chat([{"role": "user", "content": TEXT}])
    assert json.loads(said) == [tokenizer.backend.encode(TEXT).ids, chat, sorted(tokenizer.eos_token_ids)]
    assert torch == "False True"
