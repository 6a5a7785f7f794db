"""The desired set of pools at one version, and what may become of it. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from coordinator.config import PoolSettings, Settings
from coordinator.config_layers import ConfigError
from coordinator.pools.records import PoolTarget
from coordinator.routing.views import Role
from engine.config import EngineSettings
from protos.errors import Code, SplitpointError, invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """`settings` are the run's with these pools. `budget_ranks`: see `assign`. `asked_unavailable` is the share that the change
    to these pools was asked with; None: the configured one."""

    version: int
    settings: Settings
    targets: tuple[PoolTarget, ...]
    budget_ranks: int
    asked_unavailable: float | None = None

    @property
    def max_unavailable(self) -> float:
        """See `assign`."""
        asked = self.asked_unavailable
        return self.settings.coordinator.max_unavailable if asked is None else asked

    @property
    def ranks(self) -> int:
        """Accelerators of all its workers and spares."""
        return sum(t.workers * t.ranks for t in self.targets)

    def target(self, pool: str) -> PoolTarget | None:
        """None: no such pool."""
        return next((t for t in self.targets if t.name == pool), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How a change replaces workers. `max_unavailable`: see `assign`; None: as configured. `surge`: none is away, and successors
    start beside, on the accelerators of one worker more."""

    max_unavailable: float | None = None
    surge: bool = False


def engine_key(engine: EngineSettings) -> str:
    """Equal for engines that are started with the same arguments: the workers may change roles with each other."""
    # The order in which arguments were written is no argument.
    text = json.dumps(engine.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def desired(
    run: Settings,
    pools: Mapping[str, PoolSettings],
    *,
    version: int,
    budget_ranks: int,
    asked_unavailable: float | None = None,
) -> Desired:
    """`run` is what the system was started with.

    Raises:
        ConfigError: the pools are refused.
    """
    settings = run.with_pools(pools)
    targets = []
    for name, pool in pools.items():
        engine = settings.engine_of(name)
        targets.append(
            PoolTarget(
                name=name,
                role=pool.role,
                replicas=pool.replicas,
                engine=engine_key(engine),
                ranks=engine.world_size,
                start_timeout_s=engine.start_timeout_s,
                spares=pool.spares,
                spare_kind=pool.spare_kind,
            )
        )
    return Desired(
        version=version,
        settings=settings,
        targets=tuple(targets),
        budget_ranks=budget_ranks,
        asked_unavailable=asked_unavailable,
    )


def changed(
    run: Settings,
    present: Desired,
    pools: Mapping[str, PoolSettings],
    *,
    expected: int | None,
    whole_roles: frozenset[Role],
    replacing: bool = False,
    strategy: Strategy | None = None,
) -> Desired:
    """What `present` becomes when `pools` replace its own; its version is still that of `present`. `expected` is the version
    that the caller has seen, `whole_roles` are offered whole requests. `replacing`: the change to `present` is not over, so
    what could be held for it still can, and what it was asked with holds unless `strategy` says otherwise.

    Raises:
        SplitpointError: `CONFLICT` another version, or nobody would be left to serve a request; `INVALID_VALUE` names what
            is wrong with the pools.
    """
    check_version(present, expected)
    try:
        new = desired(run, pools, version=present.version, budget_ranks=0)
    except (ConfigError, ValidationError) as error:
        raise invalid("pools", str(error)) from error
    limit_tokens = min(run.engine_of(name).max_model_len for name in run.pools)
    for name in pools:
        own_tokens = new.settings.engine_of(name).max_model_len
        if own_tokens < limit_tokens:
            # Gateways admit prompts by what the system was started with.
            problem = f"is {own_tokens}, below the {limit_tokens} tokens that clients were promised"
            raise invalid("pools", f"pools.{name}.engine.max_model_len {problem}")
    roles = {t.role for t in new.targets if t.replicas}
    if not (roles & whole_roles or {Role.PREFILL, Role.DECODE} <= roles):
        message = "nobody would be left to serve a request: neither a pool that is offered whole ones nor a pair of phases"
        raise SplitpointError(Code.CONFLICT, message, param="pools")
    budget_ranks = max(present.ranks, new.ranks)
    if strategy is None:
        asked = present.asked_unavailable if replacing else None
    elif strategy.surge:
        before = {target.name: target.engine for target in present.targets}
        budget_ranks += max((t.ranks for t in new.targets if t.replicas and before.get(t.name) != t.engine), default=0)
        asked = 0.0
    else:
        asked = strategy.max_unavailable
    return replace(new, budget_ranks=max(budget_ranks, present.budget_ranks if replacing else 0), asked_unavailable=asked)


def check_version(present: Desired, expected: int | None) -> None:
    """Raises `SplitpointError(CONFLICT)` when `expected` is another version than the present one."""
    if expected is not None and expected != present.version:
        message = f"the desired pools are at version {present.version}, not {expected}: look again and repeat"
        raise SplitpointError(Code.CONFLICT, message, param="expected_version")
