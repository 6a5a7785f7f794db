"""One choice of a public request: tokens of the core in, pieces of text and an end out. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.gateway.api import Finished, Generation, Submission, Tokens
from coordinator.gateway.detokenize import Detokenizer
from coordinator.gateway.stop import StopStrings
from coordinator.gateway.tokenizer import TextTokenizer
from protos.splitpoint.v1 import common_pb2


class Delta:
    """What one token adds: at most one token id, the text that may be shown now, and on the last one the end.

    `stop_reason` is the stop string, or the stop token's id where it is not the model's own EOS; None otherwise, as in vLLM.
    """

    __slots__ = ("finish_reason", "logprobs", "matched_token_id", "stop_reason", "text", "token_id")

    def __init__(self, token_id: int | None, text: str, logprobs: common_pb2.PositionLogprobs | None) -> None:
        self.token_id = token_id
        self.text = text
        self.logprobs = logprobs
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.matched_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False


class Choice:
    """State of one choice. Feed it the core's events in order until `finished`; `ended` once its generation is over as well.

    The token that must be the last one (the `max_tokens`-th, a stop token) waits for the core's `Finished`, so that its delta
    carries the end and a stop token shows no text.
    """

    def __init__(self, index: int, submission: Submission, options: TextOptions, tokenizer: TextTokenizer) -> None:
        sampling = submission.sampling
        self.index = index
        self.submission = submission
        self.prompt_tokens = len(submission.prompt_token_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: list[common_pb2.PositionLogprobs] | None = None
        self.finished = False
        self.ended = False
        self.generation: Generation | None = None
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._include_stop = options.include_stop_str_in_output
        self._eos = tokenizer.primary_eos_token_id
        self._end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids)
        self._stops = StopStrings(options.stop, include_in_output=self._include_stop) if options.stop else None
        self._detokenizer: Detokenizer = tokenizer.detokenizer(
            submission.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._step: Callable[[int], str] = self._detokenizer.step
        self._waiting: Delta | None = None

    @property
    def ledger(self) -> common_pb2.StageLedger:
        """The stages so far; final once the generation ended or was closed."""
        return common_pb2.StageLedger() if self.generation is None else self.generation.ledger()

    def tokens(self, event: Tokens) -> list[Delta]:
        """The deltas of new tokens. When a stop string matches, the last one ends the choice and `finished` is set."""
        if self.completion_tokens == 0:
            self.cached_tokens = event.cached_tokens
            if event.prompt_logprobs is not None:
                self.prompt_logprobs = event.prompt_logprobs
        deltas: list[Delta] = []
        logprobs = event.logprobs
        for position, token_id in enumerate(event.token_ids):
            delta = Delta(token_id, "", None if logprobs is None else logprobs[position])
            if self._waiting is not None:
                # It was not the last one after all: an engine that did not stop at it.
                deltas.append(self._shown(self._waiting))
                self._waiting = None
                if self.finished:
                    return deltas
            self.completion_tokens += 1
            ends = token_id in self._end_ids and self.completion_tokens >= self._min_tokens
            if ends or self.completion_tokens >= self._max_tokens:
                self._waiting = delta
                continue
            deltas.append(self._shown(delta))
            if self.finished:
                return deltas
        return deltas

    def end(self, event: Finished) -> Delta:
        """The last delta, with everything that was held back."""
        last = self._waiting or Delta(None, "", None)
        self._waiting = None
        stopped_by_token = event.finish_reason == "stop" and event.matched_token_id is not None
        if last.token_id is not None and (self._include_stop or not stopped_by_token or last.token_id != event.matched_token_id):
            self._shown(last)
        if not self.finished:
            rest = self._detokenizer.flush()
            if self._stops is not None:
                rest = self._push(last, rest) + ("" if self.finished else self._stops.flush())
            last.text += rest
        if not self.finished:
            last.finish_reason = event.finish_reason
            last.matched_token_id = event.matched_token_id
            if stopped_by_token and event.matched_token_id != self._eos:
                last.stop_reason = event.matched_token_id
            self.finished = True
        return last

    def _shown(self, delta: Delta) -> Delta:
        text = self._step(delta.token_id)  # type: ignore[arg-type]
        delta.text = text if self._stops is None else self._push(delta, text)
        return delta

    def _push(self, delta: Delta, text: str) -> str:
        """`text` through the stop strings; ends the choice when one matches after `min_tokens`."""
        assert self._stops is not None
        text, matched = self._stops.push(text, armed=self.completion_tokens > self._min_tokens)
        if matched is not None:
            delta.finish_reason = "stop"
            delta.stop_reason = matched
            self.finished = True
        return text
