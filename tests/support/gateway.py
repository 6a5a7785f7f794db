"""A core that plays scripts, a tiny tokenizer, and both front ends on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import httpx
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coordinator.gateway.api import Core, Finished, Generation, Submission, Tokens
from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.frontend import FrontEnd, ServedModel
from coordinator.gateway.grpc_front import build_grpc_server
from coordinator.gateway.http import build_http_app
from coordinator.gateway.tokenizer import TextTokenizer
from protos.errors import SplitpointError
from protos.splitpoint.v1 import common_pb2

MODEL = "tiny"
MAX_MODEL_LEN = 256
EOS = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog and says hello world to all the people here"] * 20

Step = Tokens | Finished | Exception | asyncio.Event
Script = Callable[[Submission], Sequence[Step]]


@functools.cache
def tiny_tokenizer() -> TextTokenizer:
    """Byte-level BPE of 300 or so tokens, trained in milliseconds; every byte has a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    hf.chat_template = TEMPLATE
    return TextTokenizer(hf)


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().backend.encode(text, add_special_tokens=False).ids


def eos_id() -> int:
    token = tiny_tokenizer().primary_eos_token_id
    assert token is not None
    return token


def frontend(**settings: object) -> FrontEnd:
    return FrontEnd(
        settings=GatewaySettings.model_validate(settings),
        tokenizer=tiny_tokenizer(),
        model=ServedModel(
            id=MODEL,
            root=f"models/{MODEL}",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tiny_tokenizer().vocab_size,
            created_s=1_700_000_000,
        ),
        manifest=lambda: {"versions": {"vllm": "0.32.0"}},
    )


@dataclass
class Recorder:
    """A metrics hook that keeps what it is told."""

    ended: list[tuple[str, str, str]] = field(default_factory=list)

    def exposition(self) -> tuple[bytes, str]:
        return f"recorded {len(self.ended)}".encode(), "text/plain"

    def request_ended(self, *, front: str, endpoint: str, code: str) -> None:
        self.ended.append((front, endpoint, code))

    def frontend(self) -> FrontEnd:
        return dataclasses.replace(frontend(), metrics=self)


def logprobs_of(token_id: int) -> common_pb2.PositionLogprobs:
    """The token itself at rank 1, then its neighbour."""
    entries = [(token_id, -0.5, 1), ((token_id + 1) % 300, -1.5, 2), ((token_id + 2) % 300, float("-inf"), 3)]
    return common_pb2.PositionLogprobs(entries=[common_pb2.TokenLogprob(token_id=t, logprob=p, rank=r) for t, p, r in entries])


def saying(text: str, *, finish: str = "stop", cached: int = 0) -> Script:
    """Says `text`, a token at a time, up to `max_tokens`, and ends with EOS when there is room."""

    def script(submission: Submission) -> Sequence[Step]:
        sampling = submission.sampling
        said = ids_of(text)
        ended = finish == "stop" and len(said) < sampling.max_tokens
        ids = [*said, eos_id()] if ended else said[: sampling.max_tokens]
        steps: list[Step] = [
            Tokens(
                token_ids=[token_id],
                logprobs=None if sampling.logprobs is None else [logprobs_of(token_id)],
                cached_tokens=cached if i == 0 else 0,
            )
            for i, token_id in enumerate(ids)
        ]
        steps.append(Finished(finish_reason="stop", matched_token_id=eos_id()) if ended else Finished(finish_reason="length"))
        return steps

    return script


def playing(*steps: Step) -> Script:
    return lambda _submission: steps


class FakeGeneration:
    """Plays its steps. An exception step is raised; an event step is waited for."""

    def __init__(self, submission: Submission, steps: Sequence[Step]) -> None:
        self.submission = submission
        self.closed: list[str] = []
        self.exhausted = False
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()
        self._steps = steps
        self._finished = False

    async def __aiter__(self) -> AsyncIterator[Tokens | Finished]:
        self.entered.set()
        sent = 0
        for step in self._steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, SplitpointError):
                raise SplitpointError(
                    step.code, step.message, param=step.param, retry_after_s=step.retry_after_s, tokens_sent=sent
                )
            elif isinstance(step, Exception):
                raise step
            else:
                sent += len(step.token_ids) if isinstance(step, Tokens) else 0
                self._finished = isinstance(step, Finished)
                yield step
        self.exhausted = True
        self.ended.set()

    async def close(self, reason: str) -> None:
        self.closed.append(reason)
        self.ended.set()

    def ledger(self) -> common_pb2.StageLedger:
        final = self._finished or bool(self.closed)
        return common_pb2.StageLedger(path="split", transport="ucx", ttft_s=0.01, e2e_s=0.05 if final else 0.0, attempts=3)


@dataclass
class FakeCore:
    """Runs `script` for every submission and keeps what was submitted."""

    script: Script = field(default_factory=lambda: saying("hello world"))
    is_ready: bool = True
    generations: list[FakeGeneration] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def submissions(self) -> list[Submission]:
        return [g.submission for g in self.generations]

    def submit(self, submission: Submission) -> Generation:
        generation = FakeGeneration(submission, self.script(submission))
        self.generations.append(generation)
        self.arrived.set()
        return generation

    def ready(self) -> bool:
        return self.is_ready


@contextlib.asynccontextmanager
async def http_server(core: Core, front: FrontEnd) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP front end on a free port, and a client of it."""
    config = uvicorn.Config(
        build_http_app(core, front), host="127.0.0.1", port=0, loop="none", log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def grpc_address(core: Core, front: FrontEnd) -> AsyncIterator[str]:
    """The gRPC front end on a free port: HOST:PORT."""
    server = build_grpc_server(core, front)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        front.draining.set()
        await server.stop(2)


@contextlib.asynccontextmanager
async def grpc_server(
    core: Core, front: FrontEnd, channel_options: Sequence[tuple[str, object]] = ()
) -> AsyncIterator[grpc.aio.Channel]:
    """The gRPC front end on a free port, and a channel to it."""
    async with (
        grpc_address(core, front) as address,
        grpc.aio.insecure_channel(address, options=list(channel_options)) as channel,
    ):
        yield channel
