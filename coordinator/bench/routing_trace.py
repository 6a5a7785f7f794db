"""Replay of a trace with shared prefixes through the real router, in virtual time.

Only the engines are modelled: each prefill worker computes what its cache lacks, one prompt after the other, and its cache is an
LRU of blocks; each decode worker is busy for a fixed time per output token. The yardstick of hits is one LRU cache of all prefill
workers' capacity together, which sees every request in order of arrival: no placement can lose a hit there. The yardstick of
balance is the work that this cache leaves, its hits for free: placed as it comes, each prompt on the worker with the least work
of the last minute, and placed in hindsight, the largest prompts first.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.compare.traces import HASH_BLOCK_TOKENS, Row, WorkloadError, is_coarse, spread_batches
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import PairGoal, PairRoute
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation, WorkerId

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """`workers` prefill workers, each computing `prefill_tokens_per_s`, with a cache of `cache_tokens`; as many decode
    workers, which take `token_s` for a token. `routing` but for its policy; None: the defaults."""

    workers: int = 4
    cache_tokens: int = 4_194_304
    prefill_tokens_per_s: float = 15_000.0
    token_s: float = 0.02
    seeds: tuple[int, ...] = (1, 2, 3)
    policies: tuple[str, ...] = ("prefix_aware", "least_loaded", "power_of_two", "round_robin")
    routing: RoutingSettings | None = None


class LruCache:
    """Blocks of prompts, the least recently used of which is evicted first; of one prompt, the last block."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = max(1, capacity_blocks)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit_tokens(self, row: Row) -> int:
        """Tokens of the prompt that are cached, at most all but one; afterwards the whole prompt is."""
        hits = 0
        for block in row.hash_ids:
            if block not in self._blocks:
                break
            hits += 1
        for block in reversed(row.hash_ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return min(hits * HASH_BLOCK_TOKENS, row.input_tokens - 1)


def replay(rows: Sequence[Row], spec: ReplaySpec) -> dict[str, Any]:
    """Every policy over every seed. Raises `WorkloadError` when the trace says nothing about prefixes."""
    if not any(row.hash_ids for row in rows):
        raise WorkloadError("the trace has no hash_ids: it says nothing about shared prefixes")
    blocks = spec.cache_tokens // HASH_BLOCK_TOKENS
    prompt_tokens = sum(row.input_tokens for row in rows)
    runs = []
    for seed in spec.seeds:
        timed = _spread(rows, seed)
        lru = LruCache(blocks * spec.workers)
        left = [(row.arrival_s, row.input_tokens - lru.hit_tokens(row)) for row in timed]
        common = {
            "seed": seed,
            "offline_hit_rate": 1 - sum(tokens for _, tokens in left) / prompt_tokens,
            "as_it_comes_load_ratio": _worst(as_it_comes(left, spec.workers), spec.workers),
            "hindsight_load_ratio": _worst(in_hindsight(left, spec.workers), spec.workers),
        }
        runs += [{**common, "policy": policy, **_run(timed, spec, policy, seed)} for policy in spec.policies]
    return {
        "kind": "bench-routing-trace",
        "requests": len(rows),
        "prompt_tokens": prompt_tokens,
        "spread": is_coarse([row.arrival_s for row in rows]),
        "spec": {
            "workers": spec.workers,
            "cache_tokens": spec.cache_tokens,
            "prefill_tokens_per_s": spec.prefill_tokens_per_s,
            "token_s": spec.token_s,
            "routing": _routing(spec).model_dump(mode="json", exclude={"policy"}),
        },
        "runs": runs,
    }


def table(record: dict[str, Any]) -> str:
    """The record for people: the worst of the seeds, policy by policy."""
    spec, runs = record["spec"], record["runs"]
    seeds = sorted({run["seed"] for run in runs})
    spread = f"arrivals spread inside their batches with seeds {', '.join(map(str, seeds))}" if record["spread"] else "as it is"
    offline = min(run["offline_hit_rate"] for run in runs)
    lines = [
        f"{record['requests']} requests, {spread}",
        f"{spec['workers']} prefill workers, each with a cache of {spec['cache_tokens']} tokens",
        f"one offline LRU cache of {spec['workers'] * spec['cache_tokens']} tokens: hit rate {offline:.3f}",
        "all its hits for free, load/mean in any 60 s: placed by the least recent work as it comes "
        f"{max(run['as_it_comes_load_ratio'] for run in runs):.3f}, in hindsight "
        f"{max(run['hindsight_load_ratio'] for run in runs):.3f}",
        f"{'policy':<16}{'hit rate':>10}{'of offline':>12}{'load/mean, any 60 s':>21}{'p99':>7}{'queue p50 s':>13}{'p99 s':>8}"
        "   (the worst of the seeds)",
    ]
    for policy in dict.fromkeys(run["policy"] for run in runs):
        mine = [run for run in runs if run["policy"] == policy]
        of_offline = min(r["hit_rate"] / r["offline_hit_rate"] for r in mine)
        lines.append(
            f"{policy:<16}{min(r['hit_rate'] for r in mine):>10.3f}{of_offline:>12.3f}"
            f"{max(r['worst_load_ratio'] for r in mine):>21.3f}{max(r['p99_load_ratio'] for r in mine):>7.3f}"
            f"{max(r['queue_p50_s'] for r in mine):>13.2f}{max(r['queue_p99_s'] for r in mine):>8.2f}"
        )
    lines.append(
        "load: prompt tokens computed. The longest prompt is "
        f"{max(run['longest_prompt_share'] for run in runs):.2f} of the mean load of a worker in 60 s"
    )
    return "\n".join(lines)


def _routing(spec: ReplaySpec) -> RoutingSettings:
    # The trace's blocks, whatever the settings say: its prompts have no tokens to hash.
    return (spec.routing or RoutingSettings()).model_copy(update={"prefix_block_tokens": HASH_BLOCK_TOKENS})


def _spread(rows: Sequence[Row], seed: int) -> list[Row]:
    arrivals = [row.arrival_s for row in rows]
    if not is_coarse(arrivals):
        return list(rows)
    moved, _ = spread_batches(arrivals, np.random.default_rng(seed))
    return [Row(float(at), row.input_tokens, row.output_tokens, row.hash_ids) for at, row in zip(moved, rows, strict=True)]


def _run(rows: Sequence[Row], spec: ReplaySpec, policy: str, seed: int) -> dict[str, Any]:
    router = Router(_routing(spec).model_copy(update={"policy": policy}), random.Random(seed), transports=("ucx",))
    router.update(_view(role, i, spec) for role in (Role.PREFILL, Role.DECODE) for i in range(spec.workers))
    caches = [LruCache(spec.cache_tokens // HASH_BLOCK_TOKENS) for _ in range(spec.workers)]
    free_s = [0.0] * spec.workers
    ends: list[tuple[float, Incarnation, int]] = []
    hits = expected = 0
    given: list[tuple[float, int, int]] = []
    queued_s = []
    for row in rows:
        now_s = row.arrival_s
        while ends and ends[0][0] <= now_s:
            _, incarnation, tokens = heapq.heappop(ends)
            router.load.discharge(incarnation, tokens)
        ask = Ask(tokens=row.input_tokens, blocks=row.hash_ids)
        route = router.choose((PairGoal(prompt_tokens=row.input_tokens),), now_s, ask)
        assert isinstance(route, PairRoute), route
        place = int(route.prefill.worker_id)
        # One prompt after the other: what was sent before is computed, and cached, when this one's turn comes.
        hit = caches[place].hit_tokens(row)
        computed = row.input_tokens - hit
        begin_s = max(now_s, free_s[place])
        free_s[place] = begin_s + computed / spec.prefill_tokens_per_s
        router.prompt_computed(
            route.prefill.incarnation, ask, expected_cached_tokens=route.expected_cached_tokens, cached_tokens=hit
        )
        for incarnation, tokens, until_s in (
            (route.prefill.incarnation, row.input_tokens - route.expected_cached_tokens, free_s[place]),
            (route.decode.incarnation, row.input_tokens + row.output_tokens, free_s[place] + row.output_tokens * spec.token_s),
        ):
            router.load.charge(incarnation, tokens)
            heapq.heappush(ends, (until_s, incarnation, tokens))
        hits += hit
        expected += route.expected_cached_tokens
        given.append((now_s, place, computed))
        queued_s.append(begin_s - now_s)
    ratios, mean_tokens = load_ratios(given, spec.workers)
    total = sum(row.input_tokens for row in rows)
    return {
        "hit_rate": hits / total,
        "expected_hit_rate": expected / total,
        "worst_load_ratio": float(ratios.max(initial=0.0)),
        "p99_load_ratio": float(np.quantile(ratios, 0.99)) if len(ratios) else 0.0,
        "longest_prompt_share": max(row.input_tokens for row in rows) / mean_tokens if mean_tokens else 0.0,
        "queue_p50_s": float(np.median(queued_s)),
        "queue_p99_s": float(np.quantile(queued_s, 0.99)),
    }


def _worst(given: Sequence[tuple[float, int, int]], workers: int) -> float:
    return float(load_ratios(given, workers)[0].max(initial=0.0))


def as_it_comes(work: Sequence[tuple[float, int]], workers: int) -> list[tuple[float, int, int]]:
    """(when, which worker, tokens): each prompt goes to who was given the least in the last `WINDOW_S`."""
    sums = np.zeros(workers, dtype=np.int64)
    window: deque[tuple[float, int, int]] = deque()
    given = []
    for at_s, tokens in work:
        while window and window[0][0] <= at_s - WINDOW_S:
            _, which, left = window.popleft()
            sums[which] -= left
        given.append((at_s, int(sums.argmin()), tokens))
        sums[given[-1][1]] += tokens
        window.append(given[-1])
    return given


def in_hindsight(work: Sequence[tuple[float, int]], workers: int) -> list[tuple[float, int, int]]:
    """The same with all prompts known: the largest first, each where the windows that hold it stay the most even. Windows begin
    at whole seconds here."""
    window, last = int(WINDOW_S), int(max((at_s for at_s, _ in work), default=0.0))
    sums = np.zeros((workers, last + window + 1))
    mean = np.zeros(last + window + 1)
    for at_s, tokens in work:
        mean[int(at_s) : int(at_s) + window] += tokens / workers
    given = []
    for at_s, tokens in sorted(work, key=lambda piece: -piece[1]):
        holding = slice(int(at_s), int(at_s) + window)
        which = int(((sums[:, holding] + tokens) / mean[holding]).max(axis=1).argmin())
        sums[which, holding] += tokens
        given.append((at_s, which, tokens))
    return sorted(given)


def load_ratios(given: Sequence[tuple[float, int, int]], workers: int) -> tuple[npt.NDArray[np.float64], float]:
    """The most loaded worker against the mean, of every window of 60 s inside the trace, and the mean load of a worker in one.

    `given` is (when, which worker, tokens). A window's sums change when work enters or leaves it, so these are all there are.
    """
    if not given:
        return np.zeros(0), 0.0
    first_s, last_s = given[0][0] + WINDOW_S, given[-1][0]
    events = sorted([(at, which, tokens) for at, which, tokens in given] + [(at + WINDOW_S, w, -n) for at, w, n in given])
    sums = np.zeros(workers)
    ratios, means = [], []
    for at_s, which, tokens in events:
        sums[which] += tokens
        if first_s <= at_s <= last_s and (mean := sums.mean()) > 0:
            ratios.append(sums.max() / mean)
            means.append(mean)
    return np.array(ratios), float(np.mean(means)) if means else 0.0


def _view(role: Role, place: int, spec: ReplaySpec) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId(str(place)),
        incarnation=Incarnation(f"{role}-{place}"),
        pool=role.value,
        role=role,
        state=WorkerState.READY,
        address="",
        pid=0,
        fingerprint=b"same",
        ranks=(),
        max_transfer_tokens=1 << 40,
        transports=("ucx",),
        kv_capacity_tokens=spec.cache_tokens,
    )
