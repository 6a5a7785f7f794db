"""Objectives as they are written, resolved and judged by."""

from __future__ import annotations

import pytest

from coordinator.compare.load import MAX_SEND_LAG_SHARE, Outcome, Probe, Slo
from coordinator.compare.run import ttft_line
from coordinator.compare.slo import SloError, SloSpec, in_words, parse


def resolve(text: str) -> Slo:
    return parse(text).resolve(unloaded_ttft_s=0.1, unloaded_tpot_s=0.02)


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms,tpot=50ms", Slo(ttft_s=0.5, tpot_s=0.05)),
        ("ttft=0.5s", Slo(ttft_s=0.5, tpot_s=0.05)),
        ("tpot=2x", Slo(ttft_s=0.4, tpot_s=0.04)),
        (" ttft = 3x , itl_p99 = 5x ", Slo(ttft_s=0.3, tpot_s=0.05, itl_p99_s=0.1)),
        ("ttft=200ms+0.2ms/token,itl_p99=120ms", Slo(ttft_s=0.2, tpot_s=0.05, itl_p99_s=0.12, ttft_s_per_token=0.0002)),
    ],
)
def test_what_is_written_is_what_is_asked(text: str, slo: Slo) -> None:
    found = resolve(text)
    assert found.ttft_s == pytest.approx(slo.ttft_s)
    assert found.tpot_s == pytest.approx(slo.tpot_s)
    assert found.itl_p99_s == pytest.approx(slo.itl_p99_s)
    assert found.ttft_s_per_token == pytest.approx(slo.ttft_s_per_token)


def test_the_default_is_a_multiple_of_the_unloaded_values() -> None:
    assert SloSpec().resolve(unloaded_ttft_s=0.1, unloaded_tpot_s=0.02) == Slo(ttft_s=0.4, tpot_s=0.05)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "NAME=VALUE"),
        ("e2e=1s", "a name of ttft, tpot, itl_p99"),
        ("ttft=1s,ttft=2s", "given twice"),
        ("ttft=500", "write 500ms"),
        ("ttft=-1ms", "write 500ms"),
        ("tpot=0ms", "above 0"),
        ("tpot=1x", "a multiple must be above 1"),
        ("tpot=10ms+1ms/token", "only ttft"),
        ("ttft=4x+1ms/token", r"200ms\+0.2ms/token"),
    ],
)
def test_what_is_no_objective_says_what_would_be(text: str, why: str) -> None:
    with pytest.raises(SloError, match=why):
        parse(text)


def test_a_late_client_is_held_to_what_each_request_is_allowed() -> None:
    """Two milliseconds are much of the 110 ms of a short prompt and little of the second of a long one."""

    def probe(prompt_tokens: int) -> Probe:
        late = [Outcome(index=i, due_s=0.0, lag_s=0.002, wanted_tokens=2, prompt_tokens=prompt_tokens) for i in range(40)]
        return Probe(path="split", seed=1, rate_per_s=1.0, workload_digest="", outcomes=late)

    slo = resolve("ttft=100ms+1ms/token,tpot=1s")
    assert probe(10).lag_share(slo) == pytest.approx(0.002 / 0.11)
    assert probe(10).lag_share(slo) > MAX_SEND_LAG_SHARE > probe(900).lag_share(slo)


def test_a_long_prompt_may_take_longer() -> None:
    slo = resolve("ttft=100ms+1ms/token,tpot=1s")
    for prompt_tokens, meets in ((100, False), (200, True)):
        outcome = Outcome(
            index=0, due_s=0, lag_s=0, wanted_tokens=1, prompt_tokens=prompt_tokens, tokens=1, ttft_s=0.25, e2e_s=0.25
        )
        assert outcome.meets(slo) is meets


def test_in_words() -> None:
    assert in_words(resolve("ttft=200ms+0.2ms/token,tpot=50ms,itl_p99=120ms")) == (
        "TTFT 200 ms + 0.2 ms/token, TPOT 50 ms, ITL p99 120 ms"
    )
    assert in_words(Slo(ttft_s=0.5, tpot_s=0.05)) == "TTFT 500 ms, TPOT 50 ms"


def test_a_multiple_of_the_line_grows_with_the_prompt() -> None:
    spec = parse("ttft=4xline,tpot=2x")
    slo = spec.resolve(unloaded_ttft_s=0.1, unloaded_tpot_s=0.02, ttft_line=(0.05, 0.001))
    assert (slo.ttft_s, slo.ttft_s_per_token) == pytest.approx((0.2, 0.004))
    with pytest.raises(SloError, match="several lengths"):
        spec.resolve(unloaded_ttft_s=0.1, unloaded_tpot_s=0.02)
    with pytest.raises(SloError, match="only ttft may grow"):
        parse("tpot=2xline")
    with pytest.raises(SloError, match="above 1"):
        parse("ttft=1xline")


def test_the_line_through_unloaded_requests() -> None:
    def outcome(tokens: int, ttft_s: float) -> Outcome:
        return Outcome(index=0, due_s=0.0, lag_s=0.0, wanted_tokens=1, prompt_tokens=tokens, ttft_s=ttft_s)

    line = ttft_line([outcome(tokens, 0.05 + 0.001 * tokens) for tokens in (10, 50, 200)])
    assert line == pytest.approx((0.05, 0.001))
    flat = ttft_line([outcome(10, 0.3), outcome(50, 0.2), outcome(200, 0.1)])
    assert flat is not None
    assert min(flat) == 0.0
    assert ttft_line([outcome(10, 0.1), outcome(20, 0.2)]) is None
