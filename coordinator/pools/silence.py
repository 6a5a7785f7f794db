"""When gateways hear that a worker is silent, and what operators are told of it (docs/decisions/0034). Pure."""

from __future__ import annotations

from coordinator.pools.reconcile import Rules
from coordinator.pools.records import WorkerRecord

DEAF_PROBES = 2
"""Failed in a row: a worker that beats and whose host answers may have missed one of them for being busy."""


def is_silent(record: WorkerRecord, now_s: float, rules: Rules) -> bool:
    """Its last probe failed, and that was more than a moment's: its heartbeat is late too, or its whole host did not answer, or
    it was not the first one.

    A host that does not answer while its worker's heartbeats go on arriving for longer than `partition_grace_s` is one that the
    coordinator cannot dial and others may: then gateways judge by their own streams.
    """
    if not record.failed_probes:
        return False
    if is_late(record, now_s, rules):
        return True
    if record.host_silent:
        since_s = record.failing_since_s if record.failing_since_s is not None else now_s
        return now_s - since_s <= rules.partition_grace_s
    return record.failed_probes >= DEAF_PROBES


def is_late(record: WorkerRecord, now_s: float, rules: Rules) -> bool:
    """Its heartbeat is."""
    heard_s = record.heartbeat_s if record.heartbeat_s is not None else record.created_s
    return now_s - heard_s > rules.heartbeat_limit_s


def in_words(record: WorkerRecord, silent: bool) -> str:
    """For operators; "" while its data plane answers. `silent`: gateways hold it for that."""
    if not record.failed_probes:
        return ""
    if record.host_silent and not silent:
        return "it beats, but the coordinator cannot reach its host: gateways go by their own streams"
    who = "its host" if record.host_silent else "its data plane"
    return f"{who} does not answer"
