"""The transfer benchmark's arithmetic and its report, on made-up samples; what it runs is in the contract tier."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coordinator.bench import transfer_report
from coordinator.bench.transfer import BOUNDS, CONNECTOR, MEMORY, NIXL, RAW_GRPC, Outcome, Plan, cases
from coordinator.bench.transfer_summary import Sample, bound, paired_ratio, rate, rates
from kvtransfer.bench.bounds import AT_ONCE
from kvtransfer.bench.shape import LAYOUTS, MIB, REAL, SYNTHETIC, Case

GB = 10**9


def sample(path: str, gigabytes_per_s: float, repeat: int = 1, **fields: object) -> Sample:
    values: dict[str, object] = {"layout": REAL.name, "size_mib": 64.0, "staged": False, "check": True, **fields}
    return Sample(path=path, repeat=repeat, num_bytes=GB, seconds=1 / gigabytes_per_s, **values)  # type: ignore[arg-type]


def test_a_case_moves_whole_blocks_that_lie_in_the_cache() -> None:
    assert REAL.block_bytes == 2_949_120
    assert SYNTHETIC.piece_bytes * 8 == REAL.piece_bytes
    for layout in LAYOUTS.values():
        for size_mib in (1, 32, 128):
            case = Case(layout.name, size_mib * MIB, transfers=3)
            assert case.total_bytes == 3 * case.num_blocks * layout.block_bytes
            assert abs(case.num_blocks * layout.block_bytes - size_mib * MIB) <= layout.block_bytes
            for side in ("sender", "receiver"):
                ids = case.block_ids(side)
                assert len(set(ids)) == len(ids) == case.num_blocks
                assert 0 <= min(ids) <= max(ids) < layout.cache_blocks
                assert ids == case.block_ids(side)


def test_a_rate_is_a_median_and_quartiles() -> None:
    found = rate([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.median, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 5)
    assert rate([7.0]).low == rate([7.0]).high == 7.0


def test_samples_of_one_case_go_together() -> None:
    samples = [sample("ucx", 2, 1), sample("ucx", 4, 2), sample("ucx", 9, 1, check=False), sample("ucx", 8, 1, staged=True)]
    assert [(key[3], key[4], r.count) for key, r in rates(samples).items()] == [
        (False, True, 2),
        (False, False, 1),
        (True, True, 1),
    ]


def test_a_ratio_compares_the_same_repeat() -> None:
    """The machine was three times slower in the second repeat: that is not a difference between paths."""
    samples = [sample("ucx", 6, 1), sample(NIXL, 3, 1), sample("ucx", 2, 2), sample(NIXL, 1, 2), sample("ucx", 50, 3)]
    found = paired_ratio(samples, "ucx", NIXL, layout=REAL.name)
    assert found is not None
    assert (found.low, found.median, found.high, found.count) == (2.0, 2.0, 2.0, 2)
    assert paired_ratio(samples, "ucx", CONNECTOR, layout=REAL.name) is None
    assert paired_ratio(samples, "ucx", NIXL, layout=SYNTHETIC.name) is None


def test_the_bound_is_the_slowest_stage_or_all_of_them_over_the_cores() -> None:
    parts = {"memcpy": 4.0, "memcpy_crc32c": 2.5, "readv_crc32c": 2.0, "crc32c": 10.0}
    assert bound(parts, cores=64, reads=True) == pytest.approx(2.0)
    assert bound(parts, cores=1, reads=True) == pytest.approx(1 / (0.25 + 0.4 + 0.5))
    assert bound(parts, cores=2, reads=True) == pytest.approx(2 / 1.15)
    assert bound(parts, cores=64) == pytest.approx(2.5)
    assert bound(parts, cores=1) == pytest.approx(1 / 0.75)


def everything() -> Outcome:
    speeds = {"ucx": 4.0, "grpc": 0.8, RAW_GRPC: 1.0, NIXL: 5.0} | dict.fromkeys(BOUNDS, 8.0) | {AT_ONCE: 5.0}
    samples = [
        sample(path, speed, repeat, size_mib=size, staged=path == RAW_GRPC)
        for path, speed in speeds.items()
        for size in (32.0, 64.0)
        for repeat in (1, 2, 3)
    ]
    samples += [sample("grpc", 0.9, repeat, size_mib=32.0, staged=True) for repeat in (1, 2, 3)]
    return Outcome(samples, missing={CONNECTOR: "not installed: nixl"})


def test_the_last_line_names_every_figure_and_what_is_missing() -> None:
    said = transfer_report.lines(everything())
    assert said[-1] == "ucx 4.00 GB/s, grpc 0.80 GB/s, NixlConnector missing, NIXL READ 5.00 GB/s"
    assert f"missing: {CONNECTOR}: not installed: nixl" in said
    assert "ucx / NIXL READ: 0.80 (quartiles 0.80 to 0.80)" in said
    assert "stages at once, GB/s: 5.00" in said
    assert "ucx / stages at once: 0.80 (quartiles 0.80 to 0.80)" in said
    assert "grpc / gRPC stream, slot to slot: 0.90 (quartiles 0.90 to 0.90)" in said


def test_the_record_holds_samples_machine_and_plan(tmp_path: Path) -> None:
    plan = Plan.make(quick=True, model=Path("models/none"))
    file = tmp_path / "record.json"
    transfer_report.write(file, transfer_report.record(everything(), plan))
    found = json.loads(file.read_text())
    assert found["format"] == transfer_report.FORMAT
    assert len(found["samples"]) == len(everything().samples)
    assert found["ratios"]["ucx / NIXL READ"]["median"] == pytest.approx(0.8)
    assert found["ratios"]["ucx / bound"] == pytest.approx(4.0 / found["ratios"]["bound, GB/s"])
    assert found["missing"] == {CONNECTOR: "not installed: nixl"}
    assert {"hardware", "versions", "git_commit", "command", "plan"} <= set(found)


@pytest.mark.slow
def test_it_draws(tmp_path: Path) -> None:
    transfer_report.plot(tmp_path / "rates.svg", everything())
    text = (tmp_path / "rates.svg").read_text()
    assert "NIXL READ" not in text or text.startswith("<?xml")
    assert len(text) > 10_000


def test_each_half_can_have_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 5})
    assert Plan.make(quick=True, model=Path("models/none")).shares() is None
    assert Plan.make(quick=True, model=Path("models/none"), own_cores=True).shares() == {"sender": [2], "receiver": [5, 7]}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})
    with pytest.raises(ValueError, match="one core"):
        Plan.make(quick=True, model=Path("models/none"), own_cores=True)


def test_every_path_is_timed_at_every_size() -> None:
    plan = Plan.make(quick=False, model=Path("models/none"))
    for path in (MEMORY, "ucx", "grpc", NIXL, CONNECTOR, RAW_GRPC):
        sizes = {case.size_bytes // MIB for case in cases(plan, path) if case.layout == REAL.name}
        assert sizes == set(plan.sizes)
    assert {case.layout for case in cases(plan, "ucx")} == {REAL.name, SYNTHETIC.name}
    assert {case.layout for case in cases(plan, CONNECTOR)} == {REAL.name}
    assert {case.what for case in cases(plan, MEMORY)} == set(BOUNDS)
    assert any(not case.check for case in cases(plan, "ucx"))
