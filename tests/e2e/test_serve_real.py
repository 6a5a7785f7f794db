"""The same system with the real model on two real engines. Slow to start, so few tests, each of which says much."""

from __future__ import annotations

import pytest

from tests.e2e.system import Served, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(360)]

QUESTION = "What is the capital of France? Answer in one sentence."
WAYS = [("split", "ucx"), ("split", "grpc"), ("colocated", None)]


def test_the_model_answers_the_same_on_every_way_and_front(real: Served) -> None:
    chats = {way: real.chat(QUESTION, path=way[0], transport=way[1]) for way in WAYS}
    texts = {chat["choices"][0]["message"]["content"] for chat in chats.values()}
    assert len(texts) == 1
    assert "Paris" in texts.pop()
    for path, transport in WAYS:
        metrics = chats[path, transport]["metrics"]
        assert (metrics["path"], metrics["transport"]) == (path, transport or "")
        assert not metrics["recomputed"]
        assert (metrics["transfer_bytes"] > 0) == (path == "split")


@pytest.mark.parametrize("length", [1, 127, 128, 129, 700])
def test_token_exact_on_every_way_around_a_block(real: Served, length: int) -> None:
    prompt = [(7919 * i + 13) % 40000 + 100 for i in range(length)]
    answers = []
    for path, transport in WAYS:
        replies = real.generate(prompt, path=path, transport=transport, max_tokens=6)
        answers.append([i for r in replies if r.HasField("chunk") for i in r.chunk.token_ids])
    assert len(answers[0]) == 6
    assert answers.count(answers[0]) == len(WAYS)


def test_everything_is_idle_again(real: Served) -> None:
    until("idle", real.idle, 10)
