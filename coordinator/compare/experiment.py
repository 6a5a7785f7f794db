"""What a full comparison is: arms, workload, objective and sizes, fixed in one TOML before anything is measured.

`read` is the thin shell (files); everything else is pure.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator

from coordinator.compare.faults import MIN_TRIED
from coordinator.compare.load import ArmTarget
from coordinator.compare.slo import SloError, parse
from coordinator.compare.verdict import MARGIN, MIN_SEEDS
from coordinator.routing.auto import AUTO

APPLIED = frozenset({"role", "replicas", "engine"})
"""What a pool that is put in place may say."""
SPARE_SEEDS_SHARE = 0.25
"""Of the last look's seeds, so many more may be measured where some gave no ratio."""
MIN_JUDGED = 20
"""Of one probe."""


class ExperimentError(ValueError):
    """The file is no experiment; one line per fault, each naming its field."""


class Candidate(BaseModel):
    """One configuration of an arm. With `apply` the coordinator is asked for exactly these pools before it is measured; without,
    its pools stand beside those of the other arms, on the same accelerators."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pools: tuple[str, ...] = Field((), description="The only pools that serve it; none: all of the system.")
    apply: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Pools as in the configuration's [pools.*].")

    @model_validator(mode="after")
    def _served(self) -> Candidate:
        for name, pool in self.apply.items():
            if unknown := sorted(set(pool) - APPLIED):
                raise ValueError(f"apply.{name}: {', '.join(unknown)} not among {', '.join(sorted(APPLIED))}")
        if self.apply and self.pools and not set(self.pools) <= set(self.apply):
            raise ValueError(f"pools {sorted(set(self.pools) - set(self.apply))} are not among those applied")
        return self

    @property
    def served_by(self) -> tuple[str, ...]:
        """The pools that its requests name."""
        return self.pools or tuple(self.apply)


class Arm(BaseModel):
    """One side of the comparison, in one or several configurations. The best on the tuning seeds is the one compared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Literal["split", "colocated", "auto"] = Field(
        description="auto: as the gateway chooses, told the objective that the comparison judges by."
    )
    transport: str = Field("", description="Of the KV, on the split path; empty: as the workers agree.")
    candidates: dict[str, Candidate] = Field(min_length=1, description="By name.")

    def target(self, candidate: str) -> ArmTarget:
        """How its requests are marked."""
        return ArmTarget(self.path, self.candidates[candidate].served_by, self.transport)


class Experiment(BaseModel):
    """The whole plan. Everything here is fixed beforehand; what is found on the way is in the record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: Path = Field(description="TOML of a workload, relative to this file's folder.")
    arms: dict[str, Arm] = Field(min_length=2, description="By name, the baseline first.")
    slo: str = Field("", description="Such as ttft=500ms,tpot=2.5x; a multiple is of the baseline's unloaded median.")
    margin: float = Field(MARGIN, gt=0, lt=1, description="Smaller differences do not matter.")
    requests: PositiveInt = Field(1000, ge=20, description="Of one probe, those at its ends included.")
    edge_e2es: float = Field(
        1.3, ge=0, le=5, description="So many unloaded request times at both ends of a probe are not judged."
    )
    load_spans: float = Field(
        3.0, ge=0, le=20, description="A probe lasts so many times as long as the objective allows its requests on average."
    )
    rates: int = Field(4, ge=2, le=9, description="Rates around the knees, the same for every arm.")
    spread: float = Field(1.25, gt=1, le=3, description="The outer rates lie this factor beyond the lowest and highest knee.")
    looks: tuple[int, ...] = Field((5,), min_length=1, description="Rising numbers of seeds at which it is judged.")
    tuning_seeds: PositiveInt = Field(2, description="On which an arm's candidates are tried; one alone may choose by luck.")
    search_steps: int = Field(8, ge=2, le=20, description="At most so many rates are tried to find a knee, factors of 1.5 apart.")
    start_rate_per_s: PositiveFloat | None = Field(None, description="Where the search begins. None: from the unloaded times.")
    unloaded_requests: int = Field(4, ge=2, le=100, description="Of each arm, one at a time; multiples rest on them.")
    deadline_s: PositiveFloat = Field(120.0, description="Of one request.")
    reset_caches: bool = Field(False, description="Empty all prefix caches before each probe; salts keep them apart without.")
    parity_requests: int = Field(
        0, ge=0, le=100, description="Sent one at a time through every arm after each seed, and compared."
    )
    quality: bool = Field(False, description="Ask the fixed question set through every arm: for arms that change numerics.")
    first_seed: PositiveInt = 1

    @field_validator("slo")
    @classmethod
    def _objective(cls, text: str) -> str:
        if text:
            try:
                parse(text)
            except SloError as error:
                raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _sizes(self) -> Experiment:
        if self.looks[0] < MIN_SEEDS or any(b <= a for a, b in itertools.pairwise(self.looks)):
            raise ValueError(f"looks must be rising numbers of seeds from {MIN_SEEDS} up, got {list(self.looks)}")
        if len({bool(candidate.apply) for arm in self.arms.values() for candidate in arm.candidates.values()}) > 1:
            raise ValueError("apply: either every candidate brings its pools or none; those that stand would be taken away")
        if (self.quality or self.parity_requests) and any(arm.path == AUTO for arm in self.arms.values()):
            raise ValueError("quality and parity_requests are asked of fixed paths: an arm of path auto takes either")
        return self

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    @property
    def challengers(self) -> tuple[str, ...]:
        return tuple(self.arms)[1:]

    @property
    def takes_turns(self) -> bool:
        """Some candidate has pools of its own to be applied: then arms change as seldom as the order allows."""
        return any(candidate.apply for arm in self.arms.values() for candidate in arm.candidates.values())

    @property
    def seeds(self) -> int:
        """The most that are measured: those of the last look, and some in place of such that give no ratio."""
        return self.looks[-1] + math.ceil(self.looks[-1] * SPARE_SEEDS_SHARE)

    @property
    def is_tuned(self) -> bool:
        """Every arm has enough candidates for a choice among them to be called tuning."""
        return all(len(arm.candidates) >= MIN_TRIED for arm in self.arms.values())

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


NOT_COMPARED = frozenset({"workload", "first_seed", "parity_requests", "quality"})
"""Of two plans of one experiment: the workload by its content, the others may differ."""


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields in which a recorded plan is another than this one, each in words."""
    found = []
    for name in sorted((set(before) | set(now)) - NOT_COMPARED):
        if name not in before:
            found.append(f"{name} was not known when it was made")
        elif name not in now:
            found.append(f"{name} is no longer known")
        elif before[name] != now[name]:
            found.append(f"{name} differs" if isinstance(now[name], dict) else f"{name} was {before[name]}, is {now[name]}")
    return found


def digest(experiment: Mapping[str, Any], source: Mapping[str, Any], file_sha256: str = "") -> str:
    """SHA-256 of what runs of one experiment have in common. First seeds, and what is checked beside speed, may differ.

    `file_sha256` is of the trace or prompts that the workload's `source` names, "" where it names none.
    """
    kept = {key: value for key, value in experiment.items() if key not in NOT_COMPARED}
    found = [kept, source, *([file_sha256] if file_sha256 else [])]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> Experiment:
    """The experiment in a TOML file. Raises `ExperimentError`."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path}: not TOML: {error}") from error
    return check(found)


def check(found: Mapping[str, Any]) -> Experiment:
    """The experiment of a mapping. Raises `ExperimentError`."""
    try:
        return Experiment.model_validate(found)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            where = ".".join(map(str, fault["loc"])) or "experiment"
            given = "" if fault["type"] in ("missing", "value_error") else f", got {fault['input']!r}"
            lines.append(f"{where}: {fault['msg'].removeprefix('Value error, ')}{given}")
        raise ExperimentError("\n".join(lines)) from error
