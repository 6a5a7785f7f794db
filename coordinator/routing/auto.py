"""Which path a request takes: both paths' times predicted under the present load, against its objective. Pure.

The prediction is calibrated step times and a queue, corrected by what really came: engines drift, and a calibration is never
exact. A small share of the requests goes the other way, or a path that got better would never be seen again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SPLIT = "split"
COLOCATED = "colocated"
PATHS = (SPLIT, COLOCATED)

AUTO = "auto"
"""What a request asks for that leaves the choice to the gateway."""
PREDICTED, HELD, EXPLORED, ONLY_PATH = "predicted", "held", "explored", "only_path"

MAX_ERROR = math.log(10.0)
"""One request that stood still says no more than that predictions are off by this."""
BUSIEST = 0.95
"""Of an engine's time taken by prefill: beyond it a decode step is not predicted to take longer still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One path's calibrated times, seconds.

    `first_token_s` and `prompt_token_s`: a prompt's fixed part, and each token that is not cached. `step_s` and `running_s`: a
    decode step alone, and what each further running sequence adds. `handover_s` and `handover_token_s`: what moving a prompt's
    KV adds between the first token and the second, fixed and per prompt token; 0 where nothing moves. `chunk_tokens` of prompts
    are computed in one step at most, and each step beyond the first adds what a step takes without sequences; 0: all in one.
    """

    first_token_s: float
    prompt_token_s: float
    step_s: float
    running_s: float
    handover_s: float = 0.0
    handover_token_s: float = 0.0
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLoad:
    """What a path's next worker has before it: prompt tokens queued, sequences that decode or soon will, and the share of the
    decoding engine's time that prompts take (0 where decode has its engine to itself).

    `beside` sequences decode on the engine that computes the prompt and share its steps; prompts take `beside_share` of its time.
    `cached_tokens` of the prompt should be in that engine's cache.
    """

    queued_tokens: int = 0
    running: int = 0
    prompt_share: float = 0.0
    beside: int = 0
    beside_share: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request: its prompt, and the tokens it is expected to answer."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a request is to meet, seconds. `source` says who asked for it, for people."""

    ttft_s: float
    tpot_s: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """TTFT and TPOT, predicted or measured, seconds."""

    ttft_s: float
    tpot_s: float

    def against(self, objective: Objective) -> float:
        """The worse of the two as a share of its objective: up to 1 both are met."""
        return max(self.ttft_s / objective.ttft_s, self.tpot_s / objective.tpot_s)


def predict(times: StepTimes, load: PathLoad, work: Work) -> Times:
    """A path's times for a request that starts now."""
    tokens = load.queued_tokens + max(1, work.prompt_tokens - load.cached_tokens)
    steps = -(-tokens // times.chunk_tokens) if times.chunk_tokens else 1
    # What decodes on the engine shares every step of the prompt.
    base_s = max(0.0, times.step_s - times.running_s)
    between_s = base_s * (steps - 1) + times.running_s * load.beside * steps
    ttft_s = times.first_token_s + times.prompt_token_s * tokens + between_s
    step_s = _step_s(times, load.running, load.prompt_share)
    handover_s = times.handover_s + times.handover_token_s * work.prompt_tokens
    return Times(ttft_s, step_s + handover_s / max(1, work.output_tokens - 1))


def beside_tpot_s(times: StepTimes, load: PathLoad, work: Work) -> float:
    """What those that decode where this prompt is computed will take between tokens, if their answers are as long as this one; 0
    where nobody decodes there."""
    if not load.beside:
        return 0.0
    prompt_s = times.prompt_token_s * max(1, work.prompt_tokens - load.cached_tokens)
    return _step_s(times, load.beside, load.beside_share) + prompt_s / max(1, work.output_tokens - 1)


def _step_s(times: StepTimes, running: int, prompt_share: float) -> float:
    alone_s = times.step_s + times.running_s * running
    step_s = alone_s / (1.0 - min(prompt_share, BUSIEST))
    # However many prompts wait, a step holds a chunk of them and no more.
    return min(step_s, alone_s + times.prompt_token_s * times.chunk_tokens) if times.chunk_tokens else step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """`hysteresis`: how much better the other path must be predicted before requests of a kind change over. `explore_share` goes
    the other way. `learning_rate`: the weight of one request in a path's correction; a path that is seldom taken catches up on
    the decisions it was not part of, with at most `rare_rate`. `decisions` are remembered."""

    hysteresis: float = 0.1
    explore_share: float = 0.02
    learning_rate: float = 0.02
    rare_rate: float = 0.2
    decisions: int = 4096


@dataclass(slots=True, kw_only=True)
class Decision:
    """One choice with everything it came from. `why`: "predicted", "held" (by hysteresis), "explored", "only_path".

    `predicted` is corrected by what was measured on each path until then.
    """

    request_id: str = ""
    path: str
    why: str
    work: Work
    objective: Objective
    loads: Mapping[str, PathLoad]
    predicted: Mapping[str, Times]
    measured: Times | None = None

    def lost_by(self) -> float:
        """How much worse, as a share of the objective, it went than the other path was predicted to; 0 when it did not lose,
        or is not measured."""
        others = [times.against(self.objective) for path, times in self.predicted.items() if path != self.path]
        if self.measured is None or not others:
            return 0.0
        return max(0.0, self.measured.against(self.objective) - min(others))


def _error(measured_s: float, predicted_s: float) -> float:
    """As a logarithm."""
    error = math.log(max(measured_s, 1e-9) / max(predicted_s, 1e-9))
    return min(MAX_ERROR, max(-MAX_ERROR, error))


@dataclass(slots=True)
class _Correction:
    """Of one path: measured over predicted, as logarithms that follow slowly."""

    ttft: float = 0.0
    tpot: float = 0.0
    seen: int = 0
    told_at: int = 0
    """How many decisions of any path there had been when it was last told."""


@dataclass(slots=True)
class AutoPath:
    """Decides, and learns from what came of it. `times` are the calibration of each path that can be taken."""

    times: Mapping[str, StepTimes]
    settings: AutoSettings = field(default_factory=AutoSettings)
    log: deque[Decision] = field(init=False)
    decided: int = field(init=False, default=0)
    _corrections: dict[str, _Correction] = field(init=False)
    _held: dict[tuple[int, int], str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.log = deque(maxlen=self.settings.decisions)
        self._corrections = {path: _Correction() for path in self.times}

    def predicted(self, path: str, load: PathLoad, work: Work) -> Times:
        """A path's times, corrected by what was measured on it."""
        raw, correction = predict(self.times[path], load, work), self._corrections[path]
        return Times(raw.ttft_s * math.exp(correction.ttft), raw.tpot_s * math.exp(correction.tpot))

    def correction(self, path: str) -> Times:
        """The factors that a path's raw predictions are multiplied by now."""
        correction = self._corrections[path]
        return Times(math.exp(correction.ttft), math.exp(correction.tpot))

    def seen(self, path: str) -> int:
        """How many requests the path's correction comes from."""
        return self._corrections[path].seen

    def decide(
        self,
        work: Work,
        objective: Objective,
        loads: Mapping[str, PathLoad],
        *,
        draw: float,
        hint: str = "",
        request_id: str = "",
    ) -> Decision:
        """The path of one request.

        `loads` has the paths that can be taken now, one at least. `draw` is uniform in [0, 1): below `explore_share` the request
        goes the other way. `hint` is what is known of such requests beforehand: where requests of a kind begin.
        """

        def decided(path: str, why: str) -> Decision:
            made = Decision(
                path=path,
                why=why,
                work=work,
                objective=objective,
                loads=dict(loads),
                predicted=predicted,
                request_id=request_id,
            )
            self.log.append(made)
            self.decided += 1
            return made

        predicted = {path: self.predicted(path, load, work) for path, load in loads.items()}
        # A request that is served well at the cost of those beside it would be followed by others until none is.
        scores = {
            path: max(times.against(objective), self._beside(path, loads[path], work) / objective.tpot_s)
            for path, times in predicted.items()
        }
        best = min(scores, key=lambda path: scores[path])
        why = PREDICTED
        if len(scores) == 1:
            return decided(best, ONLY_PATH)
        kind = (work.prompt_tokens.bit_length(), work.output_tokens.bit_length())
        held = self._held.get(kind, hint)
        if held in scores and held != best and scores[best] * (1.0 + self.settings.hysteresis) > scores[held]:
            best, why = held, HELD
        self._held[kind] = best
        if draw < self.settings.explore_share:
            best, why = min((p for p in scores if p != best), key=lambda path: scores[path]), EXPLORED
        return decided(best, why)

    def _beside(self, path: str, load: PathLoad, work: Work) -> float:
        return beside_tpot_s(self.times[path], load, work) * math.exp(self._corrections[path].tpot)

    def measured(self, decision: Decision, times: Times) -> None:
        """What came of a decision. A request that failed, or had a single token, says nothing and is not told."""
        decision.measured = times
        correction = self._corrections[decision.path]
        raw = predict(self.times[decision.path], decision.loads[decision.path], decision.work)
        ttft, tpot = _error(times.ttft_s, raw.ttft_s), _error(times.tpot_s, raw.tpot_s)
        correction.seen += 1
        # What is explored is seen once in many decisions, and would follow a drift that much more slowly.
        missed = max(1, self.decided - correction.told_at)
        correction.told_at = self.decided
        often = min(self.settings.rare_rate, 1.0 - (1.0 - self.settings.learning_rate) ** missed)
        # The first ones count as much as the mean of them would: a calibration that is off is off from the first request.
        rate = max(self.settings.learning_rate, often, 1.0 / correction.seen)
        correction.ttft += rate * (ttft - correction.ttft)
        correction.tpot += rate * (tpot - correction.tpot)

    def lost(self) -> list[Decision]:
        """The remembered decisions that lost, the worst first."""
        return sorted((d for d in self.log if d.lost_by() > 0), key=lambda d: -d.lost_by())
