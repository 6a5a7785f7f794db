"""The official `openai` package against a running system: `check_openai.py HOST:PORT MODEL [--structured]`.

Needs nothing but that package. Prints one JSON object: version, requests, failures (texts), figures. Exit status 1 with failures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openai

QUESTION = "What is the capital of France? Answer in one sentence."
MAX_TOKENS = 16
TIMEOUT_S = 120.0


class Checks:
    """Runs checks one after the other and keeps what failed."""

    def __init__(self, address: str, model: str) -> None:
        self.model = model
        # No retries of its own: a failure that a second try hides is a failure.
        options: dict[str, Any] = {"base_url": f"http://{address}/v1", "api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
        self.client = openai.OpenAI(**options)
        self.async_client = openai.AsyncOpenAI(**options)
        self.requests = 0
        self.failures: list[str] = []
        self.figures: dict[str, float] = {}
        self.chat: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }

    def run(self, check: Callable[[], None]) -> None:
        try:
            check()
        except (AssertionError, openai.OpenAIError, ValueError) as exc:
            self.failures.append(f"{check.__name__}: {type(exc).__name__}: {exc}")

    # What works -----------------------------------------------------------------------------------------------------------

    def models(self) -> None:
        self.requests += 2
        assert [m.id for m in self.client.models.list()] == [self.model]
        assert self.client.models.retrieve(self.model).id == self.model

    def chat_whole_and_streamed(self) -> None:
        whole = self.client.chat.completions.create(**self.chat)
        began_s = time.monotonic()
        text, usages, reasons = "", [], []
        for chunk in self.client.chat.completions.create(**self.chat, stream=True, stream_options={"include_usage": True}):
            if not text and chunk.choices:
                self.figures["ttft_ms"] = round((time.monotonic() - began_s) * 1e3, 1)
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            usages += [chunk.usage] if chunk.usage else []
        self.requests += 2
        assert text, "no text"
        assert text == whole.choices[0].message.content, "streamed and whole text differ"
        assert reasons == [whole.choices[0].finish_reason]
        assert len(usages) == 1, "usage comes once"
        assert whole.usage is not None
        # What was cached may differ: the first of the two fills the cache.
        assert usages[0].prompt_tokens == whole.usage.prompt_tokens
        assert usages[0].completion_tokens == whole.usage.completion_tokens <= MAX_TOKENS

    def chat_on_both_paths(self) -> None:
        answers = {}
        for path in ("split", "colocated"):
            answer: Any = self.client.chat.completions.create(**self.chat, extra_headers={"x-splitpoint-path": path})
            self.requests += 1
            assert answer.metrics["path"] == path, answer.metrics
            answers[path] = answer.choices[0].message.content
        assert answers["split"] == answers["colocated"], answers

    def completion_of_text_and_token_ids(self) -> None:
        for prompt in ("The capital of France is", [504, 3575, 282, 4649, 314]):
            answer = self.client.completions.create(
                model=self.model, prompt=prompt, max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
            )
            self.requests += 1
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 8
            assert answer.choices[0].finish_reason == "length"
            assert answer.choices[0].logprobs is not None
            assert len(answer.choices[0].logprobs.tokens or ()) == 8

    def completion_streamed(self) -> None:
        ask: dict[str, Any] = {"model": self.model, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
        whole = self.client.completions.create(**ask)
        streamed = [c.text for chunk in self.client.completions.create(**ask, stream=True) for c in chunk.choices]
        self.requests += 2
        assert "".join(streamed) == whole.choices[0].text

    def several_choices(self) -> None:
        answer = self.client.chat.completions.create(**{**self.chat, "n": 2, "temperature": 0.8, "seed": 1})
        self.requests += 1
        assert [choice.index for choice in answer.choices] == [0, 1]

    def several_at_once(self) -> None:
        async def ask_all() -> list[Any]:
            async with self.async_client as client:
                return await asyncio.gather(*(client.chat.completions.create(**self.chat) for _ in range(4)))

        answers = asyncio.run(ask_all())
        self.requests += 4
        assert all(answer.choices[0].message.content for answer in answers)

    def leaving_a_stream(self) -> None:
        with self.client.chat.completions.create(**self.chat, stream=True) as stream:
            next(iter(stream))
        self.requests += 1

    def structured_output(self) -> None:
        schema = {
            "type": "object",
            "properties": {"big": {"type": "boolean"}},
            "required": ["big"],
            "additionalProperties": False,
        }
        answer = self.client.chat.completions.create(
            **{**self.chat, "max_tokens": 32},
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        )
        self.requests += 1
        assert isinstance(json.loads(answer.choices[0].message.content or "")["big"], bool)

    # What is refused ------------------------------------------------------------------------------------------------------

    def refusals(self) -> None:
        """Class of the exception, the field it names ("": whatever the deadline met), and what is asked."""
        cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
            (openai.NotFoundError, "model", {"model": "no-such-model"}),
            (openai.BadRequestError, "max_tokens", {"max_tokens": 0}),
            (openai.BadRequestError, "temperature", {"temperature": 3}),
            (openai.BadRequestError, "messages", {"messages": []}),
            (openai.BadRequestError, "messages", {"messages": [{"role": "user", "content": "word " * 70_000}]}),
            (openai.BadRequestError, "tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
            (openai.BadRequestError, "kv_transfer_params", {"extra_body": {"kv_transfer_params": {"do_remote_decode": True}}}),
            (openai.InternalServerError, "", {"extra_headers": {"x-splitpoint-deadline-s": "0.001"}}),
        ]
        for wanted, param, changes in cases:
            for stream in (False, True):
                self.requests += 1
                name = f"{next(iter(changes))}, stream={stream}"
                refused = self._refusal({**self.chat, **changes, "stream": stream})
                assert refused is not None, f"{name}: not refused"
                assert type(refused) is wanted, f"{name}: {refused!r}"
                assert not param or refused.param == param, f"{name}: param {refused.param!r}: {refused}"

    def _refusal(self, ask: dict[str, Any]) -> openai.APIStatusError | None:
        try:
            self.client.chat.completions.create(**ask)
        except openai.APIStatusError as exc:
            return exc
        return None


def main() -> int:
    """Returns the exit status."""
    address, model = sys.argv[1:3]
    checks = Checks(address, model)
    begun_s = time.monotonic()
    for check in (
        checks.models,
        checks.chat_whole_and_streamed,
        checks.chat_on_both_paths,
        checks.completion_of_text_and_token_ids,
        checks.completion_streamed,
        checks.several_choices,
        checks.several_at_once,
        checks.leaving_a_stream,
        checks.refusals,
        *([checks.structured_output] if "--structured" in sys.argv else []),
    ):
        checks.run(check)
    checks.figures["seconds"] = round(time.monotonic() - begun_s, 1)
    said = {"version": openai.__version__, "requests": checks.requests, "failures": checks.failures, "figures": checks.figures}
    sys.stdout.write(json.dumps(said) + "\n")
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main())
