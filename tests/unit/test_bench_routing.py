"""`splitpoint bench routing`: what a replay counts, and that the commands run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.bench.routing_scale import POLICIES, ScaleSpec, measure
from coordinator.bench.routing_trace import LruCache, ReplaySpec, as_it_comes, in_hindsight, load_ratios, replay, table
from coordinator.cli import app
from coordinator.compare.traces import HASH_BLOCK_TOKENS, Row, WorkloadError, parse_trace

ROOT = Path(__file__).resolve().parents[2]


def conversations(requests: int = 900, users: int = 30, seed: int = 1) -> list[Row]:
    """Users that come back, each prompt their last one and a few blocks more; one beginning that all share."""
    generator = np.random.default_rng(seed)
    histories: list[list[int]] = [[0] for _ in range(users)]
    fresh = 1
    rows = []
    for number in range(requests):
        user = int(generator.integers(users))
        if len(histories[user]) > 40:
            histories[user] = [0]
        more = int(generator.integers(1, 6))
        histories[user] = histories[user] + list(range(fresh, fresh + more))
        fresh += more
        rows.append(Row(number * 0.5, len(histories[user]) * HASH_BLOCK_TOKENS, 100, tuple(histories[user])))
    return rows


def test_a_cache_forgets_what_was_used_least_recently_the_end_of_a_prompt_first() -> None:
    cache = LruCache(4)
    one, two = Row(0, 3 * HASH_BLOCK_TOKENS, 1, (1, 2, 3)), Row(0, 2 * HASH_BLOCK_TOKENS, 1, (7, 8))
    assert cache.hit_tokens(one) == 0
    assert cache.hit_tokens(one) == 3 * HASH_BLOCK_TOKENS - 1, "a token is left to compute"
    assert cache.hit_tokens(two) == 0
    assert cache.hit_tokens(one) == 2 * HASH_BLOCK_TOKENS, "its last block made room"


def test_load_is_compared_in_every_window_and_no_other() -> None:
    # Worker 0 gets it all in the first half minute, worker 1 in the second: each window of a whole minute sees both, until the
    # first work has left it.
    given = [(float(at), 0 if at < 30 else 1, 10) for at in range(60)] + [(60.0, 1, 10), (75.0, 0, 10)]
    ratios, mean_tokens = load_ratios(given, 2)
    assert ratios[0] == pytest.approx(1.0, abs=0.05)
    # At 75 s the window holds 14 of the first worker's thirty, its new one, and 31 of the second's.
    assert ratios.max() == pytest.approx(31 / ((14 + 31) / 2))
    assert 150 < mean_tokens <= 310
    assert len(load_ratios([], 2)[0]) == 0


def test_prefix_aware_keeps_most_of_what_one_cache_would_hit_and_shares_the_load() -> None:
    rows = conversations()
    record = replay(rows, ReplaySpec(workers=3, cache_tokens=600 * HASH_BLOCK_TOKENS, seeds=(1,)))
    runs = {run["policy"]: run for run in record["runs"]}
    offline = runs["prefix_aware"]["offline_hit_rate"]
    assert runs["prefix_aware"]["hit_rate"] >= 0.9 * offline
    assert runs["prefix_aware"]["worst_load_ratio"] <= 1.3
    for name in ("least_loaded", "power_of_two", "round_robin"):
        assert runs[name]["hit_rate"] < runs["prefix_aware"]["hit_rate"]
        assert runs[name]["expected_hit_rate"] == 0
    # The index is a model of the caches, so what it expects is what they have.
    assert runs["prefix_aware"]["expected_hit_rate"] == pytest.approx(runs["prefix_aware"]["hit_rate"], rel=0.02)
    assert all(run["hit_rate"] <= run["offline_hit_rate"] for run in record["runs"])
    assert "prefix_aware" in table(record)


def test_balance_is_measured_against_what_can_be_known_before_and_afterwards() -> None:
    # Two small prompts and then one of their size together: who knows it puts the two on one worker.
    work = [(start + at, tokens) for start in (0.0, 100.0) for at, tokens in ((0.0, 10), (0.1, 10), (0.2, 20))]
    for place, sums in ((as_it_comes, {10, 30}), (in_hindsight, {20})):
        given = place(work, 2)
        assert [(at, tokens) for at, _, tokens in given] == work
        for start in (0.0, 100.0):
            burst = [(which, tokens) for at, which, tokens in given if start <= at < start + 60]
            assert {sum(tokens for which, tokens in burst if which == worker) for worker in range(2)} == sums


def test_the_index_forgets_with_caches_that_hold_few_prompts() -> None:
    rows = conversations()
    small = ReplaySpec(workers=3, cache_tokens=40 * HASH_BLOCK_TOKENS, seeds=(1,), policies=("prefix_aware",))
    (run,) = replay(rows, small)["runs"]
    assert run["expected_hit_rate"] == pytest.approx(run["hit_rate"], rel=0.05)


def test_a_trace_without_prefixes_is_refused() -> None:
    with pytest.raises(WorkloadError, match="hash_ids"):
        replay([Row(0.0, 10, 1), Row(1.0, 10, 1)], ReplaySpec())


@pytest.mark.slow
def test_on_the_conversation_trace() -> None:
    file = ROOT.parent / "shared" / "traces" / "mooncake_fast25_conversation.jsonl"
    if not file.exists():
        pytest.skip("the trace is not on this machine")
    spec = ReplaySpec(workers=3, cache_tokens=16_777_216 // 3, seeds=(1,), policies=("prefix_aware", "least_loaded"))
    aware, loaded = replay(parse_trace(file.read_text()), spec)["runs"]
    assert aware["hit_rate"] >= 0.9 * aware["offline_hit_rate"]
    assert aware["hit_rate"] > loaded["hit_rate"]
    assert aware["worst_load_ratio"] <= 1.3


def test_every_policy_is_timed_by_the_real_code() -> None:
    record = measure(ScaleSpec(workers=40, gateways=2, decisions=60, heartbeat_every=20, in_flight=10, prompt_tokens=600))
    assert [(row["policy"], row["choice"]) for row in record["decisions"]] == [(p, k) for p in POLICIES for k in ("pair", "solo")]
    assert all(0 < row["cpu_ms"]["p50"] <= row["cpu_ms"]["p99"] for row in record["decisions"])
    assert {row["case"]: row["actions"] for row in record["reconcile"]} == {
        "nothing to do": 0,
        "a tenth lost": 8,
        "half of them surplus": 20,
        "all still to start": 40,
    }


def test_the_commands_print_and_write_their_record(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "record.json"
    trace.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": int(row.arrival_s * 1000),
                    "input_length": row.input_tokens,
                    "output_length": row.output_tokens,
                    "hash_ids": row.hash_ids,
                }
            )
            + "\n"
            for row in conversations(150)
        )
    )
    ran = CliRunner().invoke(app, ["bench", "routing", "--trace", str(trace), "--workers", "2", "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    assert "of offline" in ran.output
    assert json.loads(out.read_text())["kind"] == "bench-routing-trace"
    ran = CliRunner().invoke(app, ["bench", "routing", "--workers", "20", "--gateways", "1", "--decisions", "10"])
    assert ran.exit_code == 0, ran.output
    assert "reconcile" in ran.output
    ran = CliRunner().invoke(
        app, ["bench", "routing", "--workers", "40", "--gateways", "1", "--decisions", "10", "--placement", "require_rack"]
    )
    assert ran.exit_code == 0, ran.output
    assert "placement of pairs require_rack" in ran.output
    ran = CliRunner().invoke(app, ["bench", "routing", "--placement", "moon"])
    assert ran.exit_code == 2
    assert "prefer_node" in ran.output
    ran = CliRunner().invoke(app, ["bench", "routing", "--trace", str(tmp_path / "missing.jsonl")])
    assert ran.exit_code == 1
    assert "missing.jsonl" in ran.output
