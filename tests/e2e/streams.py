"""Public clients that keep what they got, and what counts as the right answer on a real engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.system import Served


def generate_request(
    served: Served, prompt: Sequence[int], max_tokens: int, *, logprobs: int | None = None
) -> generation_pb2.GenerateRequest:
    """Greedy, streamed, exactly `max_tokens` long."""
    request = generation_pb2.GenerateRequest(
        model=served.model, tokenized=generation_pb2.TokenizedInput(input_ids=prompt), stream=True
    )
    request.sampling_params.max_tokens = max_tokens
    request.sampling_params.temperature = 0
    request.sampling_params.ignore_eos = True
    if logprobs is not None:
        request.sampling_params.logprobs = logprobs
    return request


@dataclass(frozen=True)
class Reference:
    """The colocated answer to one prompt, asked alone. `margins` are the gaps between the log-probabilities of the two best
    candidates."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]

    @staticmethod
    def ask(served: Served, prompt: Sequence[int], max_tokens: int) -> Reference:
        tokens, margins = _colocated(served, prompt, max_tokens)
        return Reference(list(prompt), tokens, margins)

    def noise(self, served: Served, after: int) -> float:
        """How far the gap moves when the answer is continued after its first `after` tokens, in whatever company; where
        the tokens part, the gap there is what noise can bridge."""
        tokens, margins = _colocated(served, [*self.prompt, *self.tokens[:after]], len(self.tokens) - after)
        worst = 0.0
        for mine, theirs, old, new in zip(self.tokens[after:], tokens, self.margins[after:], margins, strict=True):
            if mine != theirs:
                return max(worst, old)
            worst = max(worst, abs(old - new))
        return worst


@dataclass(frozen=True)
class References:
    """Right answers, and how near two candidates must be for batch shape or a resumption to decide between them: the floor is
    measured here, colocated against colocated, as docs/measurement.md asks."""

    answers: list[Reference]
    floor: float

    @staticmethod
    def ask(served: Served, prompts: Sequence[Sequence[int]], max_tokens: int) -> References:
        answers = [Reference.ask(served, prompt, max_tokens) for prompt in prompts]
        noise: list[float] = []
        with ThreadPoolExecutor(len(answers)) as pool:
            for after in (0, max_tokens // 3):
                noise += pool.map(lambda answer, after=after: answer.noise(served, after), answers)
        return References(answers, max(noise))

    def check(self, index: int, got: Sequence[int]) -> None:
        """Equal to answer `index` as far as `got` goes, up to a first difference at a near-tie."""
        reference = self.answers[index]
        assert len(got) <= len(reference.tokens)
        for position, (mine, theirs) in enumerate(zip(reference.tokens, got, strict=False)):
            if mine != theirs:
                margin = reference.margins[position]
                assert margin <= self.floor, f"token {position} is {theirs}, not {mine}: margin {margin:.3f} > {self.floor:.3f}"
                return


def _colocated(served: Served, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and the gap between the two best candidates at each."""
    request = generate_request(served, prompt, max_tokens, logprobs=2)
    with grpc.insecure_channel(served.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        replies = list(stub.Generate(request, timeout=120, metadata=[("x-splitpoint-path", "colocated")]))
    chunks = [r.chunk for r in replies if r.HasField("chunk")]
    margins = []
    for position in (p for c in chunks for p in c.logprobs):
        best = sorted({e.token_id: e.logprob for e in position.entries}.values(), reverse=True)
        margins.append(best[0] - best[1])
    tokens = [t for c in chunks for t in c.token_ids]
    assert len(tokens) == len(margins) == max_tokens
    return tokens, margins


class Stream(threading.Thread):
    """One gRPC request on a thread of its own; `tokens` grow as they come. Either `finish` or `error` is set at its end."""

    def __init__(
        self, served: Served, prompt: Sequence[int], max_tokens: int, *, transport: str | None, deadline_s: float
    ) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._request = generate_request(served, prompt, max_tokens)
        self._deadline_s = deadline_s
        self._metadata = [("x-splitpoint-path", "split"), ("x-splitpoint-deadline-s", str(deadline_s))]
        self._metadata += [("x-splitpoint-transport", transport)] if transport else []
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.finish: generation_pb2.GenerateComplete | None = None
        self.error: SplitpointError | None = None
        self.took_s = 0.0

    def run(self) -> None:
        began_s = time.monotonic()
        try:
            with grpc.insecure_channel(self._served.grpc) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                # The client's own limit is far behind, so an end at the deadline is the gateway's doing.
                for reply in stub.Generate(self._request, timeout=self._deadline_s + 30, metadata=self._metadata):
                    if reply.HasField("chunk"):
                        self.tokens += reply.chunk.token_ids
                    else:
                        self.finish = reply.complete
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        finally:
            self.took_s = time.monotonic() - began_s

    def check_end(self, references: References, index: int) -> bool:
        """It ended before its deadline: with exactly the right tokens (True), or with an error that says so (False)."""
        self.join(self._deadline_s + 40)
        assert not self.is_alive()
        assert self.took_s < self._deadline_s, f"ended after {self.took_s:.1f} s: {self.error}"
        references.check(index, self.tokens)
        if self.error is None:
            assert self.finish is not None
            assert self.finish.finish_reason == "length"
            assert len(self.tokens) == self.max_tokens
            return True
        assert self.finish is None
        assert self.error.code in (Code.WORKER_LOST, Code.NO_WORKER, Code.STREAM_BROKEN, Code.TRANSFER_FAILED), self.error
        assert self.error.tokens_sent == len(self.tokens)
        return False
