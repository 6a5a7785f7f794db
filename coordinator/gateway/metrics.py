"""Prometheus metrics of one gateway, in a registry of its own. Recording cannot raise (rule 11)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from coordinator.gateway.ledger import STAGES
from protos.splitpoint.v1 import common_pb2

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
BYTES = tuple(float(2**power) for power in range(16, 36, 2))
P = ParamSpec("P")
log = structlog.get_logger(__name__)


def _safe(record: Callable[Concatenate[GatewayMetrics, P], None]) -> Callable[Concatenate[GatewayMetrics, P], None]:
    """A metric that cannot be recorded is logged and counted; the request goes on."""

    def recorded(self: GatewayMetrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception:
            self.recording_faults += 1
            log.exception("metric_not_recorded", metric=record.__name__)

    functools.update_wrapper(recorded, record)
    return recorded


class GatewayMetrics:
    """Names begin with `splitpoint_`; every series carries `model_name`."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.recording_faults = 0
        self.before_exposition: Callable[[], None] = lambda: None
        self._model = {"model_name": model_name}
        self._children: dict[tuple[str, tuple[str, ...]], Counter | Gauge | Histogram] = {}
        counter = functools.partial(_make, Counter, self.registry)
        gauge = functools.partial(_make, Gauge, self.registry)
        histogram = functools.partial(_make, Histogram, self.registry)
        self._families: dict[str, Counter | Gauge | Histogram] = {
            "requests": counter("requests_total", "Public requests that ended.", ["front", "endpoint", "status", "error_type"]),
            "choices": counter("choices_total", "Choices that ended.", ["path", "status", "error_type"]),
            "inflight": gauge("inflight", "Choices in flight.", []),
            "ttft": histogram("ttft_seconds", "Receipt to first token, at the gateway.", ["path"], buckets=SECONDS),
            "itl": histogram("inter_token_latency_seconds", "Between tokens of a choice.", ["path"], buckets=TOKEN_SECONDS),
            "tpot": histogram("time_per_output_token_seconds", "Mean gap of a choice.", ["path"], buckets=TOKEN_SECONDS),
            "duration": histogram("request_duration_seconds", "Receipt to end.", ["path"], buckets=SECONDS),
            "phase": histogram("phase_duration_seconds", "Stages of the ledger.", ["path", "phase"], buckets=SECONDS),
            "residual": histogram("ledger_residual_seconds", "Time no stage explains.", ["path"], buckets=SECONDS),
            "transfer_s": histogram("kv_transfer_seconds", "First to last KV byte.", ["transport"], buckets=SECONDS),
            "transfer_bytes": histogram("kv_transfer_bytes", "KV bytes of a transfer.", ["transport"], buckets=BYTES),
            "transfer_failures": counter("kv_transfer_failures_total", "Transfers that failed.", ["reason"]),
            "routes": counter("route_decision_total", "Routes taken.", ["decision"]),
            "auto_decisions": counter("auto_decisions_total", "Paths that `auto` chose.", ["path", "reason"]),
            "auto_lost": counter("auto_lost_total", "Those that went worse than the other was predicted to.", ["path"]),
            "auto_ratio": histogram("auto_measured_ratio", "Measured over predicted.", ["path", "time"], buckets=RATIOS),
            "auto_correction": gauge("auto_correction", "What predictions are multiplied by now.", ["path", "time"]),
            "retries": counter("retries_total", "Further routes, by what failed.", ["reason"]),
            "recoveries": counter("recoveries_total", "How a failed route was made good.", ["kind"]),
            "events": counter("events_total", "What must not stay silent.", ["event"]),
            "breakers": gauge("breaker_state", "Circuits open at the moment.", []),
            "breaker_opened": counter("breaker_opened_total", "Circuits opened, by code.", ["code"]),
            "membership_age": gauge("membership_age_seconds", "Since the coordinator last answered; infinite before.", []),
            "workers": gauge("workers_connected", "Worker streams that are up.", []),
            "prompt_tokens": counter("prompt_tokens_total", "Prompt tokens of choices that ended.", []),
            "output_tokens": counter("output_tokens_total", "Tokens sent to clients.", []),
        }

    def _child(self, family: str, *labels: str) -> Counter | Gauge | Histogram:
        key = (family, labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._families[family].labels(self._model["model_name"], *labels)
        return child

    def _count(self, family: str, *labels: str, by: float = 1.0) -> None:
        child = self._child(family, *labels)
        assert isinstance(child, Counter)
        child.inc(by)

    def _observe(self, family: str, value: float, *labels: str) -> None:
        child = self._child(family, *labels)
        assert isinstance(child, Histogram)
        child.observe(value)

    def _set(self, family: str, value: float, *labels: str) -> None:
        child = self._child(family, *labels)
        assert isinstance(child, Gauge)
        child.set(value)

    # Recording ------------------------------------------------------------------------------------------------------------

    @_safe
    def in_flight(self, count: int) -> None:
        self._set("inflight", count)

    @_safe
    def token_gap(self, path: str, seconds: float) -> None:
        """The time since this choice's tokens before these."""
        self._observe("itl", seconds, path)

    @_safe
    def route_taken(self, decision: str) -> None:
        """`split`, `colocated` or `local`."""
        self._count("routes", decision)

    @_safe
    def path_decided(self, path: str, reason: str) -> None:
        """Path `auto` became this path."""
        self._count("auto_decisions", path, reason)

    @_safe
    def path_measured(self, path: str, *, ttft_ratio: float, tpot_ratio: float, lost: bool) -> None:
        """What came of it: measured over predicted."""
        self._observe("auto_ratio", ttft_ratio, path, "ttft")
        self._observe("auto_ratio", tpot_ratio, path, "tpot")
        if lost:
            self._count("auto_lost", path)

    @_safe
    def path_correction(self, path: str, *, ttft: float, tpot: float) -> None:
        """The factors of a path's predictions."""
        self._set("auto_correction", ttft, path, "ttft")
        self._set("auto_correction", tpot, path, "tpot")

    @_safe
    def event(self, name: str) -> None:
        """Something that must not stay silent."""
        self._count("events", name)

    @_safe
    def retry(self, reason: str) -> None:
        self._count("retries", reason)

    @_safe
    def recovery(self, kind: str) -> None:
        self._count("recoveries", kind)

    @_safe
    def transfer_failed(self, reason: str) -> None:
        self._count("transfer_failures", reason)

    @_safe
    def breaker_opened(self, code: str) -> None:
        self._count("breaker_opened", code)

    @_safe
    def fleet(self, *, open_breakers: int, connected_workers: int, membership_age_s: float) -> None:
        self._set("membership_age", membership_age_s)
        self._set("breakers", open_breakers)
        self._set("workers", connected_workers)

    @_safe
    def request_ended(self, *, front: str, endpoint: str, code: str) -> None:
        """One public request ended: `front` "http" or "grpc", `code` an error code or "ok"."""
        status = "ok" if code == "ok" else "cancelled" if code == "cancelled" else "error"
        self._count("requests", front, endpoint, status, "" if code == "ok" else code)

    @_safe
    def choice_ended(
        self, ledger: common_pb2.StageLedger, *, status: str, error_type: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        """One choice ended: `status` "ok", "error" or "cancelled"; `error_type` is the code, "" when none."""
        path = ledger.path
        self._count("choices", path, status, error_type)
        self._count("prompt_tokens", by=prompt_tokens)
        self._count("output_tokens", by=output_tokens)
        self._observe("duration", ledger.e2e_s, path)
        if output_tokens:
            self._observe("ttft", ledger.ttft_s, path)
        if output_tokens > 1 and status == "ok":
            self._observe("tpot", (ledger.e2e_s - ledger.ttft_s) / (output_tokens - 1), path)
        if status == "ok":
            for stage in STAGES:
                self._observe("phase", getattr(ledger, f"{stage}_s"), path, stage)
            self._observe("residual", max(0.0, ledger.residual_s), path)
        if ledger.transfer_bytes:
            self._observe("transfer_s", ledger.transfer_s, ledger.transport)
            self._observe("transfer_bytes", ledger.transfer_bytes, ledger.transport)

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of GET /metrics. `before_exposition` brings pulled gauges up to date first."""
        try:
            self.before_exposition()
        except Exception:
            self.recording_faults += 1
            log.exception("gauges_not_refreshed")
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def _make(kind: type, registry: CollectorRegistry, name: str, text: str, labels: list[str], **options: object) -> Counter:
    family: Counter = kind(f"splitpoint_{name}", text, ["model_name", *labels], registry=registry, **options)
    return family
