"""Whatever becomes of a request, the ledger's exclusive stages and its residual add up, and none takes what was not its own.

A life is drawn as routes. Every leg's window is made from parts that are known here: the way there and back, the worker's
stages, and what the worker forgot to report. So each stage has one right answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.gateway.ledger import STAGES, LedgerRecorder, Window
from protos.splitpoint.v1 import worker_pb2

pytestmark = pytest.mark.timeout(60)

durations = st.integers(0, 1000).map(lambda milliseconds: milliseconds / 1000)


@dataclass(frozen=True)
class Leg:
    """One leg that reported: all durations in seconds."""

    before: float
    there: float
    wait: float
    queued: float
    computing: float
    decoding: float
    returning: float
    forgotten: float
    back: float

    @property
    def elapsed(self) -> float:
        return self.wait + self.queued + self.computing + self.decoding + self.returning + self.forgotten


# A leg that took no time at all would say nothing of it: 0 on the wire means "not said".
legs = st.builds(Leg, *[durations] * 9).filter(lambda leg: leg.computing > 0)
kinds = st.sampled_from([(Window.SOLO,), (Window.PREFILL, Window.DECODE)])


@st.composite
def routes(draw: st.DrawFn) -> list[tuple[Window, Leg]]:
    return [(window, draw(legs)) for window in draw(kinds)]


@dataclass
class Life:
    """Drives a recorder on a clock of its own, and keeps what each stage should be."""

    now: float = 5.0
    expected: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STAGES, "residual"), 0.0))

    def __post_init__(self) -> None:
        self.began = self.now
        self.recorder = LedgerRecorder(received_s=self.now)

    def expect(self, **seconds: float) -> None:
        for stage, value in seconds.items():
            self.expected[stage] += value

    def at_gateway(self, seconds: float) -> None:
        self.now += seconds
        self.expect(gateway=seconds)

    def send(self, window: Window) -> None:
        self.recorder.leg_sent(window, "w", self.now)

    def leg(self, window: Window, leg: Leg) -> None:
        """A leg that answers; its tokens reach the client with its end."""
        wait = leg.wait if window is Window.DECODE else 0.0
        decoding = 0.0 if window is Window.PREFILL else leg.decoding
        elapsed = leg.elapsed - (leg.wait - wait) - (leg.decoding - decoding)
        self.now += leg.there + elapsed + leg.back
        times = worker_pb2.LegTimes(
            transfer_wait_s=wait,
            queued_s=leg.queued,
            computing_s=leg.computing,
            decoding_s=decoding,
            returning_s=leg.returning,
            elapsed_s=elapsed,
        )
        self.recorder.tokens_arrived(self.now)
        self.recorder.leg_ended(self.now, times)
        self.expect(gateway=leg.there + leg.back, worker=leg.returning, residual=leg.forgotten)
        if window is Window.DECODE:
            self.expect(transfer_wait=wait, decode_queue=leg.queued, decode=leg.computing + decoding)
        else:
            self.expect(prefill_queue=leg.queued, prefill=leg.computing, decode=decoding)

    def answer(self, route: list[tuple[Window, Leg]]) -> None:
        """A whole route that ends as it should."""
        for window, leg in route:
            self.at_gateway(leg.before)
            self.send(window)
            self.leg(window, leg)
            self.recorder.emitted(self.now)

    def check(self) -> None:
        self.recorder.finished(self.now)
        ledger = self.recorder.build(self.now + 1.0)
        got = {stage: getattr(ledger, f"{stage}_s") for stage in self.expected}
        assert got == pytest.approx(self.expected, abs=1e-9)
        assert sum(got.values()) == pytest.approx(ledger.e2e_s, abs=1e-9)
        assert ledger.e2e_s == pytest.approx(self.now - self.began, abs=1e-9)


@given(routes(), durations)
def test_a_request_that_just_works(route: list[tuple[Window, Leg]], after: float) -> None:
    life = Life()
    life.answer(route)
    life.at_gateway(after)
    life.check()


@given(st.lists(st.tuples(routes(), durations, st.booleans()), min_size=1, max_size=3), routes())
def test_retries_are_one_stage_whatever_their_legs_reported(
    failures: list[tuple[list[tuple[Window, Leg]], float, bool]], last: list[tuple[Window, Leg]]
) -> None:
    life = Life()
    for route, open_for, reported in failures:
        window, leg = route[0]
        life.at_gateway(leg.before)
        kept, began = dict(life.expected), life.now
        life.send(window)
        if reported and window is Window.PREFILL:
            life.leg(window, leg)
            life.recorder.leg_sent(Window.DECODE, "d", life.now)
        life.now += open_for
        life.recorder.route_failed(life.now)
        life.expected = kept
        life.expect(retry=life.now - began)
    life.answer(last)
    life.check()


@given(routes(), durations, durations, routes())
def test_a_resume_keeps_what_the_client_keeps(
    first: list[tuple[Window, Leg]], until_token: float, until_loss: float, rest: list[tuple[Window, Leg]]
) -> None:
    """The last leg of the first route breaks after tokens, so nobody reports it: the gateway's own stamps divide it."""
    life = Life()
    life.answer(first[:-1])
    window, leg = first[-1]
    life.at_gateway(leg.before)
    life.send(window)
    life.now += until_token
    life.recorder.tokens_arrived(life.now)
    life.recorder.emitted(life.now)
    life.now += until_loss
    life.recorder.route_failed(life.now)
    life.expect(**{"transfer_wait" if window is Window.DECODE else "prefill": until_token, "decode": until_loss})
    life.answer(rest)
    life.check()
    assert life.recorder.partial


@given(routes(), durations)
def test_a_recomputed_prompt_is_decodes_own_time(route: list[tuple[Window, Leg]], waited: float) -> None:
    """KV that did not arrive was waited for; the prompt that is then computed there is `decode`, and nothing is a retry."""
    life = Life()
    life.recorder.recomputed = True
    life.answer(route)
    life.now += waited
    life.expect(gateway=waited)
    life.check()
    assert life.recorder.build(life.now).retry_s == 0.0
