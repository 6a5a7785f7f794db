"""Circuits under any order of faults, successes, choices and time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.routing.breaker import MAX_DOUBLINGS, Breakers, CircuitState, PairKey
from protos.ids import Incarnation

FAILURES, COOLDOWN_S = 3, 10.0
P, D = Incarnation("p"), Incarnation("d")
KEYS = (P, D, PairKey(P, D, "ucx"), PairKey(P, D, "grpc"))
keys = st.sampled_from(KEYS)


class Circuits(RuleBasedStateMachine):
    """A model that only remembers what was reported, and what must follow from it whatever the circuit is like inside."""

    def __init__(self) -> None:
        super().__init__()
        self.breakers = Breakers(failures=FAILURES, cooldown_s=COOLDOWN_S)
        self.now_s = 1000.0
        self.faults = dict.fromkeys(KEYS, 0)
        self.touched_s = dict.fromkeys(KEYS, 0.0)

    @rule(seconds=st.floats(0, 3 * COOLDOWN_S))
    def time_passes(self, seconds: float) -> None:
        before = {key: self.breakers.state(key, self.now_s) for key in KEYS}
        self.now_s += seconds
        for key, state in before.items():
            after = self.breakers.state(key, self.now_s)
            assert after is state or (state, after) == (CircuitState.OPEN, CircuitState.HALF_OPEN), "time alone closes nothing"

    @rule(key=keys)
    def fault(self, key: PairKey | Incarnation) -> None:
        was = self.breakers.state(key, self.now_s)
        self.faults[key] += 1
        self.touched_s[key] = self.now_s
        opened = self.breakers.failed(key, self.now_s)
        assert opened == (self.faults[key] == FAILURES)
        if self.faults[key] >= FAILURES:
            assert was is CircuitState.HALF_OPEN or self.breakers.state(key, self.now_s) is CircuitState.OPEN

    @rule(key=keys)
    def success(self, key: PairKey | Incarnation) -> None:
        assert self.breakers.succeeded(key) == (self.faults[key] >= FAILURES)
        self.faults[key] = 0
        assert self.breakers.state(key, self.now_s) is CircuitState.CLOSED

    @rule(key=keys)
    def choice(self, key: PairKey | Incarnation) -> None:
        state = self.breakers.state(key, self.now_s)
        probe = self.breakers.chosen(key, self.now_s)
        assert probe == (state is CircuitState.HALF_OPEN)
        if probe:
            self.touched_s[key] = self.now_s
            assert not self.breakers.allows(key, self.now_s), "one probe at a time"
            assert self.breakers.allows(key, self.now_s + COOLDOWN_S), "and the next one when it never reports"

    @rule(incarnation=st.sampled_from((P, D)))
    def gone(self, incarnation: Incarnation) -> None:
        self.breakers.forget(incarnation)
        for key in KEYS:
            if key == incarnation or (isinstance(key, PairKey) and incarnation in key):
                self.faults[key] = 0
                assert self.breakers.state(key, self.now_s) is CircuitState.CLOSED

    @invariant()
    def circuits_follow_their_own_faults(self) -> None:
        blocked = self.breakers.blocked(self.now_s)
        for key in KEYS:
            state = self.breakers.state(key, self.now_s)
            assert (state is CircuitState.CLOSED) == (self.faults[key] < FAILURES)
            assert (key in blocked) == (state is CircuitState.OPEN) == (not self.breakers.allows(key, self.now_s))
            longest_s = COOLDOWN_S * 2**MAX_DOUBLINGS
            assert self.breakers.allows(key, self.touched_s[key] + longest_s), "no circuit stays open for ever"
        assert bool(self.breakers) == any(self.faults.values())


TestCircuits = Circuits.TestCase
TestCircuits.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
