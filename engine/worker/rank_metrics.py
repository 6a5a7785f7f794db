"""The ranks' and the engine's own Prometheus series, shown by the worker's endpoint: one address per worker to scrape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SCRAPE_TIMEOUT_S = 3.0
ENGINE_PREFIX = "vllm:"


class RankCollector(Collector):
    """Asks every rank at each scrape and labels what it says with its number.

    Scrapes come on a thread of the HTTP server; `read` runs on `loop`. A scrape on the loop's own thread cannot wait for it and
    shows no ranks. What fails is told to `failed` and shows nothing.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        read: Callable[[], Coroutine[Any, Any, Sequence[bytes | None]]],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._read = read
        self._failed = failed

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering asks for nothing

    def collect(self) -> Iterable[Metric]:
        if threading.get_ident() == self._loop_thread or self._loop.is_closed():
            return []
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            texts = reading.result(SCRAPE_TIMEOUT_S)
            return merged(texts)
        except Exception:
            # Whatever it is, the worker's own series are still worth showing.
            reading.cancel()
            self._failed("rank_scrape_failed")
            return []


class EngineCollector(Collector):
    """vLLM's series, which its loggers keep in the default registry of the process that runs its front: this one."""

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return [family for family in REGISTRY.collect() if family.name.startswith(ENGINE_PREFIX)]


def merged(texts: Sequence[bytes | None]) -> list[Metric]:
    """The families of several expositions, each sample with the label `rank`; None: that rank did not answer.

    Raises:
        ValueError: one is no exposition.
    """
    families: dict[str, Metric] = {}
    for rank, text in enumerate(texts):
        for family in text_string_to_metric_families("" if text is None else text.decode()):
            target = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                target.add_sample(sample.name, {**sample.labels, "rank": str(rank)}, sample.value)
    return list(families.values())
