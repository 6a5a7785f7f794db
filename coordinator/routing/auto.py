"""Which path a request takes: both paths' times predicted under the present load, against its objective. Pure.

The prediction is calibrated step times and a queue, corrected by what really came: engines drift, and a calibration is never
exact. How much measured times scatter around it says how likely an objective is missed, and the path is taken that adds fewer
misses: the request's own, those of the sequences it disturbs, and those of requests that will wait behind it. A small share of
the requests goes the other way, or a path that got better would never be seen again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from coordinator.routing.views import Role

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
BUSIEST_QUEUE = 0.8
"""Of an engine's time that its prompts take, as far as it says how many wait behind one: four at most."""
NEIGHBOUR_WEIGHT = 0.5
"""Of a neighbour's miss against one's own: what it is spared by this request, others may do to it."""
TIE = 0.02
"""Misses that are no difference: then the path that uses less of the objective is better."""
FIRST_SPREAD, FIRST_SEEN, LEAST_SPREAD = 0.2, 20, 0.05
"""How much logarithms scatter around a prediction until so many are measured, and how little at the least."""
EXPLORE_MISSES, PUT_OFF = 0.2, 10
"""What an exploration may add in misses, and how many are put off for one that adds less before one is made at any cost."""
_SQRT2 = math.sqrt(2.0)


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


class Neighbour(NamedTuple):
    """A sequence on an engine that the request would use: the tokens it is still expected to answer, in how many seconds they are
    to come for its TPOT objective, whether its own prompt is computed, and how many such sequences it `stands_for`."""

    left_tokens: int
    spare_s: float
    started: bool = True
    stands_for: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLoad:
    """What a path's next worker has before it: prompt tokens queued, sequences that decode or soon will, and the share of the
    decoding engine's time that prompts take (0 where decode has its engine to itself).

    `beside` sequences decode on the engine that computes the prompt and share its steps; prompts take `beside_share` of its time.
    `cached_tokens` of the prompt should be in that engine's cache. `neighbours` share the engine that computes the prompt,
    `decode_neighbours` the one that decodes, where it is `decodes_apart` another.
    """

    queued_tokens: int = 0
    running: int = 0
    prompt_share: float = 0.0
    beside: int = 0
    beside_share: float = 0.0
    cached_tokens: int = 0
    decodes_apart: bool = False
    neighbours: tuple[Neighbour, ...] = ()
    decode_neighbours: tuple[Neighbour, ...] = ()

    def alone(self) -> PathLoad:
        """Without the neighbours, to be kept."""
        return replace(self, neighbours=(), decode_neighbours=())


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


def miss_chance(expected_s: float, limit_s: float, spread: float) -> float:
    """How likely it takes longer than `limit_s`, where logarithms scatter by `spread` around what is expected."""
    if limit_s <= 0:
        return 1.0
    return 0.5 * math.erfc(math.log(limit_s / expected_s) / (spread * _SQRT2)) if expected_s > 0 else 0.0


def disturbed(times: StepTimes, load: PathLoad, work: Work, factor: float, spread: float) -> float:
    """How many neighbours miss their TPOT objective because of this request, in expectation. `factor` corrects the times."""
    tokens = max(1, work.prompt_tokens - load.cached_tokens)
    chunk = times.chunk_tokens or load.queued_tokens + tokens
    before = -(-load.queued_tokens // chunk)
    steps = max(1, -(-(load.queued_tokens + tokens) // chunk) - before)
    share = min(load.beside_share, BUSIEST)
    added = 0.0

    def add(neighbour: Neighbour, base_s: float, extra_s: float) -> None:
        nonlocal added
        with_it = miss_chance((base_s + extra_s) * factor, neighbour.spare_s, spread)
        added += neighbour.stands_for * (with_it - miss_chance(base_s * factor, neighbour.spare_s, spread))

    for each in load.neighbours:
        # One that waits itself will decode when this prompt, which comes after it, is computed.
        ahead = before if each.started else 0
        queued_tokens = min(load.queued_tokens, chunk * each.left_tokens) if each.started else 0
        alone_s = each.left_tokens * (times.step_s + times.running_s * load.beside)
        # Prompts that wait are certain; how many will come is told by those that came.
        base_s = alone_s + max(times.prompt_token_s * queued_tokens, alone_s * share / (1.0 - share))
        extra_s = times.prompt_token_s * tokens * min(steps, max(0, each.left_tokens - ahead)) / steps
        if not load.decodes_apart:
            extra_s += times.running_s * min(work.output_tokens, max(0, each.left_tokens - ahead - steps))
        add(each, base_s, extra_s)
    step_s = _step_s(times, load.running, load.prompt_share)
    for each in load.decode_neighbours:
        add(each, each.left_tokens * step_s, times.running_s * min(each.left_tokens, work.output_tokens))
    return added


def waiting_behind(times: StepTimes, load: PathLoad, factor: float) -> float:
    """How many later prompts are late for each that is late already.

    Where a queue is as long as the objective, a prompt more makes that last longer by what it takes over the rest of the engine's
    time that is left to catch up: of the prompts that come meanwhile, busy / (1 - busy) find it too long.
    """
    step_s = times.step_s + times.running_s * load.beside
    step_share = step_s / (times.prompt_token_s * times.chunk_tokens) if times.chunk_tokens and times.prompt_token_s else 0.0
    busy = min(BUSIEST_QUEUE, load.beside_share * (1.0 + step_share) * factor)
    return busy / (1.0 - busy)


def _step_s(times: StepTimes, running: int, prompt_share: float) -> float:
    alone_s = times.step_s + times.running_s * running
    step_s = alone_s / (1.0 - min(prompt_share, BUSIEST))
    # However many prompts wait, a step holds a chunk of them and no more.
    return min(step_s, alone_s + times.prompt_token_s * times.chunk_tokens) if times.chunk_tokens else step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """`hysteresis`: how much less of the objective the other path must use before a kind of requests changes over, where both add
    as few misses. `explore_share` goes the other way. `learning_rate`: the weight of one request in a path's correction; one that
    is seldom taken catches up on the decisions it was not part of, with at most `rare_rate`. `decisions` are remembered."""

    hysteresis: float = 0.1
    explore_share: float = 0.02
    learning_rate: float = 0.02
    rare_rate: float = 0.2
    decisions: int = 4096


class Misses(NamedTuple):
    """What a choice is expected to add: the request's own miss, and those of its neighbours and of requests behind it."""

    own: float
    others: float


@dataclass(slots=True, kw_only=True)
class Decision:
    """One choice with everything it came from. `why`: "predicted", "held" (by hysteresis), "explored", "only_path".

    `predicted` is corrected by what was measured on each path until then. `solo_role`: the label of the worker that a whole
    request is meant for.
    """

    request_id: str = ""
    path: str
    why: str
    work: Work
    objective: Objective
    loads: Mapping[str, PathLoad]
    predicted: Mapping[str, Times]
    misses: Mapping[str, Misses]
    solo_role: Role | None = None
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
    """Of one path: measured over predicted, as logarithms that follow slowly, and the squares of what they are off by."""

    ttft: float = 0.0
    tpot: float = 0.0
    ttft_square: float = FIRST_SPREAD**2
    tpot_square: float = FIRST_SPREAD**2
    seen: int = 0
    told_at: int = 0
    """How many decisions of any path there had been when it was last told."""

    def spreads(self) -> tuple[float, float]:
        """Of TTFT and TPOT."""
        return max(LEAST_SPREAD, math.sqrt(self.ttft_square)), max(LEAST_SPREAD, math.sqrt(self.tpot_square))

    def learn(self, ttft: float, tpot: float, rate: float) -> None:
        """These logarithms, with this weight."""
        # A few errors say little of how much they scatter.
        wide = min(rate, 1.0 / FIRST_SEEN)
        self.ttft_square += wide * ((ttft - self.ttft) ** 2 - self.ttft_square) if self.seen > 1 else 0.0
        self.tpot_square += wide * ((tpot - self.tpot) ** 2 - self.tpot_square) if self.seen > 1 else 0.0
        self.ttft += rate * (ttft - self.ttft)
        self.tpot += rate * (tpot - self.tpot)


@dataclass(slots=True)
class AutoPath:
    """Decides, and learns from what came of it. `times` are the calibration of each path that can be taken."""

    times: Mapping[str, StepTimes]
    settings: AutoSettings = field(default_factory=AutoSettings)
    log: deque[Decision] = field(init=False)
    decided: int = field(init=False, default=0)
    _corrections: dict[str, _Correction] = field(init=False)
    _put_off: int = field(init=False, default=0)
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

    def best_of(self, path: str, loads: Sequence[PathLoad], work: Work, objective: Objective) -> int:
        """Which of several places on one path, as an index of `loads`, the one that is preferred first: that one where it is as
        good as any, else the one that adds the fewest misses."""
        added = [sum(self._misses(path, load, work, self.predicted(path, load, work), objective)) for load in loads]
        return 0 if added[0] <= min(added) + TIE else added.index(min(added))

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

        `loads` has the paths that can be taken now, one at least. `draw` is uniform in [0, 1): below `explore_share` a request is
        to go the other way: this one, or a later one for which that adds less than `EXPLORE_MISSES`. `hint` is what is known of
        such requests beforehand: where requests of a kind begin.
        """

        def decided(path: str, why: str) -> Decision:
            made = Decision(
                path=path,
                why=why,
                work=work,
                objective=objective,
                loads={path: load.alone() for path, load in loads.items()},
                predicted=predicted,
                misses=misses,
                request_id=request_id,
            )
            self.log.append(made)
            self.decided += 1
            return made

        predicted = {path: self.predicted(path, load, work) for path, load in loads.items()}
        misses = {path: self._misses(path, loads[path], work, times, objective) for path, times in predicted.items()}
        added = {path: sum(each) for path, each in misses.items()}
        used = {path: times.against(objective) for path, times in predicted.items()}
        as_good = [path for path in added if added[path] <= min(added.values()) + TIE]
        best = min(as_good, key=lambda path: used[path])
        why = PREDICTED
        if len(added) == 1:
            return decided(best, ONLY_PATH)
        kind = (work.prompt_tokens.bit_length(), work.output_tokens.bit_length())
        held = self._held.get(kind, hint)
        if held in as_good and held != best and used[best] * (1.0 + self.settings.hysteresis) > used[held]:
            best, why = held, HELD
        self._held[kind] = best
        self._put_off += draw < self.settings.explore_share
        other = min((path for path in added if path != best), key=lambda path: added[path])
        if self._put_off and (added[other] - added[best] <= EXPLORE_MISSES or self._put_off > PUT_OFF):
            # Where it always costs much, it is made once in a while and not made up for.
            self._put_off = 0 if self._put_off > PUT_OFF else self._put_off - 1
            best, why = other, EXPLORED
        return decided(best, why)

    def _misses(self, path: str, load: PathLoad, work: Work, times: Times, objective: Objective) -> Misses:
        correction, calibrated = self._corrections[path], self.times[path]
        ttft_spread, tpot_spread = correction.spreads()
        late = miss_chance(times.ttft_s, objective.ttft_s, ttft_spread)
        slow = miss_chance(times.tpot_s, objective.tpot_s, tpot_spread)
        others = late * waiting_behind(calibrated, load, math.exp(correction.ttft))
        others += NEIGHBOUR_WEIGHT * disturbed(calibrated, load, work, math.exp(correction.tpot), tpot_spread)
        return Misses(1.0 - (1.0 - late) * (1.0 - slow), others)

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
        correction.learn(ttft, tpot, rate)

    def lost(self) -> list[Decision]:
        """The remembered decisions that lost, the worst first."""
        return sorted((d for d in self.log if d.lost_by() > 0), key=lambda d: -d.lost_by())
