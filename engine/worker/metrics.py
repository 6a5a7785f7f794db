"""The worker's counters and Prometheus metrics, in a registry of their own. Nothing here raises into the path of a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.worker.rank_metrics import EngineCollector, RankCollector

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class WorkerMetrics:
    """`events` counts everything odd by name (fallbacks, late, unknown or duplicate messages); each is one label value of
    `splitpoint_worker_events_total`."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self._http: tuple[WSGIServer, Thread] | None = None
        self._legs = PrometheusCounter(
            "splitpoint_worker_legs", "Legs that ended, by leg and outcome.", ("leg", "outcome"), registry=self.registry
        )
        self._leg_seconds = Histogram(
            "splitpoint_worker_leg_seconds", "Accepted to ended.", ("leg",), buckets=_SECONDS, registry=self.registry
        )
        self._stage_seconds = Histogram(
            "splitpoint_worker_stage_seconds",
            "Parts of a leg by the worker's clock.",
            ("stage",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EventCollector(self.events))
        self.registry.register(EngineCollector())

    def event(self, name: str) -> None:
        """Something worth counting happened once."""
        self.events[name] += 1

    def leg_ended(self, leg: str, outcome: str, seconds: float) -> None:
        """`outcome` is "sealed", "staged", "finished" or an error code."""
        self._legs.labels(leg, outcome).inc()
        self._leg_seconds.labels(leg).observe(seconds)

    def stage(self, stage: str, seconds: float) -> None:
        self._stage_seconds.labels(stage).observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read at every scrape. Raises `ValueError` when the name is taken."""
        Gauge(f"splitpoint_worker_{name}", text, registry=self.registry).set_function(read)

    def ranks(self, read: Callable[[], Coroutine[Any, Any, Sequence[bytes | None]]]) -> None:
        """Show every rank's series too, read at each scrape. Called on the loop to which `read` belongs."""
        self.registry.register(RankCollector(asyncio.get_running_loop(), read, self.event))

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes over HTTP from a thread; returns the port (`port` 0: the system chooses). Raises `OSError`."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)
        self._http = (server, thread)
        return int(server.server_port)

    def close(self) -> None:
        """End `serve`. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            http[0].shutdown()
            http[0].server_close()
            http[1].join()

    def exposition(self) -> bytes:
        """The text format of all of it."""
        return generate_latest(self.registry)


class _EventCollector(Collector):
    def __init__(self, events: Counter[str]) -> None:
        self._events = events

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("splitpoint_worker_events", "Fallbacks and odd messages, by name.", labels=("event",))
        for name, value in sorted(self._events.items()):
            family.add_metric((name,), value)
        yield family
