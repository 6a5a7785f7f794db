"""Request by request, and what is usually so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.compare.load import Outcome, Probe
from coordinator.compare.paired import WORST, paired
from coordinator.compare.priors import priors


def probe(path: str, e2es_s: list[float | None], *, void: str = "", rate: float = 1.0) -> Probe:
    """One request per time; None failed. TTFT is a tenth."""
    outcomes = [
        Outcome(
            index=index,
            due_s=0.0,
            lag_s=0.0,
            wanted_tokens=10,
            tokens=10,
            ttft_s=None if e2e_s is None else e2e_s / 10,
            e2e_s=e2e_s,
            failure="late" if e2e_s is None else "",
        )
        for index, e2e_s in enumerate(e2es_s)
    ]
    return Probe(path=path, seed=1, rate_per_s=rate, workload_digest="", outcomes=outcomes, void=void)


def test_differences_are_per_request_over_the_means_of_an_arms_probes() -> None:
    found = paired([probe("split", [1.0, 3.0]), probe("split", [2.0, 3.0]), probe("colocated", [1.0, 4.0])])
    assert found is not None
    assert (found.requests, found.lost) == (2, 1)
    assert found.median_s == pytest.approx((0.5 - 1.0) / 2)
    assert found.p90_s == pytest.approx(0.5)
    (worst,) = found.worst
    assert (worst.index, worst.output_tokens) == (0, 10)
    assert worst.e2e_s == pytest.approx(0.5)
    assert worst.ttft_s == pytest.approx(0.05)
    assert worst.tpot_s == pytest.approx(0.05)


def test_only_requests_that_both_answered_under_the_same_load_are_paired() -> None:
    assert paired([probe("split", [1.0]), probe("colocated", [1.0], rate=2.0)]) is None
    assert paired([probe("split", [1.0], void="late"), probe("colocated", [1.0])]) is None
    found = paired([probe("split", [None, 2.0]), probe("colocated", [1.0, 1.0])])
    assert found is not None
    assert found.requests == 1
    assert found.worst[0].index == 1


def test_the_worst_come_first_and_are_few() -> None:
    found = paired([probe("split", [1.0 + i for i in range(30)]), probe("colocated", [1.0] * 30)])
    assert found is not None
    assert [loss.index for loss in found.worst] == list(range(29, 29 - WORST, -1))


def test_a_request_that_gained_is_no_loss() -> None:
    found = paired([probe("split", [1.0]), probe("colocated", [2.0])])
    assert found is not None
    assert (found.lost, found.worst) == (0, ())


BASE: dict[str, Any] = {
    "tpot_slo_s": 0.05, "unloaded_tpot_s": 0.02, "ttft_slo_s": 0.4, "unloaded_ttft_s": 0.1, "mean_output_tokens": 300
}  # fmt: skip


@pytest.mark.parametrize(
    ("multiple", "words"),
    [
        (4.0, "colocating usually wins"),
        (3.0, "as good or a little better"),
        (2.2, "break-even"),
        (1.8, "wins a little"),
        (1.3, "(1.1 to 1.8)"),
    ],
)
def test_the_sign_follows_the_tightness_of_tpot(multiple: float, words: str) -> None:
    first, second = priors(**{**BASE, "tpot_slo_s": multiple * 0.02})
    assert words in first
    assert f"{multiple:.1f} times" in first
    assert "4.0 times the unloaded prefill" in second


def test_short_outputs_and_few_units_speak_against_splitting() -> None:
    lines = priors(**{**BASE, "mean_output_tokens": 60, "units": 5})
    assert "outputs of 60 tokens" in lines[2]
    assert "5 workers" in lines[3]
    assert "12%" in lines[3]
    assert len(priors(**BASE)) == 2


@pytest.mark.parametrize("key", ["tpot_slo_s", "unloaded_tpot_s", "ttft_slo_s", "unloaded_ttft_s"])
def test_times_are_positive(key: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        priors(**{**BASE, key: 0.0})


def test_losses_can_be_recorded() -> None:
    found = paired([probe("split", [2.0]), probe("colocated", [1.0])])
    assert found is not None
    assert dataclasses.asdict(found)["worst"][0]["e2e_s"] == pytest.approx(1.0)
