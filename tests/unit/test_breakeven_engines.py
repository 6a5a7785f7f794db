"""The break-even map on simulated engines in virtual time: a scheduler with queues and batches, not the model's own formulas."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.compare.breakeven.build import build
from coordinator.compare.breakeven.map import BreakEvenMap, Source, Winner
from coordinator.compare.load import ArmTarget, run_probe
from coordinator.compare.proof.engine_arms import DECODE_SEQUENCE_S, PREFILL_TOKEN_S, STEP_BASE_S
from coordinator.compare.proof.engine_world import BASELINE, CHALLENGER, DEFAULT_CHUNK, EngineCell, World, pool_name, world
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.workload import WorkloadSpec, make
from tests.support.planted import MANIFEST
from tests.support.records import comparison

pytestmark = pytest.mark.timeout(120)

SLO = {"ttft_s": 0.6, "tpot_s": 0.12, "itl_p99_s": None, "ttft_s_per_token": 0.0}
SEEDS, REQUESTS = (1, 2, 3), 40
SEEN = ((24, 4, (1.0, 3.0)), (24, 24, (0.15, 0.4)), (160, 4, (0.25, 0.7)), (160, 24, (0.08, 0.2)))
"""Prompt and output tokens, requests/s and accelerator; together from a calm to a busy system."""
UNSEEN = ((40, 6, (1.0, 2.0)), (100, 16, (0.1, 0.25)))
"""Between them."""


async def measure(shapes: Sequence[tuple[int, int, Sequence[float]]]) -> list[tuple[str, dict[str, Any]]]:
    """A record of each shape: one prefill and one decode engine against two colocated ones."""
    made: World = world(EngineCell(name="map", kind="split"), 1)
    base: dict[str, Any] = json.loads(comparison().to_json())
    records = []
    async with made.client:
        for arm in (CHALLENGER, BASELINE):
            made.client.know(arm, ArmTarget(arm, (pool_name(arm, DEFAULT_CHUNK),)))
        for prompt, output, loads in shapes:
            probes = []
            for seed in SEEDS:
                spec = WorkloadSpec(seed=seed, requests=REQUESTS, prompt_tokens=(prompt, prompt), output_tokens=(output, output))
                for load in loads:
                    for arm in (CHALLENGER, BASELINE):
                        probe = await run_probe(
                            made.client,
                            make(spec).salted(f"{prompt}/{output}/{seed}/{load}/{arm}"),
                            path=arm,
                            rate_per_s=2 * load,
                            deadline_s=600.0,
                            now=made.now,
                            warm_up=4,
                        )
                        probes.append(dataclasses.asdict(probe))
            records.append((f"{prompt}-{output}", {**base, "probes": probes, "manifest": MANIFEST, "slo": SLO, "usage": []}))
    return records


@pytest.fixture(scope="module")
def seen() -> BreakEvenMap:
    return build(run_virtual(measure(SEEN), 0.0005))


def test_the_engines_step_time_is_found(seen: BreakEvenMap) -> None:
    assert seen.fit is not None
    found = seen.fit.model.coefficients
    for value, truth in (
        (found.step_s, STEP_BASE_S),
        (found.prompt_token_s, PREFILL_TOKEN_S),
        (found.decode_token_s, DECODE_SEQUENCE_S),
    ):
        assert value == pytest.approx(truth, rel=0.3)
    assert seen.fit.residual < 0.15


def test_between_what_was_measured_it_is_near_and_no_winner_is_wrong(seen: BreakEvenMap) -> None:
    checked = build(run_virtual(measure(UNSEEN), 0.0005)).measured
    assert len(checked) == 4
    for cell in checked:
        said = seen.predict(cell.input_tokens, cell.output_tokens, cell.load, None)
        assert cell.ratio is not None
        assert said.ratio is not None
        assert abs(math.log(said.ratio / cell.ratio)) < math.log(1.25)
        if said.winner is not Winner.NONE:
            assert said.winner.value == ("split" if cell.ratio > 1 else "colocated")
        assert said.source is Source.FITTED
