"""Numbers of one rank's transfers: for Prometheus, for status, and for the engine's own statistics.

Recording and reading never raise: a metric that fails is counted, and the transfer goes on.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.splitpoint.v1 import kv_transfer_pb2 as pb

F = TypeVar("F", bound=Callable[..., None])

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
KEPT_OBSERVATIONS = 4096
"""Ends of transfers that wait for the engine to take them; an engine that never asks costs no more memory than that."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One end of a transfer or lease, for the engine's statistics.

    `kind`: "delivered" (the numbers are set), "failed", "expired", "late" (a peer's word about something that is over), or
    "unheard" (our own word did not reach the peer).
    `seconds` are from the first to the last byte, `waited_s` from the order to pull until the first.
    """

    kind: str
    num_bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    chunks: int = 0


def _never_raises(record: F) -> F:
    @functools.wraps(record)
    def wrapper(self: KvMetrics, *args: Any, **kwargs: Any) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception:
            self.lost += 1

    return wrapper  # type: ignore[return-value]


class KvMetrics:
    """Counters and histograms in a registry of their own, and the same events as plain numbers for status. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lost = 0
        """Records and readings that failed."""
        self._lock = threading.Lock()
        self._events: Counts[str] = Counts()
        self._observations: deque[Observation] = deque(maxlen=KEPT_OBSERVATIONS)
        prefix, registry = "splitpoint_kv_transfer", self.registry
        transport = ["transport"]
        self._seconds = Histogram(f"{prefix}_seconds", "First to last byte", transport, buckets=_SECONDS, registry=registry)
        self._waited = Histogram(f"{prefix}_wait_seconds", "Order to first byte", transport, buckets=_SECONDS, registry=registry)
        self._bytes = Counter(f"{prefix}_bytes_total", "Verified bytes", transport, registry=registry)
        self._inflight = Gauge(f"{prefix}_inflight", "Pulls that run", transport, registry=registry)
        self._failures = Counter(f"{prefix}_failures_total", "Pulls that failed", ["transport", "reason"], registry=registry)
        self._expired = Counter(f"{prefix}_expired_total", "Ended by their deadline", ["side"], registry=registry)
        self._late = Counter(f"{prefix}_late_total", "Messages after the end", ["kind"], registry=registry)
        self._event_total = Counter("splitpoint_kv_events_total", "Everything else, by name", ["event"], registry=registry)
        self._staging_wait = Histogram(
            "splitpoint_kv_staging_wait_seconds",
            "Reservations and pulls that found no room at once",
            ["pool", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )

    def watch(self, status: Callable[[], pb.GetNodeStatusResponse]) -> None:
        """Expose, at every scrape, what the node holds then."""
        self.registry.register(_Held(self, status))

    @_never_raises
    def event(self, name: str) -> None:
        """One more of something that is no transfer: a refusal, a fallback, a fault of a peer."""
        self._count(name)
        if name == "complete_failed":
            self._observations.append(Observation("unheard"))
        self._event_total.labels(name).inc()

    @_never_raises
    def started(self, transport: str) -> None:
        self._count("pulls_started")
        self._inflight.labels(transport).inc()

    @_never_raises
    def delivered(self, transport: str, num_bytes: int, seconds: float, *, waited_s: float = 0.0, chunks: int = 0) -> None:
        self._count("pulls_delivered")
        self._observations.append(Observation("delivered", num_bytes, seconds, waited_s, chunks))
        self._inflight.labels(transport).dec()
        self._bytes.labels(transport).inc(num_bytes)
        self._seconds.labels(transport).observe(seconds)
        self._waited.labels(transport).observe(waited_s)

    @_never_raises
    def failed(self, transport: str, reason: str) -> None:
        self._count("pulls_failed")
        self._count(f"pulls_failed.{reason}")
        self._observations.append(Observation("failed"))
        self._inflight.labels(transport).dec()
        self._failures.labels(transport, reason).inc()

    @_never_raises
    def expired(self, side: str) -> None:
        """A lease ("send") or a staged slot that nobody took ("receive") outlived its deadline."""
        self._count(f"expired.{side}")
        self._observations.append(Observation("expired"))
        self._expired.labels(side).inc()

    @_never_raises
    def late(self, kind: str) -> None:
        self._count(f"late.{kind}")
        self._observations.append(Observation("late"))
        self._late.labels(kind).inc()

    @_never_raises
    def staging_waited(self, pool: str, outcome: str, seconds: float) -> None:
        """Somebody waited for room; `outcome` is "granted", "refused" (no room in time) or "abandoned"."""
        self._count(f"staging_wait.{pool}.{outcome}")
        self._staging_wait.labels(pool, outcome).observe(seconds)

    def take_observations(self) -> list[Observation]:
        """Those since the last call, oldest first. Each is handed out once."""
        taken: list[Observation] = []
        while True:
            try:
                taken.append(self._observations.popleft())
            except IndexError:
                return taken

    def counters(self) -> dict[str, int]:
        """Every event so far."""
        with self._lock:
            return {**self._events, **({"metrics_lost": self.lost} if self.lost else {})}

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def _count(self, name: str) -> None:
        with self._lock:
            self._events[name] += 1


class _Held(Collector):
    """What a node holds when somebody asks."""

    def __init__(self, metrics: KvMetrics, status: Callable[[], pb.GetNodeStatusResponse]) -> None:
        self._metrics = metrics
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering asks for nothing: the node is not ready yet

    def collect(self) -> Iterable[Metric]:
        try:
            return list(_held(self._status()))
        except Exception:
            self._metrics.lost += 1
            return []


def _held(status: pb.GetNodeStatusResponse) -> Iterable[Metric]:
    staging = GaugeMetricFamily("splitpoint_kv_staging_bytes", "Staging by use", labels=["pool", "state"])
    for pool, said in (("send", status.send), ("receive", status.receive), ("pack", status.pack)):
        for state in ("capacity", "used", "quarantined"):
            staging.add_metric([pool, state], getattr(said, f"{state}_bytes"))
    yield staging
    for name, what, states in (
        ("leases", "Live leases by state", status.lease_states),
        ("sessions", "Receive sessions by state", status.session_states),
    ):
        family = GaugeMetricFamily(f"splitpoint_kv_{name}", what, labels=["state"])
        for state, count in sorted(states.items()):
            family.add_metric([state], count)
        yield family
    pinned = "Engine blocks that wait for a transfer. Always 0: KV is gathered in the step that computes it; see the leases"
    yield GaugeMetricFamily("splitpoint_kv_pinned_engine_blocks", pinned, value=0)
