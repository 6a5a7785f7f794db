"""Numbers of one rank's transfers. Recording never raises: a metric that fails is counted, and the transfer goes on."""

from __future__ import annotations

import functools
import threading
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

F = TypeVar("F", bound=Callable[..., None])

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


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
        """Records that failed."""
        self._lock = threading.Lock()
        self._events: Counts[str] = Counts()
        prefix = "splitpoint_kv_transfer"
        self._seconds = Histogram(
            f"{prefix}_seconds", "First to last byte", ["transport"], buckets=_SECONDS, registry=self.registry
        )
        self._bytes = Counter(f"{prefix}_bytes_total", "Verified bytes", ["transport"], registry=self.registry)
        self._inflight = Gauge(f"{prefix}_inflight", "Pulls that run", registry=self.registry)
        self._failures = Counter(f"{prefix}_failures_total", "Pulls that failed", ["reason"], registry=self.registry)
        self._expired = Counter(f"{prefix}_expired_total", "Ended by their deadline", ["side"], registry=self.registry)
        self._late = Counter(f"{prefix}_late_total", "Messages after the end", ["kind"], registry=self.registry)
        self._event_total = Counter(
            "splitpoint_kv_events_total", "Everything else that is counted", ["event"], registry=self.registry
        )
        self._staging = Gauge("splitpoint_kv_staging_bytes", "Staging by use", ["pool", "state"], registry=self.registry)

    @_never_raises
    def event(self, name: str) -> None:
        """One more of something that is no transfer: a refusal, a fallback, a fault of a peer."""
        self._count(name)
        self._event_total.labels(name).inc()

    @_never_raises
    def started(self) -> None:
        self._count("pulls_started")
        self._inflight.inc()

    @_never_raises
    def delivered(self, transport: str, num_bytes: int, seconds: float) -> None:
        self._count("pulls_delivered")
        self._inflight.dec()
        self._bytes.labels(transport).inc(num_bytes)
        self._seconds.labels(transport).observe(seconds)

    @_never_raises
    def failed(self, reason: str) -> None:
        self._count("pulls_failed")
        self._count(f"pulls_failed.{reason}")
        self._inflight.dec()
        self._failures.labels(reason).inc()

    @_never_raises
    def expired(self, side: str) -> None:
        self._count(f"expired.{side}")
        self._expired.labels(side).inc()

    @_never_raises
    def late(self, kind: str) -> None:
        self._count(f"late.{kind}")
        self._late.labels(kind).inc()

    @_never_raises
    def staging(self, pool: str, used_bytes: int, quarantined_bytes: int) -> None:
        self._staging.labels(pool, "used").set(used_bytes)
        self._staging.labels(pool, "quarantined").set(quarantined_bytes)

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
