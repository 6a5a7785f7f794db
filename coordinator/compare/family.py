"""Records of several workloads judged together: among many questions one is answered wrongly by luck. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.compare.record import Record
from coordinator.compare.verdict import Judgement, among


class FamilyError(ValueError):
    """The records are no family; the text says why."""


def judge_records(records: Mapping[str, Record]) -> dict[str, Judgement]:
    """One judgement per record and challenger, by "name" or "name: challenger", with Holm's correction over all of them.

    What a record itself leaves undecided stays so, with its reason: a correction takes claims away and adds none.

    Raises:
        FamilyError: fewer than two records, two of one workload, or other margins.
    """
    if len(records) < 2:
        raise FamilyError("give two records at least, of a workload each")
    margins = {record.judgement.margin for record in records.values()}
    if len(margins) > 1:
        raise FamilyError(f"the margins differ: {', '.join(f'{margin:.0%}' for margin in sorted(margins))}")
    seen: dict[str, str] = {}
    for name, record in records.items():
        key = repr((record.source, record.model, sorted(record.workload_digests.items())))
        if key in seen:
            raise FamilyError(f"{seen[key]} and {name} are of the same workload and seeds")
        seen[key] = name
    alone = {}
    for name, record in records.items():
        for challenger, judgement in (record.verdicts or {"split": record.judgement}).items():
            alone[name if len(record.verdicts) < 2 else f"{name}: {challenger}"] = judgement
    return among(alone, "workloads")
