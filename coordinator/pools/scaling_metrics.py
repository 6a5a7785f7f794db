"""Prometheus series of pools, autoscaler and advisor: what they decided, and from what. Served by the coordinator itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)


class ScalingMetrics:
    """Names begin with `splitpoint_`; every series carries `model_name`. `shown` belongs to the coordinator's loop; scrapes read
    the last of it from a thread of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._snapshot = admin_pb2.GetStatusResponse()
        self._http: tuple[WSGIServer, threading.Thread] | None = None
        self._scaled = self._counter("scale_events", "Changes of a pool's target.", ["source", "pool", "direction"])
        self._autoscaled = self._counter("autoscaler_decisions", "Decisions of autoscalers.", ["pool", "action"])
        self._advised = self._counter("advisor_decisions", "Looks of the advisor, by what came of them.", ["action"])
        self.registry.register(_Snapshot(self))

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"splitpoint_{name}_total", text, ["model_name", *labels], registry=self.registry)

    def scaled(self, source: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """`source` has changed the targets: "operator", "autoscaler" or "advisor"."""
        for pool in {**before, **after}:
            change = after.get(pool, 0) - before.get(pool, 0)
            if change:
                self._scaled.labels(self._model, source, pool, "up" if change > 0 else "down").inc()

    def autoscaled(self, pool: str, action: str) -> None:
        self._autoscaled.labels(self._model, pool, action).inc()

    def advised(self, action: str) -> None:
        self._advised.labels(self._model, action).inc()

    def shown(self, snapshot: admin_pb2.GetStatusResponse) -> None:
        """What gauges show from now on: pools, autoscaling and the advisor of a status, which is not changed any more."""
        self._snapshot = snapshot

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes over HTTP from a thread; returns the port (`port` 0: the system chooses). Raises `OSError`."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)
        self._http = (server, thread)
        log.info("metrics at http://%s:%d/metrics", host, server.server_port)
        return int(server.server_port)

    def close(self) -> None:
        """End `serve`. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            http[0].shutdown()
            http[0].server_close()
            http[1].join()

    def families(self) -> Iterable[Metric]:
        """The gauges of the last snapshot; pools that are gone have none."""
        status = self._snapshot
        autoscaling, advisor = status.autoscaling, status.advisor
        states = ("target", "ready", "starting", "draining")
        replicas = [((p.name, p.role, state), getattr(p, state)) for p in status.pools for state in states]
        yield self._gauge("pool_replicas", "Workers of a pool.", ("pool", "role", "state"), replicas)
        decided = [(a.pool, a.decision) for a in autoscaling.autoscalers if a.HasField("decision")]
        wanted = [((pool,), d.wanted_replicas) for pool, d in decided]
        yield self._gauge("autoscaler_wanted_replicas", "What a pool's signals ask for.", ("pool",), wanted)
        signals = [((pool, s.name), s.value) for pool, d in decided for s in d.signals]
        yield self._gauge("autoscaler_signal", "A pool's figure that its target is held against.", ("pool", "signal"), signals)
        gains = [((g.pool,), g.goodput_per_s) for g in autoscaling.next]
        text = "Requests/s more within their goals for one more accelerator."
        yield self._gauge("autoscaler_marginal_goodput", text, ("pool",), gains)
        accelerators = [(("taken",), autoscaling.accelerators_taken)]
        if autoscaling.HasField("accelerator_budget"):
            accelerators.append((("budget",), autoscaling.accelerator_budget))
        yield self._gauge("accelerators", "Of all pools together.", ("state",), accelerators)
        if advisor.enabled:
            yield from self._advisor(advisor)

    def _advisor(self, advisor: admin_pb2.AdvisorStatus) -> Iterable[Metric]:
        kept = [((p.role,), p.attainment) for p in advisor.phases]
        yield self._gauge("slo_attainment", "Share of a phase's requests that kept its goals.", ("phase",), kept)
        goodput = [(("measured",), advisor.goodput_per_s)]
        requests, proposal = [], advisor.proposal
        if advisor.HasField("proposal"):
            goodput += [(("predicted_now",), proposal.goodput_now_per_s), (("predicted_then",), proposal.goodput_then_per_s)]
            requests = [(("cost",), proposal.cost_requests), (("gain",), proposal.gain_requests)]
        yield self._gauge("advisor_goodput", "Requests/s within their goals.", ("basis",), goodput)
        yield self._gauge("advisor_proposal_requests", "What the proposed change costs and gains.", ("kind",), requests)
        costs = [((c.how,), c.cost_s) for c in advisor.costs]
        yield self._gauge("advisor_change_seconds", "What a change is taken to last.", ("how",), costs)
        waits = [(("dwell",), advisor.dwell_left_s), (("backoff",), advisor.backoff_left_s)]
        yield self._gauge("advisor_wait_seconds", "Until a change may be carried out.", ("why",), waits)
        yield self._gauge("advisor_pending", "1 while the last change is not judged.", (), [((), bool(advisor.pending))])

    def _gauge(
        self, name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"splitpoint_{name}", text, labels=("model_name", *labels))
        for found, value in values:
            family.add_metric((self._model, *found), float(value))
        return family


class _Snapshot(Collector):
    def __init__(self, metrics: ScalingMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()
