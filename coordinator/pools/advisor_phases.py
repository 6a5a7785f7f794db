"""What each phase does now, and the share of its requests that would keep their goals with another number of workers. Pure.

Three bases. `model`: calibrated step times, a queue before prompts and a batch that answers share. `capacity`: work piles up, or
has before, so what was completed then is what the workers can do. `latency`: what was measured, times the old number of workers
over the new one; a bound that is too low for more workers, whose queues fall faster than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.gateway.latencies import Counts, added, median_s, share_within
from coordinator.pools.autoscale_gain import MIN_LATENCIES
from coordinator.pools.autoscale_signals import Sample, observe
from coordinator.routing.auto import COLOCATED, SPLIT, Objective, StepTimes
from coordinator.routing.views import Role

BUSIEST = 0.98
"""A queue that grows is late as one this busy, and what is beyond it is late altogether."""
_KEEPS_UP = 0.9
"""Of the answers that begin: where fewer end, they pile up."""
_WAITING = 2.0
"""Prompts for each worker, awaited at every look: one of them waits for its turn, so the workers never were idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What one worker of a phase can do, seconds; None before it was seen. `prompt_token_s`: a prompt token, when prompts waited
    all the time. `running_s`: an output token, when more answers began than ended; `step_s`: between the tokens of an answer,
    when it was quickest."""

    prompt_token_s: float | None = None
    running_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """All workers of one role over the window. `queued_tokens` is the least that was awaited at any look, the other levels are
    means; `kv_used` is the sum of the workers' shares. `known`: what it was seen to do when it was busy."""

    role: Role
    workers: int
    span_s: float = 0.0
    legs_per_s: float = 0.0
    ttft: Counts = field(default_factory=dict)
    tpot: Counts = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    queued_tokens: float = 0.0
    kv_used: float = 0.0
    batch: float = 0.0
    known: Known = Known()
    gaps: tuple[str, ...] = ()

    @property
    def prompts(self) -> int:
        """Choices whose first token came, or never will."""
        return sum(self.ttft.values())

    @property
    def mean_prompt_tokens(self) -> float:
        """0 where none ended."""
        return self.prompt_tokens / self.prompts if self.prompts else 0.0

    @property
    def mean_output_tokens(self) -> float:
        """0 where none ended."""
        answers = sum(self.tpot.values())
        return self.output_tokens / answers if answers else 0.0

    @property
    def measured(self) -> bool:
        """Enough ended to speak of a share."""
        return max(self.prompts, sum(self.tpot.values())) >= MIN_LATENCIES

    @property
    def busy_token_s(self) -> float | None:
        """What a prompt token takes one worker, where prompts wait all the time; else nobody knows how long it works."""
        awaited = _WAITING * self.workers * self.mean_prompt_tokens
        if self.prompts < MIN_LATENCIES or not self.prompt_tokens or self.queued_tokens <= awaited:
            return None
        return self.workers * self.span_s / self.prompt_tokens

    @property
    def prompt_s(self) -> float | None:
        """The same of a prompt as long as those that come; None where neither now nor before all workers were busy."""
        token_s = self.busy_token_s or self.known.prompt_token_s
        return token_s * self.mean_prompt_tokens if token_s and self.prompts else None

    @property
    def busy_running_s(self) -> float | None:
        """What an output token takes one worker, where more answers begin than end; else nobody knows how long it works."""
        answers = sum(self.tpot.values())
        if self.role is Role.PREFILL or answers < MIN_LATENCIES or not self.output_tokens:
            return None
        return self.workers * self.span_s / self.output_tokens if answers < _KEEPS_UP * self.legs_per_s * self.span_s else None

    def learned(self) -> Known:
        """`known`, and what this window says."""
        tpot_s = median_s(self.tpot) if sum(self.tpot.values()) >= MIN_LATENCIES else None
        return Known(
            prompt_token_s=self.busy_token_s or self.known.prompt_token_s,
            # An answer takes a while, so a load that has just begun looks as if it were too much: the quickest is the truest.
            running_s=_least(self.busy_running_s, self.known.running_s),
            step_s=_least(tpot_s, self.known.step_s),
        )

    def kept(self, goal: Objective) -> float:
        """The share that kept its goals, as measured. TTFT and TPOT of a request are taken to be independent of each other."""
        return share_within(self.ttft, goal.ttft_s) * share_within(self.tpot, goal.tpot_s)


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def phase_of(role: Role, pools: Iterable[Sequence[Sample]], now_s: float, *, period_s: float, interval_s: float) -> Phase:
    """`pools` are the samples of every pool of that role; `now_s` is on their clock."""
    seen = [(samples, observe(samples, now_s, period_s=period_s, interval_s=interval_s, aggregation="mean")) for samples in pools]
    recent = [[s for s in samples if s.at_s > now_s - period_s + 1e-9] for samples, _ in seen]
    return Phase(
        role=role,
        workers=sum(o.ready for _, o in seen),
        span_s=max((o.span_s for _, o in seen), default=0.0),
        legs_per_s=sum(o.legs_per_s for _, o in seen),
        ttft=added(o.ttft for _, o in seen),
        tpot=added(o.tpot for _, o in seen),
        prompt_tokens=sum(s.prompt_tokens for samples in recent for s in samples),
        output_tokens=sum(s.output_tokens for samples in recent for s in samples),
        queued_tokens=sum(min((s.queued_tokens for s in samples), default=0) for samples in recent),
        kv_used=sum(o.loads["target_kv_usage"] for _, o in seen),
        batch=sum(o.loads["target_decode_batch"] for _, o in seen),
        gaps=tuple(dict.fromkeys(gap for _, o in seen for gap in o.gaps)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What comes, all paths together: choices/s, of `split_per_s` on the split path, and their mean tokens."""

    rate_per_s: float
    split_per_s: float
    prompt_tokens: float
    output_tokens: float

    def differs(self, other: Load, share: float) -> str:
        """By what the two differ by more than `share`; "" when they can be compared."""
        for name in ("rate_per_s", "prompt_tokens", "output_tokens"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if abs(mine - theirs) > share * max(mine, theirs):
                return f"{name} was {theirs:.3g} and is {mine:.3g}"
        return ""


def load_of(phases: Mapping[Role, Phase]) -> Load:
    """Retries count as what they are: one more leg."""
    prefill, both = phases[Role.PREFILL], phases[Role.COLOCATED]
    rate = prefill.legs_per_s + both.legs_per_s
    prompts = sum(p.prompts for p in phases.values())
    answers = sum(sum(p.tpot.values()) for p in phases.values())
    return Load(
        rate_per_s=rate,
        split_per_s=prefill.legs_per_s,
        prompt_tokens=sum(p.prompt_tokens for p in phases.values()) / prompts if prompts else 0.0,
        output_tokens=sum(p.output_tokens for p in phases.values()) / answers if answers else 0.0,
    )


def in_time(rate_per_s: float, workers: int, prompt_s: float, goal_s: float) -> float:
    """The share of prompts whose first token comes within `goal_s`: each of `workers` computes its part of them one after the
    other in `prompt_s`, and they come independently of each other. A router that looks at queues does better."""
    if not workers:
        return 0.0
    if goal_s <= prompt_s:
        return 0.0
    load = rate_per_s * prompt_s / workers
    busy = min(load, BUSIEST)
    late = busy * math.exp(-2 * (1 - busy) * (goal_s - prompt_s) / prompt_s) if busy else 0.0
    return (1 - late) * (busy / load if load else 1.0)


def fluent(times: StepTimes, sequences_per_s: float, load: Load, *, prompt_share: float, goal_s: float, handover: bool) -> float:
    """The share of answers that keep `goal_s` between tokens on one worker that begins `sequences_per_s` of them; prompts take
    `prompt_share` of its time."""
    answer = max(1.0, load.output_tokens - 1)
    extra_s = (times.handover_s + times.handover_token_s * load.prompt_tokens) / answer if handover else 0.0
    step_s, running_s = times.step_s / (1 - prompt_share), times.running_s / (1 - prompt_share)
    # Each sequence lengthens the step in which all of them go on: running = rate * answer * (step + running_s * running).
    grows = min(BUSIEST, sequences_per_s * answer * running_s)
    running = sequences_per_s * answer * step_s / (1 - grows)
    if goal_s <= step_s + extra_s:
        return 0.0
    if not running or not running_s:
        return 1.0
    room = (goal_s - step_s - extra_s) / running_s
    # Sequences that run at a moment vary as independent arrivals do.
    return 0.5 * (1 + math.erf((room - running) / math.sqrt(2 * running)))


def by_model(role: Role, times: Mapping[str, StepTimes], rate_per_s: float, workers: int, load: Load, goal: Objective) -> float:
    """The share of `rate_per_s` that `workers` of `role` serve within the goals of their phase."""
    if not workers:
        return 0.0
    path = times[COLOCATED if role is Role.COLOCATED else SPLIT]
    prompt_s = path.first_token_s + path.prompt_token_s * load.prompt_tokens
    each = rate_per_s / workers
    if role is Role.PREFILL:
        return in_time(rate_per_s, workers, prompt_s, goal.ttft_s)
    if role is Role.DECODE:
        return fluent(path, each, load, prompt_share=0.0, goal_s=goal.tpot_s, handover=True)
    share = min(BUSIEST, each * prompt_s)
    tpot = fluent(path, each, load, prompt_share=share, goal_s=goal.tpot_s, handover=False)
    return in_time(rate_per_s, workers, prompt_s, goal.ttft_s) * tpot


def by_measurement(phase: Phase, workers: int, goal: Objective) -> tuple[float, str]:
    """The share that the phase would keep with `workers` instead of its own, and the basis of that."""
    if not workers or not phase.workers:
        return (0.0 if phase.legs_per_s else 1.0), "latency"
    ratio = workers / phase.workers
    room = min(1.0, workers / phase.kv_used) if phase.kv_used and ratio < 1 else 1.0
    tpot = share_within(phase.tpot, goal.tpot_s * ratio) * room
    basis = "latency"
    known = phase.known
    if ratio > 1 and known.running_s is not None and known.step_s is not None:
        load = Load(rate_per_s=0.0, split_per_s=0.0, prompt_tokens=0.0, output_tokens=phase.mean_output_tokens)
        times = StepTimes(first_token_s=0.0, prompt_token_s=0.0, step_s=known.step_s, running_s=known.running_s)
        each = phase.legs_per_s / workers
        capacity = fluent(times, each, load, prompt_share=0.0, goal_s=goal.tpot_s, handover=False)
        tpot, basis = max(tpot, capacity), "capacity"
    ttft = share_within(phase.ttft, goal.ttft_s * ratio)
    prompt_s = phase.prompt_s
    if ratio < 1 and prompt_s is None and phase.prompts:
        # Half of the prompts took no longer, their waiting included: the workers that are left may not be able to do it at all.
        prompt_s = median_s(phase.ttft)
    if prompt_s is not None and ratio != 1:
        capacity = in_time(phase.legs_per_s, workers, prompt_s, goal.ttft_s)
        ttft, basis = (max if ratio > 1 else min)(ttft, capacity), "capacity"
    return ttft * tpot, basis
