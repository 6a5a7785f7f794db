"""Workloads from every source: seeded, counted, honest about what was changed; files refused by line, fields by name."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator import cli
from coordinator.compare import draw
from coordinator.compare.describe import bins, describe
from coordinator.compare.shapes import RequestShape, Segment, Shapes, cut, hit_share, materialise
from coordinator.compare.sources import Material, check, read, windows
from coordinator.compare.traces import Row, WorkloadError, is_coarse, parse_prompts, parse_trace, spread_batches
from coordinator.compare.workload import SALT_TOKENS, TUNING_SEEDS_FROM
from scripts.guide import ROOT, console_commands

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-01 10:00:00.0000000,100,10
2024-05-01 10:00:01.5000000,2,20
2024-05-01 10:00:02.0000001,3000,30
2024-05-01 10:00:06.0000000,400,40
"""
HASHED = "\n".join(
    json.dumps({"timestamp": at, "input_length": length, "output_length": 8, "hash_ids": ids})
    for at, length, ids in (
        (0, 1500, [1, 2, 3]),
        (0, 1024, [1, 2]),
        (0, 600, [9, 10]),
        (3000, 1500, [1, 2, 4]),
        (3000, 700, [9, 11]),
        (3000, 512, [12]),
    )
)
PLAIN = "arrival_s,input_tokens,output_tokens,client_id\n0.0,10,5,1\n0.5,20,6,2\n2.0,30,7,1\n"
SYNTHETIC: dict[str, Any] = {
    "kind": "synthetic",
    "requests": 400,
    "input": {"kind": "lognormal", "median": 200, "sigma": 0.7, "low": 10, "high": 400},
    "output": {"kind": "uniform", "low": 4, "high": 8},
}


def synthetic(**changes: Any) -> Material:
    return Material(check({**SYNTHETIC, **changes}))


def trace(text: str, **changes: Any) -> Material:
    return Material(check({"kind": "trace", "file": "t", **changes}), rows=tuple(parse_trace(text)))


def prompts(text: str, **changes: Any) -> Material:
    material = Material(check({"kind": "prompts", "file": "p", **changes}), prompts=tuple(parse_prompts(text)))
    return Material(material.source, prompts=material.prompts, encode=lambda words: [ord(letter) for letter in words])


def dues(shapes: Shapes) -> list[float]:
    return list(itertools.accumulate(request.gap for request in shapes.requests))


class TestDraws:
    @pytest.mark.parametrize(
        ("spec", "cv"),
        [
            (draw.Even(kind="even"), 0.0),
            (draw.Poisson(kind="poisson"), 1.0),
            (draw.Gamma(kind="gamma", cv=0.5), 0.5),
            (draw.Gamma(kind="gamma", cv=3.0), 3.0),
        ],
    )
    def test_gaps_have_unit_mean_and_their_variation(self, spec: Any, cv: float) -> None:
        found = draw.gaps(spec, np.random.default_rng(1), 100_000)
        assert found.mean() == pytest.approx(1.0, rel=1e-12)
        assert found.std() == pytest.approx(cv, rel=0.05, abs=1e-9)

    def test_bursts_come_in_groups_of_their_size_at_unit_rate(self) -> None:
        found = draw.gaps(draw.Bursts(kind="bursts", size=5, within=0.01), np.random.default_rng(2), 100_000)
        assert found.mean() == pytest.approx(1.0, rel=1e-12)
        within = float(np.median(found))
        assert within == pytest.approx(0.01, rel=0.05)
        begins = np.count_nonzero(found != within)
        assert len(found) / begins == pytest.approx(5, rel=0.05)

    def test_a_short_sequence_of_long_groups_has_unit_rate_too(self) -> None:
        """Its one group may never end; without time between groups there would be nothing to scale."""
        for seed in range(20):
            found = draw.gaps(draw.Bursts(kind="bursts", size=1000, within=0.0), np.random.default_rng(seed), 20)
            assert found.mean() == pytest.approx(1.0)
            wide = draw.gaps(draw.Gamma(kind="gamma", cv=20), np.random.default_rng(seed), 1)
            assert wide.tolist() == [1.0]

    def test_clipping_is_counted(self) -> None:
        spec = draw.LogNormal(kind="lognormal", median=100, sigma=1.0, low=50, high=200)
        found, clipped = draw.lengths(spec, np.random.default_rng(3), 10_000)
        # P(|z| > ln 2) = 0.488
        assert clipped / 10_000 == pytest.approx(0.488, abs=0.02)
        assert (found.min(), found.max()) == (50, 200)
        assert np.median(found) == pytest.approx(100, rel=0.03)


class TestSynthetic:
    def test_a_seed_is_one_sequence_and_names_it(self) -> None:
        first, again, other = (synthetic().shapes(seed) for seed in (1, 1, 2))
        assert first == again
        assert first.digest == again.digest != other.digest
        assert materialise(first) == materialise(again)

    def test_tokens_have_the_planned_lengths(self) -> None:
        shapes = synthetic(requests=50).shapes(1)
        made = materialise(shapes)
        assert [len(request.prompt_token_ids) for request in made.requests] == [r.input_tokens for r in shapes.requests]
        assert made.due_s(2.0) == pytest.approx([due / 2 for due in dues(shapes)])
        assert all(1000 <= token < 20000 for request in made.requests for token in request.prompt_token_ids)

    def test_distinct_inputs_share_nothing(self) -> None:
        assert hit_share(synthetic().shapes(1).requests) == 0
        heads = [request.prompt_token_ids[:SALT_TOKENS] for request in materialise(synthetic().shapes(1)).requests]
        assert len(set(heads)) == len(heads)

    def test_a_pool_is_shared_after_its_first_use(self) -> None:
        pool = {"kind": "pool", "count": 4, "tokens": 64}
        shapes = synthetic(prefix=pool).shapes(1)
        total = sum(request.input_tokens for request in shapes.requests)
        assert hit_share(shapes.requests) == pytest.approx(64 * (400 - 4) / total)
        made = materialise(shapes).requests
        assert len({request.prompt_token_ids[:64] for request in made}) == 4
        assert len({request.prompt_token_ids[64:] for request in made}) == 400

    def test_a_skewed_pool_has_a_favourite(self) -> None:
        shapes = synthetic(requests=3000, prefix={"kind": "pool", "count": 3, "tokens": 16, "skew": 1.0}).shapes(1)
        names = [request.shared[0].name for request in shapes.requests]
        # 1 : 1/2 : 1/3
        assert names.count("pool/0") / 3000 == pytest.approx(6 / 11, abs=0.03)

    def test_a_turn_repeats_the_conversation(self) -> None:
        shapes = synthetic(requests=60, prefix={"kind": "turns", "turns": 3, "open": 2, "system": 32}).shapes(1)
        by_talk: dict[str, list[RequestShape]] = {}
        for request in shapes.requests:
            assert request.shared[0] == Segment("system", 32)
            by_talk.setdefault(request.shared[1].name, []).append(request)
        assert max(len(turns) for turns in by_talk.values()) == 3
        for turns in by_talk.values():
            for before, after in itertools.pairwise(turns):
                assert after.shared[: len(before.shared)] == before.shared
                assert after.shared[len(before.shared)].tokens == before.output_tokens
        ids = [request.prompt_token_ids for request in materialise(shapes).requests]
        for request, tokens in zip(shapes.requests, ids, strict=True):
            assert len(tokens) == request.input_tokens

    def test_salting_keeps_what_is_shared_and_changes_every_head(self) -> None:
        plain = materialise(synthetic(requests=100, prefix={"kind": "pool", "count": 3, "tokens": 32}).shapes(1))
        one, two = plain.salted("a"), plain.salted("b")
        assert len({request.prompt_token_ids[:32] for request in one.requests}) == 3
        heads = [{request.prompt_token_ids[:SALT_TOKENS] for request in made.requests} for made in (plain, one, two)]
        assert not any(first & second for first, second in itertools.combinations(heads, 2))

    def test_limits_clip_or_drop_and_count(self) -> None:
        clipped = synthetic(max_input_tokens=200).shapes(1)
        dropped = synthetic(max_input_tokens=200, over="drop").shapes(1)
        assert clipped.counts.dropped == 0
        assert dropped.counts.dropped == 400 - len(dropped.requests)
        assert max(r.input_tokens for r in (*clipped.requests, *dropped.requests)) <= 200
        over = sum(request.input_tokens > 200 for request in synthetic().shapes(1).requests)
        assert dropped.counts.dropped == over
        assert clipped.counts.input_clipped == over + synthetic().shapes(1).counts.input_clipped
        # The rest keep their times; only the unit changes.
        kept = [
            due
            for due, request in zip(dues(synthetic().shapes(1)), synthetic().shapes(1).requests, strict=True)
            if request.input_tokens <= 200
        ]
        ratios = {round(a / b, 9) for a, b in zip(kept, dues(dropped), strict=True)}
        assert len(ratios) == 1

    def test_nothing_left_is_refused(self) -> None:
        with pytest.raises(WorkloadError, match="every request"):
            synthetic(max_input_tokens=4, over="drop").shapes(1)


class TestTraces:
    def test_the_three_sets_of_columns(self) -> None:
        azure, hashed, plain = (parse_trace(text) for text in (AZURE, HASHED, PLAIN))
        assert [(row.arrival_s, row.input_tokens, row.output_tokens) for row in azure[:2]] == [(0.0, 100, 10), (1.5, 2, 20)]
        assert azure[2].arrival_s == pytest.approx(2.0)
        assert hashed[3] == type(hashed[3])(3.0, 1500, 8, (1, 2, 4))
        assert [row.arrival_s for row in plain] == [0.0, 0.5, 2.0]

    def test_time_is_scaled_to_unit_rate_and_not_redrawn(self) -> None:
        shapes = trace(AZURE, requests=10).shapes(1)
        assert shapes.native_rate_per_s == pytest.approx(4 / 6)
        assert dues(shapes) == pytest.approx([0.0, 1.0, 2 * 4 / 6, 4.0], abs=1e-6)
        assert [request.output_tokens for request in shapes.requests] == [10, 20, 30, 40]
        assert shapes.counts.input_lengthened == 1
        assert "every seed" in shapes.notes[0]

    def test_seeds_cut_different_windows_of_unit_rate(self) -> None:
        long = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i * (1 + i / 50)},{10 + i},5\n" for i in range(100))
        made = [trace(long, requests=20).shapes(seed) for seed in range(5)]
        assert len({shapes.requests[0].input_tokens for shapes in made}) > 1
        for shapes in made:
            assert dues(shapes)[-1] == pytest.approx(20)
            lengths = [request.input_tokens for request in shapes.requests]
            assert lengths == list(range(lengths[0], lengths[0] + 20))

    def test_coarse_stamps_are_spread_with_a_fixed_seed_and_counted(self) -> None:
        text = "\n".join(json.dumps({"timestamp": 3000 * (i // 10), "input_length": 10, "output_length": 5}) for i in range(100))
        arrivals = [row.arrival_s for row in parse_trace(text)]
        assert is_coarse(arrivals)
        moved, count = spread_batches(arrivals, np.random.default_rng(0))
        assert count == 90
        assert len(set(moved.tolist())) == 100
        assert moved[-1] < 30
        on, off = trace(text, requests=100), trace(text, requests=100, spread="off")
        assert on.shapes(1).counts.spread == 90
        assert [r.gap for r in on.shapes(1).requests] == [r.gap for r in on.shapes(2).requests]
        assert off.shapes(1).counts.spread == 0
        assert sum(request.gap == 0 for request in off.shapes(1).requests) == 91

    def test_hash_ids_are_honoured(self) -> None:
        """Of 5,836 tokens in whole blocks: 1,024 of the second request, 1,024 of the fourth, 512 of the fifth."""
        shapes = trace(HASHED, requests=10).shapes(1)
        by_length = sum(request.input_tokens for request in shapes.requests)
        made = materialise(trace(HASHED, requests=10, spread="off").shapes(1)).requests
        assert made[0].prompt_token_ids[:1024] == made[1].prompt_token_ids == made[3].prompt_token_ids[:1024]
        assert made[0].prompt_token_ids[1024:] != made[3].prompt_token_ids[1024:]
        assert hit_share(trace(HASHED, requests=10, spread="off").shapes(1).requests) == pytest.approx(2560 / by_length)
        assert hit_share(trace(HASHED, requests=10, prefixes=False).shapes(1).requests) == 0

    def test_lengths_and_blocks_scale_together(self) -> None:
        shapes = trace(HASHED, requests=10, spread="off", length_scale=0.125).shapes(1)
        assert [request.input_tokens for request in shapes.requests] == [188, 128, 75, 188, 88, 64]
        assert [segment.tokens for segment in shapes.requests[0].shared] == [64, 64, 60]
        assert {request.output_tokens for request in shapes.requests} == {1}
        whole, scaled = (trace(HASHED, requests=10, length_scale=0.125, output_scale=scale).shapes(1) for scale in (1.0, 3.0))
        assert [r.input_tokens for r in whole.requests] == [request.input_tokens for request in shapes.requests]
        assert [r.output_tokens for r in scaled.requests] == [3 * r.output_tokens for r in whole.requests]
        made = materialise(shapes).requests
        assert made[0].prompt_token_ids[:128] == made[3].prompt_token_ids[:128]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("a,b\n1,2\n", "unknown columns"),
            (PLAIN.replace("20", "x"), "line 3: input_tokens"),
            (PLAIN.replace("20", "0"), "line 3: input_tokens must be a whole number from 1 up"),
            (AZURE.replace("2024-05-01 10:00:01.5000000", "soon"), "line 3: TIMESTAMP"),
            (HASHED.replace("[9, 10]", "[9]"), "line 3: 600 tokens are 2 blocks"),
            ('{"timestamp": -1, "input_length": 3, "output_length": 3}', "line 1: timestamp"),
            ('{"timestamp": 1', "line 1: not JSON"),
            (PLAIN[: PLAIN.index("0.5")], "two rows"),
        ],
    )
    def test_broken_files_are_refused_by_line(self, text: str, why: str) -> None:
        with pytest.raises(WorkloadError, match=why):
            parse_trace(text)

    def test_rows_that_arrive_at_once_have_no_rate(self) -> None:
        text = PLAIN.replace("0.5", "0.0").replace("2.0", "0.0")
        with pytest.raises(WorkloadError, match="all at once"):
            trace(text, spread="off").shapes(1)


class TestPrompts:
    LINES = "\n".join(json.dumps(line) for line in ({"prompt": "a" * 40}, {"prompt": "a" * 32 + "b" * 8, "output_tokens": 3}))

    def test_words_are_kept_behind_room_for_the_salt(self) -> None:
        shapes = prompts(self.LINES, requests=2).shapes(1)
        made = materialise(shapes)
        assert {request.prompt_token_ids[SALT_TOKENS:] for request in made.requests} == {
            (97,) * 40, (97,) * 32 + (98,) * 8
        }  # fmt: skip
        assert {request.output_tokens for request in made.requests} == {128, 3}
        salted = made.salted("x").requests
        assert [r.prompt_token_ids[SALT_TOKENS:] for r in salted] == [r.prompt_token_ids[SALT_TOKENS:] for r in made.requests]
        assert len({request.prompt_token_ids[:SALT_TOKENS] for request in salted}) == 1

    def test_real_prefixes_and_repeats_are_seen(self) -> None:
        shapes = prompts(self.LINES, requests=4).shapes(1)
        assert shapes.counts.repeated == 2
        assert "2 of 4" in shapes.notes[0]
        # The second prompt finds the salt's room and two blocks, 36 tokens, two whole blocks; the repeats two blocks each.
        assert hit_share(shapes.requests) == pytest.approx((32 + 32 + 32) / (4 * 44))

    def test_arrivals_of_the_file_are_kept(self) -> None:
        text = "\n".join(json.dumps({"token_ids": [5, 6, 7], "arrival_s": at}) for at in (0.0, 1.0, 4.0))
        assert dues(prompts(text, requests=3).shapes(1)) == pytest.approx([0.0, 0.75, 3.0])
        with pytest.raises(WorkloadError, match="at most the file's 3 lines"):
            prompts(text, requests=4).shapes(1)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "no line"),
            ('{"prompt": "a", "token_ids": [1]}', "one of them"),
            ('{"prompt": ""}', "not empty"),
            ('{"token_ids": [1, -1]}', "from 0 up"),
            ('{"token_ids": [1], "output_tokens": 0}', "output_tokens"),
            ('{"token_ids": [1], "arrival_s": 0}\n{"token_ids": [1]}', "on 1 of 2"),
        ],
    )
    def test_broken_lines_are_refused(self, text: str, why: str) -> None:
        with pytest.raises(WorkloadError, match=why):
            parse_prompts(text)

    def test_the_models_own_tokenizer_reads_the_text(self, tmp_path: Path, checkpoint: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "The capital of France is"}\n{"prompt": "The capital of Italy is"}\n')
        (tmp_path / "w.toml").write_text(f'kind = "prompts"\nfile = "p.jsonl"\nrequests = 2\ntokenizer = "{checkpoint}"\n')
        made = read(tmp_path / "w.toml").workload(1, 2)
        first, second = (request.prompt_token_ids[SALT_TOKENS:] for request in made.requests)
        assert first[:3] == second[:3]
        assert first != second
        assert len(first) == len(second) == 5

    def test_text_needs_a_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text(self.LINES)
        (tmp_path / "w.toml").write_text('kind = "prompts"\nfile = "p.jsonl"\n')
        with pytest.raises(WorkloadError, match="tokenizer: is needed"):
            read(tmp_path / "w.toml")
        with pytest.raises(WorkloadError, match=r"tokenizer\.json: No such file"):
            read(tmp_path / "w.toml", ["tokenizer=."])


class TestCaches:
    A, B, C = (RequestShape(1.0, 64, 1, (Segment(name, 64),)) for name in "abc")

    def test_the_least_recently_used_goes_first(self) -> None:
        asked = [self.A, self.B, self.A, self.C, self.A, self.B]
        assert hit_share(asked) == pytest.approx(3 / 6)
        assert hit_share(asked, capacity_tokens=128) == pytest.approx(2 / 6)
        assert hit_share(asked, capacity_tokens=64) == 0

    def test_a_part_counts_only_behind_its_beginning(self) -> None:
        behind = RequestShape(1.0, 128, 1, (Segment("x", 64), Segment("a", 64)))
        assert hit_share([self.A, behind]) == 0
        assert hit_share([behind, behind]) == 0.5

    def test_whole_blocks_only(self) -> None:
        short = RequestShape(1.0, 40, 1, (Segment("s", 31),))
        assert hit_share([short, short]) == pytest.approx(16 / 80)

    def test_a_cut_prompt_keeps_its_beginning(self) -> None:
        long = RequestShape(1.0, 100, 1, (Segment("a", 64), Segment("b", 20)))
        assert cut(long, 70) == RequestShape(1.0, 70, 1, (Segment("a", 64), Segment("b", 6)))
        shapes = Shapes(seed=1, requests=(cut(long, 70), long), first_token=10, end_token=99)
        one, two = materialise(shapes).requests
        assert one.prompt_token_ids == two.prompt_token_ids[:70]


class TestDescription:
    def test_figures_of_a_known_workload(self) -> None:
        found = describe(trace(AZURE, requests=10).shapes(1), cache_tokens=[10])
        assert (found.requests, found.rate_per_s) == (4, pytest.approx(4 / 6))
        assert found.duration_s == pytest.approx(6.0)
        assert found.input == {"mean": 876.0, "min": 4, "p50": 100, "p95": 3000, "max": 3000}
        assert found.output_tokens == 100
        assert found.dispersion is None
        assert found.hit_share_of == {10: 0.0}
        json.dumps(found.as_dict())

    def test_poisson_arrivals_have_unit_variation_and_dispersion(self) -> None:
        found = describe(synthetic(requests=20_000).shapes(1), rate_per_s=2.0)
        assert found.arrival_cv == pytest.approx(1.0, abs=0.03)
        assert found.dispersion == pytest.approx(1.0, abs=0.3)
        assert describe(synthetic(requests=20_000, arrivals={"kind": "bursts", "size": 8}).shapes(1)).dispersion > 4  # type: ignore[operator]

    def test_bins_hold_every_value_once(self) -> None:
        values = np.array([1, 2, 3, 4, 7, 8, 1023, 1024])
        found = bins(values)
        assert sum(each.count for each in found) == len(values)
        assert [(each.low, each.count) for each in found if each.count] == [(1, 1), (2, 2), (4, 2), (8, 1), (512, 1), (1024, 1)]

    @pytest.mark.parametrize(("rate", "cache"), [(0.0, []), (float("inf"), []), (1.0, [0])])
    def test_bad_arguments(self, rate: float, cache: list[int]) -> None:
        with pytest.raises(ValueError, match=r"must be|at least"):
            describe(synthetic().shapes(1), rate_per_s=rate, cache_tokens=cache)


LENGTHS = st.one_of(
    st.builds(lambda n: {"kind": "fixed", "tokens": n}, st.integers(1, 300)),
    st.builds(lambda a, b: {"kind": "uniform", "low": min(a, b), "high": max(a, b)}, st.integers(1, 99), st.integers(1, 99)),
    st.builds(lambda m, s: {"kind": "lognormal", "median": m, "sigma": s, "high": 400}, st.integers(1, 99), st.floats(0, 3)),
)
ARRIVALS = st.one_of(
    st.sampled_from([{"kind": "even"}, {"kind": "poisson"}]),
    st.builds(lambda cv: {"kind": "gamma", "cv": cv}, st.floats(0.1, 8)),
    st.builds(lambda size: {"kind": "bursts", "size": size}, st.floats(1, 50)),
)
PREFIXES = st.one_of(
    st.none(),
    st.builds(lambda n, k: {"kind": "pool", "count": n, "tokens": k}, st.integers(1, 9), st.integers(4, 99)),
    st.builds(
        lambda n, k, s: {"kind": "turns", "turns": n, "open": k, "system": s},
        st.integers(2, 5),
        st.integers(1, 4),
        st.integers(0, 40),
    ),
)


@pytest.mark.timeout(120)
@settings(max_examples=60)
@given(LENGTHS, LENGTHS, ARRIVALS, PREFIXES, st.integers(1, 40), st.one_of(st.none(), st.integers(4, 200)), st.integers(0, 9))
def test_whatever_is_specified_is_a_workload_that_can_be_sent(
    input_: Any, output: Any, arrivals: Any, prefix: Any, requests: int, limit: int | None, seed: int
) -> None:
    spec = {"kind": "synthetic", "input": input_, "output": output, "arrivals": arrivals, "prefix": prefix, "requests": requests}
    shapes = Material(check({**spec, "max_input_tokens": limit})).shapes(seed)
    made = materialise(shapes).salted("s")
    for shape, request in zip(shapes.requests, made.requests, strict=True):
        assert shape.gap >= 0
        assert len(request.prompt_token_ids) == shape.input_tokens >= SALT_TOKENS
        assert limit is None or shape.input_tokens <= limit
        assert sum(segment.tokens for segment in shape.shared) <= shape.input_tokens
        assert request.output_tokens >= 1
    for first, second in itertools.combinations(zip(shapes.requests, made.requests, strict=True), 2):
        pairs = zip(first[0].shared, second[0].shared, strict=False)
        common = sum(a.tokens for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert first[1].prompt_token_ids[:common] == second[1].prompt_token_ids[:common]
    assert 0 <= hit_share(shapes.requests) <= 1


class TestSpecification:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"kind": "magic"}, "synthetic"),
            ({"requests": 0}, "requests: "),
            ({"colour": 3}, "colour: "),
            ({"input": {"kind": "uniform", "low": 5, "high": 3}}, "input"),
            ({"arrivals": {"kind": "gamma", "cv": 0}}, "arrivals.cv: "),
            ({"prefix": {"kind": "turns", "turns": 1}}, "prefix.turns: "),
            ({"prefix": {"kind": "pool", "count": 10**9, "tokens": 16}}, "prefix.count: "),
            ({"input": {"kind": "fixed", "tokens": 10**9}}, "input.tokens: "),
            ({"first_token": 9, "end_token": 9}, "first_token must be below"),
        ],
    )
    def test_faults_name_their_field(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(WorkloadError) as refused:
            check({**SYNTHETIC, **changes})
        assert words in str(refused.value)

    def test_values_are_overridden_one_by_one(self, tmp_path: Path) -> None:
        path = tmp_path / "w.toml"
        path.write_text('kind = "synthetic"\ninput = {kind = "fixed", tokens = 9}\noutput = {kind = "fixed", tokens = 2}\n')
        made = read(path, ["requests=3", "input.tokens=12"]).shapes(1)
        assert [request.input_tokens for request in made.requests] == [12, 12, 12]
        for bad in ("requests", "requests=many"):
            with pytest.raises(WorkloadError, match="requests"):
                read(path, [bad])

    def test_files_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError, match="No such file"):
            read(tmp_path / "none.toml")
        (tmp_path / "w.toml").write_text('kind = "trace"\nfile = "none.csv"\n')
        with pytest.raises(WorkloadError, match=r"none\.csv: No such file"):
            read(tmp_path / "w.toml")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "rows", "rate", "cv", "input_p50", "output_p95", "hits"),
    [
        ("azure_2023_conv.csv", 19366, 5.53, 1.1, 1020, 451, 0.0),
        ("azure_2023_code.csv", 8819, 2.57, 13.2, 1469, 90, 0.0),
        ("mooncake_fast25_conversation.jsonl", 12031, 3.40, 1.0, 6909, 698, 0.37),
        ("mooncake_fast25_synthetic.jsonl", 3993, 3.91, 1.0, 11587, 519, 0.65),
    ],
)
def test_published_traces_have_their_known_figures(
    name: str, rows: int, rate: float, cv: float, input_p50: int, output_p95: int, hits: float
) -> None:
    file = ROOT.parent / "shared" / "traces" / name
    if not file.is_file():
        pytest.skip("the trace is not on this machine")
    found = describe(trace(file.read_text(), requests=rows).shapes(1))
    assert found.requests == rows
    assert found.rate_per_s == pytest.approx(rate, abs=0.005)
    assert found.arrival_cv == pytest.approx(cv, abs=0.06)
    assert (found.input["p50"], found.output["p95"]) == (input_p50, output_p95)
    assert found.hit_share == pytest.approx(hits, abs=0.005)


class TestCommand:
    @staticmethod
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["workload", "describe", *arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})

    def test_json_and_table_agree(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text(AZURE)
        (tmp_path / "w.toml").write_text('kind = "trace"\nfile = "t.csv"\n')
        said = json.loads(self.run(str(tmp_path / "w.toml"), "--json").output)
        text = self.run(str(tmp_path / "w.toml")).output
        assert said["digest"] in text
        assert said["counts"]["input_lengthened"] == 1
        assert "3,000" in text
        assert "#" in text

    @pytest.mark.parametrize(
        ("arguments", "status", "words"),
        [
            (["no-such-file.toml"], 1, "No such file"),
            (["deploy/workloads/decode-heavy.toml", "--set", "requests=0"], 1, "requests: "),
            (["deploy/workloads/decode-heavy.toml", "--rate", "0"], 2, "--rate"),
            (["deploy/workloads/decode-heavy.toml", "--cache-tokens", "0"], 2, "--cache-tokens"),
            (["deploy/workloads/decode-heavy.toml", "--seed", "-1"], 2, "--seed"),
        ],
    )
    def test_refusals(self, arguments: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        done = self.run(*arguments)
        assert done.exit_code == status
        assert words in done.output

    @pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "workloads").glob("*.toml")), ids=lambda path: path.stem)
    def test_every_example_is_a_workload(self, path: Path) -> None:
        material = read(path)
        assert len(materialise(material.shapes(1)).requests) == material.source.requests

    def test_the_guides_commands_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        guide = (ROOT / "docs" / "guide-researchers.md").read_text()
        shown = [command for command in console_commands(guide, "splitpoint") if command.split()[1] == "workload"]
        assert len(shown) >= 2
        for command in shown:
            assert self.run(*shlex.split(command)[3:]).exit_code == 0, command


def test_no_two_seeds_of_a_trace_send_the_same_row_while_there_are_enough() -> None:
    rows = tuple(Row(arrival_s=float(n), input_tokens=100 + n, output_tokens=5) for n in range(200))
    material = Material(check({"kind": "trace", "file": "x.csv"}), rows=rows)
    assert windows(material, 40) == 5
    sent = [{request.input_tokens for request in material.shapes(seed, 40).requests} for seed in (1, 2, 3, 4, TUNING_SEEDS_FROM)]
    assert len(set.union(*sent)) == sum(map(len, sent)) == 200
    assert material.shapes(1, 40).requests == material.shapes(6, 40).requests, "then they come round again"
    fixed = {"kind": "fixed", "tokens": 9}
    assert windows(Material(check({"kind": "synthetic", "input": fixed, "output": fixed})), 40) is None
