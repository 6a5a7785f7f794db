"""Public clients that keep what they got, and what counts as the right answer on a real engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.system import Served

NEAR_TIE = 0.375
"""Log-probability between the two best candidates up to which batch shape may decide: three steps of bfloat16 at the size that
SmolLM2's top logits have. A fixed bound, wider than the floors that test_parity
measures colocated against colocated (0.25 and 0.31 in two runs): an answer that parts at such a gap counts as right here."""


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
    """The colocated answer to one prompt, asked alone. `margins` are the gaps between the two best candidates."""

    tokens: list[int]
    margins: list[float]

    @staticmethod
    def ask(served: Served, prompt: Sequence[int], max_tokens: int) -> Reference:
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
        return Reference(tokens, margins)

    def check(self, got: Sequence[int]) -> None:
        """Equal as far as `got` goes, up to a first difference at a near-tie (docs: measuring, parity under batching)."""
        for index, (mine, theirs) in enumerate(zip(self.tokens, got, strict=False)):
            if mine != theirs:
                margin = self.margins[index]
                assert margin <= NEAR_TIE, f"token {index} is {theirs}, not {mine} (margin {margin:.3f})"
                return
        assert len(got) <= len(self.tokens)


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

    def check_end(self, reference: Reference) -> bool:
        """It ended before its deadline: with exactly the right tokens (True), or with an error that says so (False)."""
        self.join(self._deadline_s + 40)
        assert not self.is_alive()
        assert self.took_s < self._deadline_s, f"ended after {self.took_s:.1f} s: {self.error}"
        reference.check(self.tokens)
        if self.error is None:
            assert self.finish is not None
            assert self.finish.finish_reason == "length"
            assert len(self.tokens) == self.max_tokens
            return True
        assert self.finish is None
        assert self.error.code in (Code.WORKER_LOST, Code.NO_WORKER, Code.STREAM_BROKEN, Code.TRANSFER_FAILED), self.error
        assert self.error.tokens_sent == len(self.tokens)
        return False
