"""Silence is noticed in time, once, and only of what is watched."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.detector import FailureDetector

INTERVAL_S, MISSES = 1.0, 3
KEYS = st.sampled_from(("a", "b"))


class Detector(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.detector: FailureDetector[str] = FailureDetector(interval_s=INTERVAL_S, misses=MISSES)
        self.now_s = 0.0
        self.users = {"a": 0, "b": 0}
        self.heard_s = {"a": 0.0, "b": 0.0}
        self.told: set[str] = set()

    @rule(seconds=st.floats(0, 2 * INTERVAL_S))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(key=KEYS)
    def watch(self, key: str) -> None:
        if not self.users[key]:
            self.heard_s[key] = self.now_s
        self.users[key] += 1
        self.detector.watch(key, self.now_s)

    @rule(key=KEYS)
    def leave(self, key: str) -> None:
        self.users[key] = max(0, self.users[key] - 1)
        self.detector.leave(key)
        if not self.users[key]:
            self.told.discard(key)

    @rule(key=KEYS)
    def heard(self, key: str) -> None:
        again = self.detector.heard(key, self.now_s)
        assert again == (key in self.told)
        self.told.discard(key)
        if self.users[key]:
            self.heard_s[key] = self.now_s

    @rule(gap_s=st.floats(0, 10))
    def the_watcher_itself_stood_still(self, gap_s: float) -> None:
        self.now_s += gap_s
        self.detector.pardon(gap_s)
        for key in self.heard_s:
            self.heard_s[key] += gap_s

    @rule()
    def suspects(self) -> None:
        late = {k for k, n in self.users.items() if n and self.now_s - self.heard_s[k] >= MISSES * INTERVAL_S}
        fresh = self.detector.suspects(self.now_s)
        assert len(fresh) == len(set(fresh))
        assert set(fresh) == late - self.told
        self.told |= late

    @invariant()
    def only_what_is_watched_is_kept(self) -> None:
        assert len(self.detector) == sum(1 for n in self.users.values() if n)
        for key, users in self.users.items():
            assert self.detector.silent_s(key, self.now_s) == (self.now_s - self.heard_s[key] if users else 0.0)


TestDetector = Detector.TestCase
TestDetector.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
