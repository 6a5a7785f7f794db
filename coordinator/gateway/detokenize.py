"""Token ids to text, one token at a time, for one choice."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
_SEED_TOKENS = 12
"""More than an unfinished character and the whole one before it can take."""
_MAX_CHARACTER_TOKENS = 4
"""UTF-8 spells a character in at most four bytes, so in at most four tokens."""
_SETTLE_AFTER_TOKENS = 8
_GIVE_UP_AFTER_TOKENS = 64


class Detokenizer:
    """Text of one choice, in step with its tokens; a character that is not complete yet is held back.

    The prompt's last tokens seed it, because a tokenizer may spell a token differently at the start of a text (a leading
    space). A prompt of token ids may end inside a character: the output then begins with the whole character.
    Joined with `flush()`, the pieces are the text of all the tokens.
    """

    __slots__ = ("_held", "_prompt_text", "_skip_special", "_special_ids", "_stream", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        special_ids: frozenset[int],
        skip_special_tokens: bool = True,
    ) -> None:
        """`special_ids` are the ids that `skip_special_tokens` leaves out."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._special_ids = special_ids if skip_special_tokens else frozenset[int]()
        self._held: list[int] = []
        self._prompt_text = ""
        seed = [t for t in prompt_token_ids[-2 * _SEED_TOKENS :] if t not in self._special_ids][-_SEED_TOKENS:]
        clean, tail = self._split_at_character(seed)
        self._stream = self._new_stream(clean)
        if tail:
            whole = tokenizer.decode(clean + tail, skip_special_tokens=skip_special_tokens)
            head = tokenizer.decode(clean, skip_special_tokens=skip_special_tokens)
            self._prompt_text = whole[len(head) :]
            for token_id in tail:
                self._stream.step(tokenizer, token_id)
            self._held = tail

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes, "" when none."""
        if token_id in self._special_ids:
            # The stream keeps such tokens until text comes and decodes them again each time; they can never give any.
            return ""
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as exc:
            # The library raises plain Exception when bytes that it had shown as characters turn out to be something else
            # (byte-fallback vocabularies, garbage output): what was shown stays, the rest starts afresh.
            if "Invalid prefix" not in str(exc):
                raise
            self._held.append(token_id)
            return self._settle(final=True)
        if text is None:
            self._held.append(token_id)
            return self._settle() if len(self._held) >= _SETTLE_AFTER_TOKENS else ""
        if self._held:
            self._held = []
            return self._without_prompt(text)
        return text

    def flush(self) -> str:
        """The text of what is still held back: bytes that no longer become a character show as U+FFFD."""
        return self._settle(final=True) if self._held else ""

    def _settle(self, *, final: bool = False) -> str:
        """Give out held tokens that no later token can change: all but the last, unfinished character."""
        held = self._held
        text = self._tokenizer.decode(held, skip_special_tokens=self._skip_special)
        if final or len(held) >= _GIVE_UP_AFTER_TOKENS:
            self._held = []
            self._stream = self._new_stream([])
            return self._without_prompt(text)
        if not text.endswith(REPLACEMENT):
            return ""
        for count in range(1, _MAX_CHARACTER_TOKENS):
            head = self._tokenizer.decode(held[:-count], skip_special_tokens=self._skip_special)
            if head == text[:-1]:
                self._held = held[-count:]
                self._stream = self._new_stream([])
                for token_id in self._held:
                    self._stream.step(self._tokenizer, token_id)
                return self._without_prompt(head)
        return ""

    def _without_prompt(self, text: str) -> str:
        """Drop what the prompt's own last bytes spell by themselves; keep the character that they begin."""
        prompt_text, self._prompt_text = self._prompt_text, ""
        if text.startswith(prompt_text):
            return text[len(prompt_text) :]
        return text.removeprefix(prompt_text.removesuffix(REPLACEMENT))

    def _split_at_character(self, seed: list[int]) -> tuple[list[int], list[int]]:
        """`seed` up to the end of its last whole character, and the rest."""
        for count in range(min(len(seed), _MAX_CHARACTER_TOKENS) + 1):
            clean = seed[: len(seed) - count]
            if not self._tokenizer.decode(clean, skip_special_tokens=self._skip_special).endswith(REPLACEMENT):
                return clean, seed[len(seed) - count :]
        return [], []

    def _new_stream(self, seed: list[int]) -> DecodeStream:
        return DecodeStream(ids=seed, skip_special_tokens=self._skip_special)
