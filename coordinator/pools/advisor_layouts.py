"""Other numbers of workers for the pools there are, on the accelerators there are, and the goodput of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.pools.advisor_phases import Load, Phase, by_measurement, by_model
from coordinator.pools.assign import answers
from coordinator.routing.auto import Objective, StepTimes
from coordinator.routing.views import Role

PHASES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
_EIGHTHS = tuple(n / 8 for n in range(9))
_SPLIT_SHARES = tuple(n / 10 for n in range(11))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One pool as the advisor may change it: between `low` and `high` workers of `ranks` accelerators each. Workers whose
    `engine` is that of another pool can serve it as they run. `fixed` says whose its number is; "" when it may change."""

    name: str
    role: Role
    replicas: int
    ranks: int = 1
    engine: str = ""
    low: int = 0
    high: int = 4096
    fixed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What everything is decided from. `times`: calibrated step times by path, None
    without, for the reason `no_model`. `auto`: requests go where they are
    served best, so a path may end and another begin. Roles in `whole_roles` are offered whole requests."""

    pools: Sequence[Pool]
    phases: Mapping[Role, Phase]
    load: Load
    goal: Objective
    times: Mapping[str, StepTimes] | None = None
    no_model: str = ""
    auto: bool = False
    whole_roles: frozenset[Role] = frozenset({Role.COLOCATED})

    @property
    def counts(self) -> dict[str, int]:
        """Workers by pool."""
        return {pool.name: pool.replicas for pool in self.pools}

    def workers(self, counts: Mapping[str, int]) -> dict[Role, int]:
        """By role, of those that serve now and what `counts` change."""
        found = {role: self.phases[role].workers for role in PHASES}
        for pool in self.pools:
            found[pool.role] += counts[pool.name] - pool.replicas
        return {role: max(0, count) for role, count in found.items()}

    def mode(self, counts: Mapping[str, int]) -> str:
        """ "split", "colocated" or "mixed"."""
        roles = {pool.role for pool in self.pools if counts[pool.name]}
        if Role.COLOCATED not in roles:
            return "split"
        return "mixed" if roles & {Role.PREFILL, Role.DECODE} else "colocated"

    def relabels(self, counts: Mapping[str, int]) -> bool:
        """Every worker that moves finds a place in a pool of its own engine arguments."""
        moved: Counter[str] = Counter()
        for pool in self.pools:
            moved[pool.engine] += counts[pool.name] - pool.replicas
        return not any(change > 0 for change in moved.values())

    def fewer(self, counts: Mapping[str, int]) -> dict[str, int]:
        """While it changes: who goes has gone, who comes is not there yet."""
        return {pool.name: min(pool.replicas, counts[pool.name]) for pool in self.pools}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Choices/s within their goals, each phase's share of its own, and the share of the choices that take the split path."""

    goodput_per_s: float
    shares: Mapping[Role, float]
    bases: Mapping[Role, str]
    split_share: float


def measured(situation: Situation) -> Prediction:
    """What was."""
    shares = {role: phase.kept(situation.goal) for role, phase in situation.phases.items()}
    return _put(situation, shares, dict.fromkeys(shares, "measured"), _split_share(situation.load))


def predict(situation: Situation, counts: Mapping[str, int]) -> Prediction:
    """What would be with `counts` workers."""
    workers = situation.workers(counts)
    if situation.times is None:
        found = {role: by_measurement(situation.phases[role], workers[role], situation.goal) for role in PHASES}
        shares = {role: share for role, (share, _) in found.items()}
        return _put(situation, shares, {role: basis for role, (_, basis) in found.items()}, _split_share(situation.load))
    made = [_by_model(situation, situation.times, workers, share) for share in _split_shares(situation, workers)]
    # Requests that choose their path even out what they find on either; the best sum would starve one path to please the other.
    return max(made, key=lambda p: min(_paths(p)))


def _split_shares(situation: Situation, workers: Mapping[Role, int]) -> tuple[float, ...]:
    """Of the choices that may take the split path."""
    if not situation.auto:
        return (_split_share(situation.load),)
    if not (workers[Role.PREFILL] and workers[Role.DECODE]):
        return (0.0,)
    return _SPLIT_SHARES if workers[Role.COLOCATED] else (1.0,)


def _by_model(
    situation: Situation, times: Mapping[str, StepTimes], workers: Mapping[Role, int], split_share: float
) -> Prediction:
    split_per_s = situation.load.rate_per_s * split_share
    rates = {Role.PREFILL: split_per_s, Role.DECODE: split_per_s, Role.COLOCATED: situation.load.rate_per_s - split_per_s}
    shares = {role: by_model(role, times, rates[role], workers[role], situation.load, situation.goal) for role in PHASES}
    return _put(situation, shares, dict.fromkeys(shares, "model"), split_share)


def _paths(prediction: Prediction) -> list[float]:
    """The shares of the paths that are taken."""
    split = prediction.shares[Role.PREFILL] * prediction.shares[Role.DECODE]
    whole = prediction.shares[Role.COLOCATED]
    return [share for share, taken in ((split, prediction.split_share), (whole, 1 - prediction.split_share)) if taken]


def _put(situation: Situation, shares: Mapping[Role, float], bases: Mapping[Role, str], split_share: float) -> Prediction:
    both = split_share * shares[Role.PREFILL] * shares[Role.DECODE] + (1 - split_share) * shares[Role.COLOCATED]
    return Prediction(goodput_per_s=situation.load.rate_per_s * both, shares=shares, bases=bases, split_share=split_share)


def _split_share(load: Load) -> float:
    return load.split_per_s / load.rate_per_s if load.rate_per_s else 0.0


def layouts(situation: Situation) -> Iterator[dict[str, int]]:
    """Numbers of workers that may be had instead of the present ones: 1, 2, 4, ... workers of one pool to another of a different
    role, and, where requests follow, eighths of the accelerators for each path and phase. Each once."""
    seen = [situation.counts]
    for counts in (*_moves(situation), *(_modes(situation) if situation.auto and situation.times else ())):
        if counts not in seen and _serves(situation, counts):
            seen.append(counts)
            yield counts


def _moves(situation: Situation) -> Iterator[dict[str, int]]:
    free = [pool for pool in situation.pools if not pool.fixed]
    for giver in free:
        for taker in free:
            if giver.role is taker.role:
                continue
            # As many as make room for a whole worker of the other pool.
            given = -(-taker.ranks // giver.ranks)
            taken, times = given * giver.ranks // taker.ranks, 1
            while giver.replicas - times * given >= giver.low and taker.replicas + times * taken <= taker.high:
                moved = {giver.name: giver.replicas - times * given, taker.name: taker.replicas + times * taken}
                yield {**situation.counts, **moved}
                times *= 2


def _modes(situation: Situation) -> Iterator[dict[str, int]]:
    """Over the first pool of each role that may change; the others stay as they are."""
    free: dict[Role, Pool] = {}
    for pool in situation.pools:
        if not pool.fixed:
            free.setdefault(pool.role, pool)
    if len(free) < len(PHASES):
        return
    prefill, decode, both = (free[role] for role in PHASES)
    accelerators = sum(pool.replicas * pool.ranks for pool in free.values())
    for whole in _EIGHTHS:
        whole_workers = round(accelerators * whole / both.ranks)
        rest = accelerators - whole_workers * both.ranks
        for share in _EIGHTHS[1:-1]:
            prefill_workers = round(rest * share / prefill.ranks)
            decode_workers = (rest - prefill_workers * prefill.ranks) // decode.ranks
            counts = {both: whole_workers, prefill: prefill_workers, decode: decode_workers}
            if all(pool.low <= count <= pool.high for pool, count in counts.items()):
                yield {**situation.counts, **{pool.name: count for pool, count in counts.items()}}


def _serves(situation: Situation, counts: Mapping[str, int]) -> bool:
    """Nobody is left without a way: half a pair is none, and a phase keeps a worker unless its requests can go elsewhere."""
    workers = situation.workers(counts)
    roles = {role for role, count in workers.items() if count}
    if not answers(roles, situation.whole_roles):
        return False
    if situation.auto:
        return (Role.PREFILL in roles) == (Role.DECODE in roles)
    return all(workers[role] or not phase.workers for role, phase in situation.phases.items())
