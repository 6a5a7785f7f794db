"""The connector's numbers in vLLM's own form: collected by both halves, carried with each step's output, and shown by vLLM's
log and Prometheus loggers under the names of the NIXL connector with `splitpoint` in its place.

    half       counts                                                              leaves its process
    ranks      transfers, failures, expiries, late messages of the transfer node   with the step's model output
    scheduler  what it decided (`SchedulerHalf.counters`)                          with the step's scheduler statistics

`metrics.py` shows them to Prometheus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvtransfer.metrics import Observation

EVENTS = "scheduler_events"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BYTES = tuple(float(2**n) for n in range(11, 35, 2))
_CHUNKS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# data's key -> metric, help, buckets. One entry per delivered transfer.
SERIES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "transfer_duration": ("xfer_time_seconds", "First to last byte of a transfer", _SECONDS),
    "post_duration": ("post_time_seconds", "From the order to pull until the first byte", _SECONDS),
    "bytes_transferred": ("bytes_transferred", "Verified bytes of a transfer, per rank", _BYTES),
    "num_descriptors": ("num_descriptors", "Contiguous chunks of a transfer", _CHUNKS),
}
# data's key -> metric, help.
FAILURES = {
    "num_failed_transfers": ("num_failed_transfers", "Transfers that failed, handshakes among them"),
    "num_failed_notifications": ("num_failed_notifications", "Ends that the sender did not hear of; its lease ends by release"),
    "num_kv_expired_reqs": ("num_kv_expired_reqs", "Leases and staged slots that outlived their deadline"),
    "num_notifications_after_expiry": (
        "num_notifications_after_expiry",
        "Messages about transfers that were over; none can reach memory that is in use again",
    ),
}
_KINDS = {
    "failed": "num_failed_transfers",
    "expired": "num_kv_expired_reqs",
    "unheard": "num_failed_notifications",
    "late": "num_notifications_after_expiry",
}


@dataclass
class SplitpointStats(KVConnectorStats):
    """`data` is plain: lists of numbers as NIXL's, and a dict of the scheduler half's events."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of_rank(cls, observations: Iterable[Observation]) -> SplitpointStats:
        """What one rank's node has observed."""
        stats = cls()
        for seen in observations:
            if seen.kind == "delivered":
                stats.data["transfer_duration"].append(seen.seconds)
                stats.data["post_duration"].append(seen.waited_s)
                stats.data["bytes_transferred"].append(seen.num_bytes)
                stats.data["num_descriptors"].append(seen.chunks)
            else:
                stats.data[_KINDS[seen.kind]].append(1)
        return stats

    @classmethod
    def of_scheduler(cls, events: Mapping[str, int]) -> SplitpointStats:
        """What the scheduler half has counted since the last time."""
        stats = cls()
        stats.data[EVENTS].update(events)
        return stats

    def reset(self) -> None:
        self.data: dict[str, Any] = {**{key: [] for key in (*SERIES, *FAILURES)}, EVENTS: {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            if key == EVENTS:
                self.data[EVENTS] = dict(Counter(self.data[EVENTS]) + Counter(value))
            else:
                self.data[key].extend(value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: counts, and milliseconds and MB of what was delivered."""
        seconds = np.asarray(self.data["transfer_duration"])
        megabytes = np.asarray(self.data["bytes_transferred"]) / 1e6
        shown: dict[str, int | float] = {"Num successful transfers": len(seconds)}
        if len(seconds):
            shown["Avg xfer time (ms)"] = round(float(seconds.mean()) * 1e3, 3)
            shown["P90 xfer time (ms)"] = round(float(np.percentile(seconds, 90)) * 1e3, 3)
            shown["Avg MB per transfer"] = round(float(megabytes.mean()), 3)
            shown["Throughput (MB/s)"] = round(float(megabytes.sum() / max(float(seconds.sum()), 1e-9)), 3)
        shown["Num failed transfers"] = len(self.data["num_failed_transfers"])
        shown["Num KV expired reqs"] = len(self.data["num_kv_expired_reqs"])
        shown["Num notifs after expiry"] = len(self.data["num_notifications_after_expiry"])
        return shown | dict(sorted(self.data[EVENTS].items()))


class Increments:
    """Turns counters that only grow into what was added since the last look."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def take(self, counters: Mapping[str, int]) -> dict[str, int]:
        now = Counter(counters)
        added = now - self._seen
        self._seen = now
        return dict(added)
