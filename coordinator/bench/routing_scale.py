"""How long routing decisions, membership updates and reconcile passes take among many workers: the real code, no network.

A decision is everything between a tokenised prompt and a route: the hashes of its blocks, where the policy wants them, and the
choice. Wall time is what a request waits; CPU time is the same without what other processes of this machine took.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from coordinator.pools.reconcile import Actual, PoolTarget, Rules, WorkerRecord, reconcile
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import Goal, PairGoal, Refusal, SoloGoal, workers_of
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router
from coordinator.routing.views import Placement, Role, WorkerState, WorkerView
from protos.ids import Incarnation, WorkerId

PolicyName = Literal["prefix_aware", "session_affinity", "least_loaded", "power_of_two", "round_robin"]
POLICIES: tuple[str, ...] = get_args(PolicyName)
PASSES = 5
NODE_WORKERS = 8
"""Of each role on one node, and nodes in one rack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSpec:
    """`decisions` are shared by `gateways`, each with a router of its own; heartbeats reach them every `heartbeat_every`
    decisions. Prompts are `prompt_tokens` long: `shared_tokens` are the same in all of them, half of the rest in those of
    one of `conversations`. `NODE_WORKERS` of each role are on a node, and pairs are placed by `placement`."""

    workers: int = 1000
    gateways: int = 10
    decisions: int = 10_000
    heartbeat_every: int = 1000
    in_flight: int = 2000
    prompt_tokens: int = 2048
    shared_tokens: int = 512
    conversations: int = 500
    placement: Placement = Placement.ANY
    seed: int = 1


def measure(spec: ScaleSpec, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Every policy over the same prompts, then reconcile passes."""
    prompts = _prompts(spec)
    decisions = []
    for policy in POLICIES:
        for kind in ("pair", "solo"):
            say(f"{policy}, {kind}")
            decisions.append(_decisions(spec, policy, kind, prompts))
    say("reconcile")
    return {
        "kind": "bench-routing-scale",
        "spec": {name: getattr(spec, name) for name in ScaleSpec.__slots__},
        "decisions": decisions,
        "reconcile": _reconcile(spec.workers),
    }


def table(record: dict[str, Any]) -> str:
    """The record for people."""
    spec = record["spec"]
    lines = [
        f"{spec['workers']} workers, {spec['gateways']} gateways, {spec['decisions']} decisions, prompts of "
        f"{spec['prompt_tokens']} tokens, placement of pairs {spec['placement']}; ms",
        f"{'policy':<18}{'choice':<8}{'p50':>8}{'p99':>8}{'max':>8}{'CPU p50':>10}{'CPU p99':>9}{'update p50':>12}",
    ]
    for row in record["decisions"]:
        wall, cpu = row["wall_ms"], row["cpu_ms"]
        lines.append(
            f"{row['policy']:<18}{row['choice']:<8}{wall['p50']:>8.3f}{wall['p99']:>8.3f}{wall['max']:>8.2f}"
            f"{cpu['p50']:>10.3f}{cpu['p99']:>9.3f}{row['update_ms_p50']:>12.2f}"
        )
    lines.append(f"reconcile, one pass over {spec['workers']} workers; the slowest of {PASSES} passes, s")
    lines += [f"  {row['case']:<28}{row['worst_s']:>8.4f}  {row['actions']} actions" for row in record["reconcile"]]
    return "\n".join(lines)


def _prompts(spec: ScaleSpec) -> list[tuple[str, list[int]]]:
    generator = np.random.default_rng(spec.seed)
    shared = generator.integers(0, 50_000, spec.shared_tokens).tolist()
    own = spec.prompt_tokens - spec.shared_tokens
    histories = generator.integers(0, 50_000, (spec.conversations, own // 2)).tolist()
    prompts = []
    for _ in range(spec.decisions):
        which = int(generator.integers(spec.conversations))
        prompts.append((f"session-{which}", shared + histories[which] + generator.integers(0, 50_000, own - own // 2).tolist()))
    return prompts


def _decisions(spec: ScaleSpec, policy: str, kind: str, prompts: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
    settings = RoutingSettings.model_validate({"policy": policy, "placement": spec.placement})
    routers = [Router(settings, random.Random(spec.seed + i), transports=("ucx", "grpc")) for i in range(spec.gateways)]
    roles = (Role.PREFILL, Role.DECODE) if kind == "pair" else (Role.COLOCATED,)
    running = dict.fromkeys((f"w{i}" for i in range(spec.workers)), 0)
    open_legs: deque[tuple[Router, Ask, list[tuple[Incarnation, int]]]] = deque()
    wall_s, cpu_s, update_s = [], [], []
    for number, (session, ids) in enumerate(prompts):
        if number % spec.heartbeat_every == 0:
            views = [
                _view(name, roles[i % len(roles)], count, i // (NODE_WORKERS * len(roles)))
                for i, (name, count) in enumerate(running.items())
            ]
            for router in routers:
                begin_s = time.perf_counter()
                router.update(views)
                update_s.append(time.perf_counter() - begin_s)
        router = routers[number % len(routers)]
        goal: Goal = PairGoal(prompt_tokens=len(ids)) if kind == "pair" else SoloGoal()
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        ask = router.ask(ids, session)
        route = router.choose((goal,), number * 0.005, ask)
        wall_s.append(time.perf_counter() - begin_s)
        cpu_s.append(time.thread_time() - begin_cpu_s)
        if isinstance(route, Refusal):
            raise RuntimeError(f"no route among {spec.workers} workers: {route.message}")
        legs = [(view.incarnation, len(ids)) for view in workers_of(route)]
        for incarnation, tokens in legs:
            router.load.charge(incarnation, tokens)
            running[incarnation] += 1
        open_legs.append((router, ask, legs))
        if len(open_legs) > spec.in_flight:
            its_router, its_ask, ended = open_legs.popleft()
            its_router.prompt_computed(ended[0][0], its_ask, expected_cached_tokens=0, cached_tokens=0)
            for incarnation, tokens in ended:
                its_router.load.discharge(incarnation, tokens)
                running[incarnation] -= 1
    return {
        "policy": policy,
        "choice": kind,
        "wall_ms": _quantiles_ms(wall_s),
        "cpu_ms": _quantiles_ms(cpu_s),
        "update_ms_p50": float(np.median(update_s)) * 1e3,
    }


def _quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {name: float(np.quantile(seconds, at)) * 1e3 for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def _view(name: str, role: Role, running: int, node: int) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId(name),
        incarnation=Incarnation(name),
        pool=role.value,
        role=role,
        state=WorkerState.READY,
        address="",
        pid=0,
        fingerprint=b"same",
        ranks=(),
        max_transfer_tokens=1 << 30,
        transports=("ucx", "grpc"),
        running=running,
        node_id=f"node-{node}",
        rack=f"rack-{node // NODE_WORKERS}",
    )


def _reconcile(workers: int) -> list[dict[str, Any]]:
    """One pass each: nothing to do, a tenth of the workers lost, half of them surplus, and all still to start."""
    rules = Rules(
        heartbeat_interval_s=1.0,
        heartbeat_limit_s=5.0,
        probe_interval_s=10.0,
        max_failed_probes=3,
        restart_backoff_s=1.0,
        restart_backoff_max_s=60.0,
    )
    now_s = 1000.0
    pools = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    each = workers // len(pools)
    steady = [
        WorkerRecord(
            worker_id=WorkerId(f"{pool}-{i}"),
            pool=pool,
            role=role,
            state=WorkerState.READY,
            created_s=float(i),
            heartbeat_s=now_s - 0.5,
            probed_s=now_s - 1.0,
        )
        for pool, role in pools.items()
        for i in range(each)
    ]
    lost = [_lost(record) if i % 10 == 0 else record for i, record in enumerate(steady)]
    rows = []
    for case, records, replicas in (
        ("nothing to do", steady, each),
        ("a tenth lost", lost, each),
        ("half of them surplus", steady, each // 2),
        ("all still to start", [], each),
    ):
        targets = [PoolTarget(name=name, role=role, replicas=replicas) for name, role in pools.items()]
        times_s = []
        for _ in range(PASSES):
            begin_s = time.perf_counter()
            actions = reconcile(targets, Actual(workers=records), now_s, rules)
            times_s.append(time.perf_counter() - begin_s)
        rows.append({"case": case, "worst_s": max(times_s), "median_s": float(np.median(times_s)), "actions": len(actions)})
    return rows


def _lost(record: WorkerRecord) -> WorkerRecord:
    return WorkerRecord(
        worker_id=record.worker_id,
        pool=record.pool,
        role=record.role,
        state=WorkerState.DEAD,
        created_s=record.created_s,
        dead_reason="its process ended",
    )
