"""Path `auto` over the present workers: each path's next route, its load, and `AutoPath`'s decision between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from coordinator.routing.auto import COLOCATED, SPLIT, AutoPath, Decision, Objective, PathLoad, Times, Work
from coordinator.routing.goals import PairGoal, Route, SoloGoal
from coordinator.routing.phases import Answer, PhaseBook
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router
from coordinator.routing.views import Role

OUTPUT_RATE = 0.02
"""The weight of one answer in what answers to such a limit are expected to be long."""


@dataclass(slots=True)
class _Lengths:
    """How long answers are, by the order of magnitude of the limit they were asked with: a limit is rarely reached."""

    _means: dict[int, tuple[float, int]] = field(default_factory=dict)

    def expected(self, max_tokens: int) -> int:
        mean, _ = self._means.get(max_tokens.bit_length(), (float(max_tokens), 0))
        return max(1, min(max_tokens, round(mean)))

    def learn(self, max_tokens: int, output_tokens: int) -> None:
        mean, seen = self._means.get(max_tokens.bit_length(), (0.0, 0))
        rate = max(OUTPUT_RATE, 1.0 / (seen + 1))
        self._means[max_tokens.bit_length()] = (mean + rate * (output_tokens - mean), seen + 1)


@dataclass(slots=True)
class PathChooser:
    """One gateway's. Tell `phases` of every leg, `decide` once a request, `answered` when it ended well."""

    router: Router
    auto: AutoPath
    phases: PhaseBook = field(default_factory=PhaseBook)
    _lengths: _Lengths = field(default_factory=_Lengths)

    def decide(
        self,
        request_id: str,
        ask: Ask,
        objective: Objective,
        *,
        max_tokens: int,
        now_s: float,
        transport: str | None = None,
        pools: frozenset[str] = frozenset(),
    ) -> Decision | None:
        """The path of a request that starts now; None where no worker can take it on either."""
        work = Work(prompt_tokens=ask.tokens, output_tokens=self._lengths.expected(max_tokens))
        loads: dict[str, PathLoad] = {}
        pair = self.router.preview(PairGoal(prompt_tokens=ask.tokens, transport=transport, pools=pools), now_s, ask)
        if pair is not None:
            loads[SPLIT] = self._load(pair, now_s)
        solos = self.router.preview_solo(SoloGoal(pools=pools), now_s, ask)
        role: Role | None = None
        if solos:
            found = [self._load(each, now_s) for each in solos]
            place = self.auto.best_of(COLOCATED, found, work, objective)
            loads[COLOCATED], role = found[place], solos[place].worker.role
        if not loads:
            return None
        if pair is not None and solos and (last := self.router.last_resort(pair)) != self.router.last_resort(solos[0]):
            # Predictions know nothing of silence. Without the other path there is nothing to explore either.
            del loads[SPLIT if last else COLOCATED]
        decision = self.auto.decide(work, objective, loads, draw=draw_of(request_id), request_id=request_id)
        if decision.path == COLOCATED:
            decision.solo_role = role
        return decision

    def _load(self, route: Route, now_s: float) -> PathLoad:
        # Prompts on an engine that decodes are those of whole requests, whichever path this request takes.
        return self.phases.load(route, self.auto.times[COLOCATED].prompt_token_s, now_s)

    def answer(self, objective: Objective, *, max_tokens: int) -> Answer:
        """What `phases` is told of a request's answer, whichever way its path was chosen."""
        return Answer(tokens=self._lengths.expected(max_tokens), tpot_s=objective.tpot_s)

    def answered(self, decision: Decision, times: Times, *, max_tokens: int, output_tokens: int) -> None:
        """A request took the path that was decided and had its answer, two tokens or more of it."""
        self._lengths.learn(max_tokens, output_tokens)
        self.auto.measured(decision, times)


def draw_of(request_id: str) -> float:
    """Uniform in [0, 1), and always the same for a request: whether it explores can be told from its id."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") / 2.0**64
