"""What is said of a stream beside transfers, on made-up turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.bench import transfer_report
from coordinator.bench.transfer_decode import ALONE, BESIDE, ORDER, DecodePlan, Turn, change, judged, lines, quantiles, record

ALONE_S, BESIDE_S = 0.020, 0.021


def turns() -> list[Turn]:
    """Two quads; the machine is twice as slow in the second. One token in a hundred waits for a scatter."""
    made = []
    for quad, slower in enumerate((1, 2)):
        for arm in ORDER:
            gap_s = slower * (ALONE_S if arm == ALONE else BESIDE_S)
            last_s = gap_s if arm == ALONE else 0.1
            made.append(Turn(arm, quad, (*(gap_s,) * 59, last_s), 0.0 if arm == ALONE else 190e6))
    return made


def test_each_arm_comes_first_and_last_as_often() -> None:
    places = {arm: sum(place for place, each in enumerate(ORDER) if each == arm) for arm in (ALONE, BESIDE)}
    assert places[ALONE] == places[BESIDE]
    assert ORDER.count(ALONE) == ORDER.count(BESIDE)


def test_the_change_is_taken_within_a_quad() -> None:
    found = change(turns())
    assert (found.median, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert found.count == 2


def test_quantiles_are_of_all_tokens_of_an_arm() -> None:
    beside = quantiles(turns(), BESIDE)
    assert beside["count"] == 240
    assert beside["max_s"] == beside["p99_s"] == 0.1
    assert quantiles(turns(), ALONE)["p99_s"] == pytest.approx(0.04)


def test_the_last_line_states_rate_change_and_stall() -> None:
    assert lines(turns())[-1] == ("median ITL +5.0% (quartiles +5.0% to +5.0%) beside 190 MB/s, p99 stall +60.0 ms")
    assert judged(turns())["bytes_per_s"] == 190e6


def test_the_record_holds_every_turn(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    transfer_report.write(file, record(turns(), DecodePlan(Path("models/none"))))
    found = json.loads(file.read_text())
    assert [turn["arm"] for turn in found["turns"]] == list(ORDER) * 2
    assert found["summary"] == lines(turns())[-1]
    assert {"hardware", "versions", "git_commit", "command", "plan"} <= set(found)
