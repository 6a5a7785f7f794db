"""What a comparison says it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.compare.load import Outcome, Probe
from coordinator.compare.notes import knee_notes, to_settle, void_notes
from coordinator.compare.stats import knee

ABOVE = knee([1.0, 4.0], [1.0, 1.0]).why
BELOW = knee([1.0, 4.0], [0.5, 0.2]).why


def probe(path: str, lag_s: float, void: str = "") -> Probe:
    outcome = Outcome(index=0, due_s=0.0, lag_s=lag_s, wanted_tokens=1)
    return Probe(path=path, seed=1, rate_per_s=1.0, workload_digest="", outcomes=[outcome], void=void)


def entry(seed: int, split: str, colocated: str) -> dict[str, Any]:
    return {"seed": seed, "split": {"why": split}, "colocated": {"why": colocated}}


def test_seeds_with_one_reason_are_named_together() -> None:
    notes = knee_notes([entry(1, ABOVE, ""), entry(2, ABOVE, BELOW), entry(3, "", "")])
    assert notes == [f"goodput split {ABOVE}, seed 1, 2", f"goodput colocated {BELOW}, seed 2"]


@pytest.mark.parametrize(
    ("split", "colocated", "needs"),
    [
        (ABOVE, "", "higher rates"),
        ("", BELOW, "lower rates"),
        (ABOVE, BELOW, "higher and lower rates"),
        ("not measured", "", "more time"),
    ],
)
def test_it_says_what_would_settle_it(split: str, colocated: str, needs: str) -> None:
    (note,) = to_settle([entry(1, split, colocated)], [])
    assert needs in note


def test_void_probes_need_another_client() -> None:
    void = [probe("split", 0.02, "the client fell behind: 20 ms"), probe("split", 0.01, "the client fell behind: 10 ms")]
    (note,) = to_settle([entry(1, "not measured", "not measured")], void)
    assert note == "to settle it: a client with a core to itself"
    (told,) = void_notes([*void, probe("colocated", 0.0)])
    assert told.startswith("2 of 2 split probes are void")
    assert "20 ms" in told


def test_nothing_lacks_nothing() -> None:
    assert knee_notes([entry(1, "", "")]) == to_settle([entry(1, "", "")], []) == void_notes([probe("split", 0.0)]) == []
