"""The split path's answers are the colocated path's answers, on a whole running system with the real model.

One request at a time, everything a client sees is equal to the last bit, whichever transport carried the KV; the ledger shows
that it was carried. Under batching tokens may part where the reference's two best candidates nearly tie (docs/measurement.md).

References are colocated answers from cold caches, made once and used by every test. Budget: 5 minutes on two quiet cores.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from coordinator.compare.quality.parity import CLEAR_GAP, first_divergence, floor_of, top_two_gap
from tests.e2e.parity import (
    BLOCK_TOKENS,
    COLOCATED,
    SPLITS,
    Answer,
    Way,
    ask,
    ask_http,
    assert_same,
    assert_took,
    reset_caches,
)
from tests.e2e.parity_cases import BATCH, BY_NAME, CASES, GREEDY, PREFIX_BLOCKS, PREFIX_TOKENS, Case, prefix_text
from tests.e2e.system import Served, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}
HTTP_CASES = [case for case in CASES if case.http]


class Desk:
    """Knows the references and counts what was compared with them."""

    def __init__(self, served: Served, tokenizer: Tokenizer) -> None:
        self.served = served
        self.tokenizer = tokenizer
        self._references: dict[str, Answer] = {}
        self.prompts: set[str] = set()
        self.pairs = 0
        self.batch_pairs = 0
        self.batch_divergences = 0
        self.floor = math.nan

    def sampling(self, case: Case) -> dict[str, object]:
        """The case's sampling fields, those included that depend on its base's answer."""
        if case.derive is None:
            return dict(case.sampling)
        base = self.reference(BY_NAME[case.base]).token_ids

        def text(start: int, end: int) -> str:
            before, after = (self.tokenizer.decode(base[:n], skip_special_tokens=True) for n in (start, end))
            return after[len(before) :]

        return {**case.sampling, **case.derive(base, text)}

    def reference(self, case: Case) -> Answer:
        """The colocated answer from cold caches."""
        if case.name not in self._references:
            sampling = self.sampling(case)
            reset_caches(self.served)
            answer = ask(self.served, case.prompt, sampling, COLOCATED)
            assert_took(answer, COLOCATED, forwards=False)
            self._references[case.name] = answer
        return self._references[case.name]

    def compare(self, name: str, answer: Answer, reference: Answer) -> None:
        self.prompts.add(name)
        self.pairs += 1
        assert_same(answer, reference)


@pytest.fixture(scope="module")
def desk(real: Served, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    real.wait_ready(60, prefill=1, decode=1)
    made = Desk(real, Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    yield made
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        terminal.ensure_newline()
        terminal.write_line(
            f"parity: {len(made.prompts)} prompts, {made.pairs} pairs compared one at a time; batched: {made.batch_pairs} pairs, "
            f"{made.batch_divergences} first divergences, all near-ties below {made.floor:.3f}"
        )


def test_the_table_has_enough_prompts() -> None:
    distinct = {str(case.prompt) for case in CASES} | {prefix_text(p, d) for p in PREFIX_BLOCKS for d in PREFIX_BLOCKS}
    assert len(BY_NAME) == len(CASES)
    assert len(distinct) >= 60


class TestOneAtATime:
    @pytest.mark.parametrize("way", SPLITS, ids=str)
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_split_answers_as_colocated(self, desk: Desk, case: Case, way: Way) -> None:
        reference, sampling = desk.reference(case), desk.sampling(case)
        if case.ends_after is not None:
            assert len(reference.token_ids) == case.ends_after
        if case.finish_reason:
            assert reference.finish_reason == case.finish_reason
        if "logprobs" in sampling:
            assert len(reference.logprobs) == len(reference.token_ids)
        reset_caches(desk.served)
        answer = ask(desk.served, case.prompt, sampling, way, stream="prompt_logprobs" not in sampling)
        desk.compare(case.name, answer, reference)
        assert_took(answer, way, forwards=case.forwards)
        assert answer.cached_tokens == 0

    @pytest.mark.parametrize("way", [*SPLITS, COLOCATED], ids=str)
    @pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case.name)
    def test_http_answers_as_grpc(self, desk: Desk, case: Case, way: Way) -> None:
        reference, sampling = desk.reference(case), desk.sampling(case)
        reset_caches(desk.served)
        answer = ask_http(desk.served, case.prompt, sampling, way)
        assert_took(answer, way, forwards=case.forwards)
        chosen = [[(position[0][0], position[0][1], 0)] for position in reference.logprobs]
        assert answer.logprobs == chosen
        # A completion names a stop token that the request gave, and nothing for the model's own end.
        named = reference.stopped_by if "stop_token_ids" in sampling or "stop" in sampling else None
        assert (answer.token_ids, answer.text) == (reference.token_ids, reference.text)
        assert (answer.finish_reason, answer.stopped_by) == (reference.finish_reason, named)
        assert answer.prompt_tokens == reference.prompt_tokens
        desk.prompts.add(case.name)
        desk.pairs += 1

    @pytest.mark.parametrize("way", SPLITS, ids=str)
    @pytest.mark.parametrize("on_decode", PREFIX_BLOCKS)
    @pytest.mark.parametrize("on_prefill", PREFIX_BLOCKS)
    def test_prefixes_cached_on_either_side(self, desk: Desk, on_prefill: int, on_decode: int, way: Way) -> None:
        prompt = tuple(desk.tokenizer.encode(prefix_text(on_prefill, on_decode)).ids[:PREFIX_TOKENS])
        assert len(prompt) == PREFIX_TOKENS
        case = Case(name=f"{on_prefill} blocks cached on prefill, {on_decode} on decode", prompt=prompt, sampling=GREEDY)
        reference = desk.reference(case)
        reset_caches(desk.served)
        warm(desk.served, prompt, on_prefill, Way("split"), "prefill-")
        warm(desk.served, prompt, on_decode, COLOCATED, "decode-")
        answer = ask(desk.served, prompt, GREEDY, way, stream=True)
        desk.compare(case.name, answer, reference)
        assert_took(answer, way, forwards=True)
        assert answer.cached_tokens == on_prefill * BLOCK_TOKENS
        # What was loaded is cached like what was computed, and good for a colocated request too.
        again = ask(desk.served, prompt, GREEDY, COLOCATED)
        assert again.ledger["decode_worker"] == answer.ledger["decode_worker"]
        assert again.cached_tokens == 5 * BLOCK_TOKENS
        assert again.token_ids == reference.token_ids

    @pytest.mark.parametrize("way", SPLITS, ids=str)
    def test_a_prompt_that_decode_has_whole(self, desk: Desk, way: Way) -> None:
        """Whole blocks, all of them cached: the engine reads nothing of what came, and the slot is freed all the same."""
        case = BY_NAME[f"{3 * BLOCK_TOKENS} tokens"]
        reference = desk.reference(case)
        reset_caches(desk.served)
        ask(desk.served, case.prompt, case.sampling, COLOCATED)
        answer = ask(desk.served, case.prompt, case.sampling, way)
        desk.compare(case.name, answer, reference)
        assert_took(answer, way, forwards=True)
        until("idle", desk.served.idle, 10)


def warm(served: Served, prompt: tuple[int, ...], blocks: int, way: Way, worker: str) -> None:
    """Let one worker, and no other, cache the first `blocks` of `prompt`: a split request of one token stops at prefill."""
    if blocks:
        answer = ask(served, prompt[: blocks * BLOCK_TOKENS + 1], ONE_TOKEN, way)
        workers = {name for name in (answer.ledger["prefill_worker"], answer.ledger["decode_worker"]) if name}
        assert [name[: len(worker)] for name in workers] == [worker]


class TestBatched:
    def test_first_divergences_are_near_ties(self, desk: Desk) -> None:
        cases = [BY_NAME[name] for name in BATCH]
        references = [desk.reference(case) for case in cases]
        # Colocated against colocated: what batching alone does to the gap between two candidates.
        noise = [0.0]
        for order in (1, -1):
            answers = together(desk.served, [(case, COLOCATED) for case in cases[::order]])[::order]
            for answer, reference in zip(answers, references, strict=True):
                noise.append(floor_of(answer, reference))
        desk.floor = max(noise)
        assert desk.floor < CLEAR_GAP
        ways = [*SPLITS, COLOCATED]
        mixed = [(case, ways[i % len(ways)]) for i, case in enumerate(cases)]
        for (case, way), answer, reference in zip(mixed, together(desk.served, mixed), references, strict=True):
            assert_took(answer, way, forwards=True)
            desk.batch_pairs += 1
            position = first_divergence(answer, reference)
            if position is not None:
                desk.batch_divergences += 1
                gap = top_two_gap(reference, position)
                assert gap <= desk.floor, f"{case.name} over {way}: token {position}, {reference.logprobs[position]}"


def together(served: Served, asked: list[tuple[Case, Way]]) -> list[Answer]:
    """Ask all at the same moment, from cold caches; the answers in order."""
    reset_caches(served)
    gate = threading.Barrier(len(asked))

    def one(item: tuple[Case, Way]) -> Answer:
        case, way = item
        gate.wait(30)
        return ask(served, case.prompt, case.sampling, way)

    began_s = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(one, asked))
    took_s = time.monotonic() - began_s
    assert sum(answer.ledger["e2e_s"] for answer in answers) > 2 * took_s, "the requests did not run at the same time"
    return answers


def test_nothing_is_left(desk: Desk) -> None:
    """No request, lease, block or byte of staging, by the operators' own view, in heartbeats sent after the last request."""
    began_s = time.monotonic()
    until("heartbeats", lambda: max(w.heartbeat_age_s for w in desk.served.workers().values()) < time.monotonic() - began_s, 20)
    until("idle", desk.served.idle, 10)
    for worker in desk.served.workers().values():
        held = worker.resources
        assert (worker.running, worker.waiting, worker.leases, worker.kv_usage) == (0, 0, 0, 0.0)
        assert (held.kv_blocks_held, held.legs, held.leases, held.sessions) == (0, 0, 0, 0)
        for staging in (held.send_staging, held.receive_staging):
            assert staging.capacity_bytes > 0
            assert (staging.used_bytes, staging.quarantined_bytes) == (0, 0)
