"""The one tokenizer of a gateway: text and chats to token ids, token ids to text."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from coordinator.gateway.detokenize import Detokenizer
from protos.errors import Code, SplitpointError, invalid


def import_without_torch() -> None:
    """Import `transformers` as where torch is not installed, which tokenizers do without: torch is nine tenths of that import.

    For a process that computes nothing, before anything else imports either. Torch can be imported afterwards, but this
    process's `transformers` has no models.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not there
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: an import of it fails
    try:
        import transformers.models.auto.tokenization_auto  # noqa: F401
    finally:
        del sys.modules["torch"]


class TextTokenizer:
    """A Hugging Face tokenizer with its chat template. Safe to share between tasks of one event loop."""

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: Iterable[int] = (), inline_chars: int = 8192) -> None:
        """`hf_tokenizer` is a fast `transformers` tokenizer; longer texts than `inline_chars` are tokenised on a thread."""
        self._hf = hf_tokenizer
        self._inline_chars = inline_chars
        self.backend: Tokenizer = hf_tokenizer.backend_tokenizer
        self.special_ids = frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)
        primary = hf_tokenizer.eos_token_id
        self.primary_eos_token_id: int | None = primary
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if primary is None else {primary})
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        # Normalizers may drop characters; without one, no token covers more of them than the longest.
        self._longest_chars = (
            max((len(t) for t in self.backend.get_vocab(with_added_tokens=True)), default=1)
            if self.backend.normalizer is None
            else None
        )
        self._byte_of_char = _byte_level_alphabet() if _is_byte_level(self.backend) else None
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    @classmethod
    def load(cls, path: Path, *, inline_chars: int = 8192) -> TextTokenizer:
        """The tokenizer of the checkpoint at `path`, with every EOS id of its generation config. Never asks a hub."""
        from transformers import AutoTokenizer  # seconds to import; only a gateway needs it

        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        if not getattr(hf, "is_fast", False):
            raise ValueError(f"{path}: the gateway needs a fast tokenizer (tokenizer.json)")
        return cls(hf, eos_token_ids=_generation_eos(path), inline_chars=inline_chars)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without tokenising it."""
        return 0 if self._longest_chars is None else -(-len(text) // self._longest_chars)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        if len(text) <= self._inline_chars:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """`messages` through the model's chat template.

        Raises:
            SplitpointError: the model has no template, or the template refuses the messages.
        """
        if not self._hf.chat_template:
            raise SplitpointError(
                Code.UNSUPPORTED_FIELD, "messages: this model has no chat template; use completions", param="messages"
            )
        try:
            text: str = self._hf.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_arguments or {}),
            )
            return text
        except (jinja2.TemplateError, ValueError, TypeError) as exc:
            raise invalid("messages", f"messages: the model's chat template refuses them: {exc}") from exc

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental decoder for one choice."""
        return Detokenizer(self.backend, prompt_token_ids, special_ids=self.special_ids, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _token_text(self, token_id: int) -> str:
        """One token by itself, special tokens shown; a part of a character shows as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, also where they are a part of a character."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self.special_ids:
            if self._byte_of_char is not None and all(c in self._byte_of_char for c in token):
                return bytes(self._byte_of_char[c] for c in token)
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
        return self._token_text(token_id).encode("utf-8")


def _generation_eos(path: Path) -> list[int]:
    """EOS ids of `generation_config.json` beside the checkpoint; none when there is no such file."""
    file = path / "generation_config.json"
    if not file.exists():
        return []
    value = json.loads(file.read_text()).get("eos_token_id")
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _is_byte_level(backend: Tokenizer) -> bool:
    """Whether tokens spell bytes in the GPT-2 alphabet."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte of the byte-level alphabet: printable Latin-1 stands for itself, the rest is moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    moved = (b for b in range(256) if b not in set(printable))
    table.update({chr(0x100 + i): b for i, b in enumerate(moved)})
    return table
