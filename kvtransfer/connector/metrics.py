"""The connector's statistics in Prometheus, by vLLM's hooks: lives in the process that runs vLLM's loggers, the worker's actor
here, and in Prometheus' default registry. Nothing here raises into vLLM: what cannot be recorded is dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvtransfer.connector.stats import EVENTS, FAILURES, SERIES

logger = logging.getLogger(__name__)

PREFIX = "vllm:splitpoint_"


class SplitpointPromMetrics(KVConnectorPromMetrics):
    """One set of series per process, a label for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter = metric_types[Histogram], metric_types[Counter]
        self._series = {
            key: histogram(name=PREFIX + name, documentation=text, buckets=buckets, labelnames=labelnames)
            for key, (name, text, buckets) in SERIES.items()
        }
        self._failures = {
            key: counter(name=PREFIX + name, documentation=text, labelnames=labelnames) for key, (name, text) in FAILURES.items()
        }
        self._events = counter(
            name=f"{PREFIX}scheduler_events",
            documentation="What the connector's scheduler half decided, and what it met that should not be",
            labelnames=[*labelnames, "event"],
        )
        self.lost = 0
        """Statistics of steps that could not be recorded."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's. An exception would end vLLM's output loop, so none leaves here."""
        try:
            self._observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
        except Exception:
            self.lost += 1
            if self.lost == 1:
                logger.exception("connector statistics cannot be recorded")

    def _observe(self, data: Mapping[str, Any], labels: list[object]) -> None:
        for key, histogram in self._series.items():
            for value in data[key]:
                histogram.labels(*labels).observe(value)
        for key, counter in self._failures.items():
            if data[key]:
                counter.labels(*labels).inc(sum(data[key]))
        for event, count in data[EVENTS].items():
            self._events.labels(*labels, event).inc(count)
