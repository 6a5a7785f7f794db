"""`splitpoint bench handover` between two CPU processes: the same commands, nodes and checks as between two GPUs."""

from __future__ import annotations

import pytest

from coordinator.bench.handover import HandoverSpec, measure, table

pytest.importorskip("torch")


@pytest.mark.ucx
@pytest.mark.timeout(120)
async def test_bytes_arrive_where_they_belong_and_every_part_is_timed() -> None:
    pytest.importorskip("ucxx")
    spec = HandoverSpec(
        device="cpu",
        layers=2,
        layer_block_bytes=8192,
        cache_blocks=16,
        sizes_blocks=(2, 5),
        transports=("ucx", "grpc"),
        repeats=2,
    )
    # It compares the engine blocks of both sides after the first hand-over of each row, and raises when they differ.
    record = await measure(spec)
    assert [(row["transport"], row["bytes"]) for row in record["pulls"]] == [
        ("ucx", 2 * 16384),
        ("ucx", 5 * 16384),
        ("grpc", 2 * 16384),
        ("grpc", 5 * 16384),
    ]
    assert set(record["raw_ucx"]) == {str(2 * 16384), str(5 * 16384)}
    for row in record["pulls"]:
        assert all(len(samples) == 2 for samples in row["samples_s"].values())
        assert row["median_s"]["total"] >= row["median_s"]["pull"] > row["median_s"]["rank"] > row["median_s"]["wire"] > 0
    for row in record["asked_before"]:
        assert all(len(samples) == 2 for samples in row["samples_s"].values())
        assert row["median_s"]["answered"] > row["median_s"]["verified"]
    assert len(table(record).splitlines()) == 3 + 4 + 2 + 4
