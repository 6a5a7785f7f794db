"""How many replicas, accelerators and servers an expected load takes. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.planning.values import RefusedValueError, at_least, positive, share

MIX_TOLERANCE = 0.1
"""Two length mixes are the same when mean input and mean output differ by at most this share."""
MIN_SEEDS = 3
MAX_REPLICAS = 1_000_000
"""Beyond this a value was mistyped."""
ARMS = ("split", "colocated")
"""Of a record that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """Mean prompt and output length of a load, tokens."""

    input_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        at_least("--input-tokens", self.input_tokens, 1)
        at_least("--output-tokens", self.output_tokens, 1)

    def differs_from(self, other: LengthMix) -> bool:
        """By more than `MIX_TOLERANCE` in either length."""
        pairs = ((self.input_tokens, other.input_tokens), (self.output_tokens, other.output_tokens))
        return any(abs(a - b) > MIX_TOLERANCE * b for a, b in pairs)

    def __str__(self) -> str:
        return f"{self.input_tokens:.5g} in / {self.output_tokens:.5g} out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One arm's goodput from a record: requests/s of the whole measured system, within its SLO, at its length mix."""

    arm: str
    rate_per_s: float
    lowest_per_s: float
    highest_per_s: float
    seeds: int
    slo: str
    mix: LengthMix


class OtherMixError(ValueError):
    """The record was measured at another length mix: its rate says nothing about this load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Replicas carry the load at `headroom` of their rate; spares stand by. `load_share` is of all replicas, spares included.

    `measured` is None for a rate given by hand. `notes` says what the plan rests on.
    """

    rate_per_s: float
    replica_rate_per_s: float
    headroom: float
    replicas: int
    spares: int
    total_replicas: int
    accelerators_per_replica: int
    accelerators: int
    accelerators_per_server: int
    servers: int
    idle_accelerators: int
    load_share: float
    load_share_one_lost: float | None
    measured: Measured | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)


def plan_capacity(
    *,
    rate_per_s: float,
    replica_rate_per_s: float,
    headroom: float = 0.7,
    spares: int = 0,
    accelerators_per_replica: int = 1,
    accelerators_per_server: int = 8,
    measured: Measured | None = None,
    notes: tuple[str, ...] = (),
) -> CapacityPlan:
    """Replicas = ceil(rate / (replica rate x headroom)), plus spares. A replica of several servers takes whole ones.

    Raises:
        RefusedValueError: a value outside its limits.
    """
    positive("--rate", rate_per_s)
    positive("--replica-rate", replica_rate_per_s)
    share("--headroom", headroom)
    at_least("--spares", spares, 0)
    at_least("--accelerators-per-replica", accelerators_per_replica, 1)
    at_least("--accelerators-per-server", accelerators_per_server, 1)
    if rate_per_s > MAX_REPLICAS * replica_rate_per_s * headroom:
        raise RefusedValueError("--rate", f"would take more than {MAX_REPLICAS:,} replicas of {replica_rate_per_s:g} requests/s")
    # A hair of rounding must not buy a replica: 5.6 / (8 x 0.7) is one.
    replicas = max(1, math.ceil(rate_per_s / (replica_rate_per_s * headroom) - 1e-9))
    total = replicas + spares
    servers = _servers(total, accelerators_per_replica, accelerators_per_server)
    accelerators = total * accelerators_per_replica
    more = []
    if spares == 0:
        more.append("no spare: one lost replica raises the load of the others")
    if accelerators_per_replica > accelerators_per_server and accelerators_per_replica % accelerators_per_server:
        more.append("a replica fills its last server only in part; the rest is counted as idle")
    more.append("rates per replica add up only where replicas are independent; a shared gateway or link is not in this plan")
    return CapacityPlan(
        rate_per_s=rate_per_s,
        replica_rate_per_s=replica_rate_per_s,
        headroom=headroom,
        replicas=replicas,
        spares=spares,
        total_replicas=total,
        accelerators_per_replica=accelerators_per_replica,
        accelerators=accelerators,
        accelerators_per_server=accelerators_per_server,
        servers=servers,
        idle_accelerators=servers * accelerators_per_server - accelerators,
        load_share=rate_per_s / (total * replica_rate_per_s),
        load_share_one_lost=rate_per_s / ((total - 1) * replica_rate_per_s) if total > 1 else None,
        measured=measured,
        notes=(*notes, *more),
    )


def measured_rate(record: Mapping[str, Any], arm: str) -> Measured:
    """One arm's goodput from a comparison record: the geometric mean of its seeds' knees.

    Raises:
        RefusedValueError: no such arm; no seed with a goodput; or the record lacks what a plan needs.
    """
    named = record.get("arms")
    arms = [each.get("name", "") for each in named if isinstance(each, Mapping)] if isinstance(named, list) and named else ARMS
    if arm not in arms:
        raise RefusedValueError("--arm", f"must be one of {', '.join(arms)}, got {arm!r}")
    try:
        knees = [entry[arm] for entry in record["knees"]]
        rates = [float(entry["rate_per_s"]) for entry in knees if entry["rate_per_s"] is not None]
        whys = sorted({entry["why"] for entry in knees if entry["rate_per_s"] is None})
        slo = _slo_text(record["slo"])
        mix = record_mix(record)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedValueError("--record", f"is no comparison record: {error!r}") from error
    if not rates:
        raise RefusedValueError("--record", f"has no goodput of {arm}: {'; '.join(whys) or 'no seeds'}")
    return Measured(
        arm=arm,
        rate_per_s=statistics.geometric_mean(rates),
        lowest_per_s=min(rates),
        highest_per_s=max(rates),
        seeds=len(rates),
        slo=slo,
        mix=mix,
    )


def record_mix(record: Mapping[str, Any]) -> LengthMix:
    """The mean lengths of a record's workload: as counted where it says so, else the middle of its uniform ranges.

    Raises `KeyError` or `TypeError` for a mapping that is no record.
    """
    if lengths := record.get("lengths"):
        return LengthMix(input_tokens=lengths["input"]["mean"], output_tokens=lengths["output"]["mean"])
    spec = record["workloads"][0]
    return LengthMix(input_tokens=statistics.fmean(spec["prompt_tokens"]), output_tokens=statistics.fmean(spec["output_tokens"]))


def check_mix(measured: Measured, expected: LengthMix, *, accept_other: bool) -> tuple[str, ...]:
    """Notes for the plan: none where the mixes agree.

    Raises:
        OtherMixError: they differ and `accept_other` is false.
    """
    if not expected.differs_from(measured.mix):
        return ()
    text = (
        f"measured at {measured.mix} tokens, expected are {expected}: "
        "another length mix, to which the measured rate does not apply"
    )
    if not accept_other:
        raise OtherMixError(text)
    return (f"accepted by --accept-other-mix: {text}",)


def seed_notes(measured: Measured) -> tuple[str, ...]:
    """What weakens a rate: few seeds, or seeds that lie apart."""
    notes = []
    if measured.seeds < MIN_SEEDS:
        seeds = f"{measured.seeds} seed{'' if measured.seeds == 1 else 's'}"
        notes.append(f"the rate rests on {seeds}; fewer than {MIN_SEEDS} never decide")
    if measured.highest_per_s > 1.1 * measured.lowest_per_s:
        notes.append(f"its seeds spread from {measured.lowest_per_s:.3g} to {measured.highest_per_s:.3g} requests/s")
    return tuple(notes)


def _servers(replicas: int, per_replica: int, per_server: int) -> int:
    if per_replica >= per_server:
        return replicas * math.ceil(per_replica / per_server)
    return math.ceil(replicas / (per_server // per_replica))


def _slo_text(slo: Mapping[str, Any]) -> str:
    grows = f" + {slo['ttft_s_per_token'] * 1e3:.3g} ms/token" if slo.get("ttft_s_per_token") else ""
    text = f"TTFT {slo['ttft_s'] * 1e3:.4g} ms{grows}, TPOT {slo['tpot_s'] * 1e3:.4g} ms"
    return text + (f", ITL p99 {slo['itl_p99_s'] * 1e3:.4g} ms" if slo.get("itl_p99_s") is not None else "")
