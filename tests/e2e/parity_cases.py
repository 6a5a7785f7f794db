"""The prompts and parameters of the parity test, as one table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.splitpoint.v1 import common_pb2
from tests.e2e.parity import BLOCK_TOKENS, Prompt

K = BLOCK_TOKENS
EOS = 2
"""<|im_end|>"""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
Pieces = Callable[[int, int], str]
"""The text of tokens [start, end) of the case's base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `derive` makes the sampling fields that depend on what the case `base` answered (its token ids, and their
    text). `forwards`: prefill's first token may go to the client at once. `ends_after`: how many tokens there must be."""

    name: str
    prompt: Prompt
    sampling: Mapping[str, Any]
    base: str = ""
    derive: Callable[[list[int], Pieces], dict[str, Any]] | None = None
    forwards: bool = True
    ends_after: int | None = None
    finish_reason: str = ""
    http: bool = False


def ids(length: int, seed: object = 0) -> tuple[int, ...]:
    """Token ids as no text has them: every position counts, and no two prompts share a prefix."""
    choose = random.Random(f"{length}/{seed}")
    return tuple(choose.randrange(1000, 40000) for _ in range(length))


def user(text: str, *before: tuple[str, str]) -> list[dict[str, str]]:
    """A chat that ends with `text`."""
    return [*({"role": role, "content": content} for role, content in before), {"role": "user", "content": text}]


def _lengths() -> list[Case]:
    """One token, around a block, whole blocks, several engine steps (of 256 tokens), and long."""
    lengths = [1, 2, 5, 64, K - 1, K, K + 1, 2 * K - 1, 2 * K, 2 * K + 1, 3 * K, 4 * K + 3, 5 * K, 700, 8 * K, 1500, 4000]
    logprobs = {"logprobs": 5, "max_tokens": 12}
    return [
        Case(name=f"{n} tokens", prompt=ids(n), sampling=GREEDY | logprobs, http=n in (1, K, 700), ends_after=12) for n in lengths
    ]


TEXTS = {
    "English": "The capital of France is Paris.\nThe capital of England is",
    "story": "Once upon a time there was a small",
    "counting": "Count: 1, 2, 3,",
    "Chinese": "今天天气很好，我们一起去公园",
    "Arabic": "مرحبا بالعالم، كيف حالك اليوم",
    "Hindi": "नमस्ते दुनिया, आप कैसे हैं",
    "emoji": "Family 👨‍👩‍👧‍👦, flags 🇫🇷🇯🇵 and a thumb 👍🏽 are",
    "combining marks": "Zalgo: z\u0351\u036b\u0343\u036a\u0302\u036b e\u0301 n\u0303 \u1e9b\u0323 and",
    "mixed directions": "abc \u202e\u05e9\u05dc\u05d5\u05dd\u202c def\t\u00a0\u2028 ghi",
    "controls and spaces": "line one\r\n\r\n\ttabbed   spaced \u200b\ufeff zero\x07",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "not assigned": "private \ue000 plane \U0010fffd end",
}


def _texts() -> list[Case]:
    sampling = GREEDY | {"logprobs": 5, "max_tokens": 12}
    return [
        Case(name=name, prompt=text, sampling=sampling, http=name in ("emoji", "Chinese"), ends_after=12)
        for name, text in TEXTS.items()
    ]


LONG_CHAT = user(
    "And which of them is the largest?",
    ("system", "You answer in one short sentence. " * 20),
    ("user", "Name three cities of Italy, with a word about each of them."),
    ("assistant", "Rome is old, Milan is busy, Naples is loud. " * 6),
)


def _chats() -> list[Case]:
    """Rendered with the model's own template; these end where the model ends them."""
    sampling = {"temperature": 0.0, "max_tokens": 24, "logprobs": 5}
    france = user("What is the capital of France? Answer in one sentence.")
    chats = {
        "chat, one question": france,
        "chat, system prompt": user("Who are you?", ("system", "You are a pirate. Answer in five words.")),
        "chat, several turns": LONG_CHAT,
        "chat, unicode": user("Übersetze: «Grüß Gott, 你好 🌍»"),
        "chat, template words": user("Say <|im_end|> and <|im_start|>assistant twice"),
    }
    return [Case(name=name, prompt=chat, sampling=sampling, http=True) for name, chat in chats.items()] + [
        Case(name="EOS of the model's own", prompt=france, sampling=sampling | {"max_tokens": 40}, finish_reason="stop")
    ]


def _short_outputs() -> list[Case]:
    return [
        Case(
            name=f"max_tokens {most}, {n} tokens",
            prompt=ids(n, f"max{most}"),
            sampling=GREEDY | {"max_tokens": most, "logprobs": 2},
            ends_after=most,
            finish_reason="length",
            http=n == K,
        )
        for most in (1, 2)
        for n in (1, K - 1, K, 200)
    ]


def _stops() -> list[Case]:
    """The base's answer is looked up first; then its text, or its tokens, become what ends the same request."""

    def text_of(start: int, end: int) -> Callable[[list[int], Pieces], dict[str, Any]]:
        return lambda _, pieces: {"stop": [pieces(start, end)]}

    def token_at(position: int) -> Callable[[list[int], Pieces], dict[str, Any]]:
        return lambda answer, _: {"stop_token_ids": [answer[position]]}

    base, prompt = "chat, one question", user("What is the capital of France? Answer in one sentence.")
    sampling = {"temperature": 0.0, "max_tokens": 24}
    made = [
        ("stop string, first token", text_of(0, 1), 1, {}),
        ("stop string, second token", text_of(1, 2), 2, {}),
        ("stop string, over first and second", text_of(0, 2), 2, {}),
        ("stop string, over second and third", text_of(1, 3), 3, {}),
        ("stop string, later token", text_of(5, 6), 6, {}),
        ("stop string kept, second token", text_of(1, 2), 2, {"include_stop_str_in_output": True}),
        ("stop token, first", token_at(0), 1, {}),
        ("stop token, second", token_at(1), 2, {}),
        ("stop token, later", token_at(5), 6, {}),
        ("stop string, after min_tokens", text_of(5, 6), 6, {"min_tokens": 3}),
    ]
    cases = [
        Case(
            name=name,
            prompt=prompt,
            sampling=sampling | extra,
            base=base,
            derive=derive,
            ends_after=after,
            finish_reason="stop",
            http=name in ("stop string, over first and second", "stop token, second"),
        )
        for name, derive, after, extra in made
    ]
    for position in (0, 1, 4):
        # A bias makes EOS certain as soon as min_tokens allows it.
        biased = {"temperature": 0.0, "max_tokens": 8, "min_tokens": position, "logit_bias": {EOS: 100.0}}
        for n in (20, K + 12):
            name = f"EOS after {position} tokens, {n} tokens"
            after = position + 1
            cases.append(
                Case(name=name, prompt=ids(n, f"eos{position}"), sampling=biased, ends_after=after, finish_reason="stop")
            )
    return cases


JSON = '{"type":"object","properties":{"city":{"enum":["Paris","London"]},"n":{"type":"integer"}},"required":["city","n"]}'
AS_JSON = 'Paris as JSON: {"city": "Paris", "n": 1}\nRome as JSON: {"city": "Rome", "n": 2}\nLondon as JSON:'
AS_JSON_CHAT = user(
    "London as JSON.",
    ("user", "Paris as JSON."),
    ("assistant", '{"city": "Paris", "n": 1}'),
    ("user", "Rome as JSON."),
    ("assistant", '{"city": "Rome", "n": 2}'),
)
GRAMMAR = 'root ::= (" London" | " Paris") ".\\nThe capital of"'
CHOICE = common_pb2.ChoiceConstraint(choices=["Paris is large", "London is grey"])


def _sampling() -> list[Case]:
    """What the hand-over must treat with care. Not forwarded: decode computes the prompt's last token by itself, in another shape
    than a colocated worker. On some processors the last bits differ then, so greedy ones say what is certain (gaps of 0.7 and
    more between the two best candidates, the model's own last bits are worth 0.13)."""
    english, story, counting = TEXTS["English"], TEXTS["story"], TEXTS["counting"]
    nucleus = {"temperature": 1.1, "seed": 11, "top_p": 0.8, "top_k": 40, "min_p": 0.02}
    penalties = {"presence_penalty": 0.6, "frequency_penalty": -0.4, "repetition_penalty": 1.1}
    made: list[tuple[str, Prompt, dict[str, Any], bool]] = [
        ("seeded", story, {"temperature": 0.9, "seed": 7, "max_tokens": 14}, False),
        ("seeded, top_p, top_k, min_p", english, nucleus, False),
        ("seeded, negative seed", story, {"temperature": 1.0, "seed": -3, "top_k": 20}, False),
        ("seeded, chat", user("Tell me a joke."), {"temperature": 0.8, "seed": 2**40, "max_tokens": 16}, False),
        ("greedy with a seed", english, {"seed": 5}, True),
        ("repetition penalty", story, {"repetition_penalty": 1.3, "max_tokens": 14}, True),
        ("presence penalty", counting, {"presence_penalty": 1.5, "max_tokens": 14}, False),
        ("frequency penalty", counting, {"frequency_penalty": 1.2, "max_tokens": 14}, False),
        ("all penalties", english, penalties | {"max_tokens": 6}, False),
        ("JSON schema", AS_JSON, {"json_schema": JSON, "max_tokens": 24, "ignore_eos": False}, False),
        ("JSON schema, chat", AS_JSON_CHAT, {"json_schema": JSON, "max_tokens": 24, "ignore_eos": False}, False),
        ("choice", english, {"choice": CHOICE, "ignore_eos": False}, False),
        ("regex", counting, {"regex": "( [0-9]{1,2},){4} [0-9]", "max_tokens": 12, "ignore_eos": False}, False),
        ("grammar", english, {"grammar": GRAMMAR, "max_tokens": 12, "ignore_eos": False}, False),
        ("JSON object", AS_JSON, {"json_object": True, "max_tokens": 24, "ignore_eos": False}, False),
        ("JSON schema, one token", english, {"json_schema": JSON, "max_tokens": 1}, False),
        ("seeded, one token", story, {"temperature": 1.2, "seed": 4, "max_tokens": 1}, False),
        ("bad words", english, {"bad_words": ["London", " the capital"]}, False),
        ("allowed tokens", english, {"allowed_token_ids": list(range(500, 900))}, True),
        ("logit bias", story, {"logit_bias": {1000: 5.0, 2000: -20.0}}, True),
        ("min_tokens", user("Say hi."), {"min_tokens": 7, "max_tokens": 8, "ignore_eos": False}, True),
        ("prompt log-probabilities", english, {"prompt_logprobs": 2, "logprobs": 3}, True),
        ("prompt log-probabilities, two blocks", ids(K + 20, "plp"), {"prompt_logprobs": 1, "logprobs": 0}, True),
    ]
    over_http = {"seeded", "presence penalty", "JSON schema, chat", "choice", "logit bias"}
    return [
        Case(name=name, prompt=prompt, sampling=GREEDY | extra, forwards=forwards, http=name in over_http)
        for name, prompt, extra, forwards in made
    ]


CASES = [*_lengths(), *_texts(), *_chats(), *_short_outputs(), *_stops(), *_sampling()]
BY_NAME = {case.name: case for case in CASES}

PREFIX_BLOCKS = (0, 2, 5)
"""Whole blocks of the prompt that a side has cached before: none, some, all there are."""


PREFIX_TOKENS = 5 * K + 10


def prefix_text(on_prefill: int, on_decode: int) -> str:
    """More than `PREFIX_TOKENS` tokens, of its own for each combination. A cached prefix changes the shapes that are computed, so
    the answer must be no near-tie anywhere: what follows in counting is certain."""
    start = 1000 + 200 * (10 * on_prefill + on_decode)
    return "Count: " + ", ".join(str(number) for number in range(start, start + 180))


BATCH = [
    *(f"{n} tokens" for n in (5, 64, K - 1, K, 2 * K + 1, 3 * K, 4 * K + 3, 700)),
    *("English", "story", "counting", "Chinese", "Arabic", "emoji", "code", "not assigned"),
]
"""Sixteen requests of very different lengths, all greedy, of 12 tokens, with log-probabilities."""
