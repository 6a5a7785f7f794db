"""The pure half of the aiperf plugin: OpenAI bodies as messages of ours, and our answers as OpenAI bodies."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from protos.splitpoint.v1 import common_pb2, generation_pb2

PLUGIN = Path(__file__).resolve().parents[2] / "deploy" / "aiperf"


def load() -> ModuleType:
    """Without installing it: aiperf lives in an environment of its own."""
    spec = importlib.util.spec_from_file_location("splitpoint_aiperf_translate", PLUGIN / "splitpoint_aiperf" / "translate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


translate = load()


def test_a_completion_becomes_a_message() -> None:
    body = {
        "model": "m", "prompt": "hello", "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 16, "ignore_eos": True, "temperature": 0.5, "stop": "x", "seed": None,
    }  # fmt: skip
    message = translate.request_of(body)
    assert (message.model, message.text, message.stream) == ("m", "hello", True)
    params = message.sampling_params
    assert (params.max_tokens, params.ignore_eos, params.temperature, list(params.stop)) == (16, True, 0.5, ["x"])
    assert not params.HasField("seed")


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_token_ids_stay_token_ids(prompt: Any) -> None:
    assert list(translate.request_of({"prompt": prompt}).tokenized.input_ids) == [1, 2, 3]


def test_a_chat_becomes_a_message() -> None:
    parts = [{"type": "text", "text": "how "}, {"type": "text", "text": "are you"}]
    body = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}],
        "max_completion_tokens": 4,
    }
    message = translate.request_of(body)
    assert [(m.role, m.content) for m in message.chat.messages] == [("system", "be brief"), ("user", "how are you")]
    assert message.sampling_params.max_tokens == 4


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"prompt": "x", "tools": []}, "tools"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": [{"role": "user", "content": None}]}, "text"),
    ],
)
def test_what_has_no_place_is_refused_by_name(body: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        translate.request_of(body)


def test_answers_become_openai_bodies() -> None:
    piece = generation_pb2.GenerateStreamChunk(text=" hi", token_ids=[4], completion_tokens=1)
    assert json.loads(translate.chunk(piece, chat=False)) == {
        "object": "text_completion",
        "choices": [{"index": 0, "finish_reason": None, "text": " hi"}],
    }
    assert json.loads(translate.chunk(piece, chat=True))["choices"][0]["delta"] == {"content": " hi"}
    complete = generation_pb2.GenerateComplete(
        text=" hi there", finish_reason="length", prompt_tokens=3, completion_tokens=2, cached_tokens=1,
        metrics=common_pb2.StageLedger(path="split", e2e_s=0.5),
    )  # fmt: skip
    end = json.loads(translate.end_of_stream(complete, chat=True))
    assert (end["object"], end["choices"]) == ("chat.completion.chunk", [])
    assert end["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert end["metrics"] == {"path": "split", "e2e_s": 0.5}
    whole = json.loads(translate.whole(complete, chat=True))
    assert whole["choices"][0] == {
        "index": 0,
        "finish_reason": "length",
        "message": {"role": "assistant", "content": " hi there"},
    }


def test_the_manifest_names_what_is_there() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    package, _, manifest = project["entry-points"]["aiperf.plugins"]["splitpoint"].partition(":")
    text = (PLUGIN / package / manifest).read_text()
    assert "class: splitpoint_aiperf.transport:SplitpointGrpcTransport" in text
    assert "class SplitpointGrpcTransport(" in (PLUGIN / package / "transport.py").read_text()
    assert not any(
        "aiperf" in dependency
        for dependency in tomllib.loads((PLUGIN.parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    )
