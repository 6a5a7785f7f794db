"""The break-even map on planted models: coefficients and break-even line come back, and nothing is said beyond what was seen."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from coordinator import cli
from coordinator.compare.breakeven.build import build
from coordinator.compare.breakeven.files import read, schema, to_json
from coordinator.compare.breakeven.map import BreakEvenMap, Source, Winner
from coordinator.compare.breakeven.model import COLOCATED, SPLIT, Layout, Mix, stress
from coordinator.compare.breakeven.observe import FAILED_STRESS, MapError, layout_of, measurements, pair_of
from tests.support.planted import LINK, SLO, TRUTH, planted, planted_grid
from tests.support.records import ARMS, experiment

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def exact() -> BreakEvenMap:
    return build(planted_grid())


@pytest.fixture(scope="module")
def noisy() -> BreakEvenMap:
    return build(planted_grid(noise=0.1))


def true_ratio(input_tokens: float, output_tokens: float, load: float, link: float | None = None) -> float:
    used = []
    for arm in (COLOCATED, SPLIT):
        times = TRUTH.times(arm, input_tokens, output_tokens, load, link)
        used.append(stress(times.ttft_s, times.tpot_s, input_tokens, SLO))
    return used[0] / used[1]


class TestModel:
    def test_an_idle_engine_takes_a_requests_own_time(self) -> None:
        alone = TRUTH.times(COLOCATED, 1000, 11, 1e-9)
        c = TRUTH.coefficients
        assert alone.ttft_s == pytest.approx(c.fixed_s + c.step_s + 1000 * (c.prompt_token_s + c.context_s))
        assert alone.tpot_s == pytest.approx(c.step_s + c.decode_token_s + c.context_s * 1005.5)

    def test_the_wait_for_kv_is_spread_over_the_tokens_after_the_first(self) -> None:
        split, colocated = (TRUTH.times(arm, 2000, 5, 1e-9) for arm in (SPLIT, COLOCATED))
        c = TRUTH.coefficients
        moved_s = TRUTH.kv_bytes_per_token * 2000 / LINK
        hidden_s = c.hidden * (c.step_s + 2000 * (c.prompt_token_s + c.context_s))
        assert split.wait_s == pytest.approx(c.transfer_s + moved_s - hidden_s)
        assert split.tpot_s is not None
        assert colocated.tpot_s is not None
        assert split.tpot_s - colocated.tpot_s == pytest.approx(split.wait_s / 4)

    def test_a_fast_link_hides_behind_prefill(self) -> None:
        assert TRUTH.times(SPLIT, 2000, 5, 1e-9, 1e15).wait_s == 0.0

    def test_one_token_needs_no_decode(self) -> None:
        for arm in (SPLIT, COLOCATED):
            assert TRUTH.times(arm, 100, 1, 1.0).tpot_s is None

    def test_load_stretches_until_an_engine_is_full(self) -> None:
        light, heavy, over = (TRUTH.times(COLOCATED, 1024, 64, load) for load in (1.0, 4.0, 100.0))
        assert light.ttft_s < heavy.ttft_s
        assert (light.saturated, over.saturated) == (False, True)

    def test_others_in_the_load_count_with_their_own_lengths(self) -> None:
        own = TRUTH.times(COLOCATED, 256, 16, 4.0)
        beside_long_ones = TRUTH.times(COLOCATED, 256, 16, 4.0, mix=Mix.of(2048, 64))
        assert beside_long_ones.ttft_s > own.ttft_s

    def test_a_layout_without_one_phase_is_refused(self) -> None:
        with pytest.raises(ValueError, match="each arm needs"):
            Layout(prefill=0, decode=1, colocated=1, accelerators=1)


class TestFit:
    def test_planted_coefficients_come_back_exactly(self, exact: BreakEvenMap) -> None:
        assert exact.fit is not None
        for name, value in asdict(TRUTH.coefficients).items():
            assert getattr(exact.fit.model.coefficients, name) == pytest.approx(value, rel=1e-4), name
        assert exact.fit.model.layout == TRUTH.layout
        assert exact.fit.model.kv_bytes_per_token == TRUTH.kv_bytes_per_token
        assert exact.fit.residual < 1e-6
        assert exact.bandwidth_bytes_per_s == pytest.approx(LINK)

    def test_under_noise_they_come_back_within_a_few_percent(self, noisy: BreakEvenMap) -> None:
        assert noisy.fit is not None
        for name, value in asdict(TRUTH.coefficients).items():
            assert getattr(noisy.fit.model.coefficients, name) == pytest.approx(value, rel=0.08), name
        assert 0.005 < noisy.fit.residual < 0.03
        assert set(noisy.fit.errors) == set(asdict(TRUTH.coefficients)) - {"link_s_per_byte"}

    def test_the_break_even_line_comes_back(self, exact: BreakEvenMap, noisy: BreakEvenMap) -> None:
        """The true line is where the true ratio is one; under noise it moves little, and winners stand on their side of it."""
        lines = [each for each in exact.break_even if each.source is Source.FITTED]
        assert len(lines) >= 5
        for each in lines:
            place = (each.output_tokens, each.load, each.bandwidth_bytes_per_s)
            assert true_ratio(each.input_tokens, *place) == pytest.approx(1.0, abs=0.01)
            same = [e.input_tokens for e in noisy.break_even if (e.output_tokens, e.load, e.bandwidth_bytes_per_s) == place]
            assert min(abs(math.log(other / each.input_tokens)) for other in same) < math.log(1.06)
        for each in noisy.cells:
            if each.ratio is not None and each.source is Source.FITTED and each.winner is not Winner.NONE:
                truth = true_ratio(each.input_tokens, each.output_tokens, each.load, each.bandwidth_bytes_per_s)
                assert each.winner is (Winner.SPLIT if truth > 1 else Winner.COLOCATED)

    @pytest.mark.parametrize(
        ("records", "why"),
        [
            ([planted(1024, 64, [1.0, 3.0])], "prompts of one length only"),
            ([planted(256, 64, [1.0]), planted(1024, 64, [1.0])], "one rate only"),
            ([planted(256, 1, [1.0, 3.0]), planted(1024, 1, [1.0, 3.0])], "outputs of one token only"),
        ],
    )
    def test_what_does_not_determine_a_model_gets_none(self, records: list[dict[str, Any]], why: str) -> None:
        found = build([(str(place), record) for place, record in enumerate(records)])
        assert found.fit is None
        assert any(why in note for note in found.notes)
        assert found.break_even == ()
        assert all(cell.winner is Winner.NONE for cell in found.cells if cell.source is Source.OUTSIDE)
        assert found.measured


class TestMeasured:
    def test_a_cell_is_the_paired_ratio_over_seeds(self) -> None:
        record = planted(1024, 64, [4.0])
        cell = build([("a", record)]).measured[0]
        assert cell.ratio == pytest.approx(true_ratio(1024, 64, 4.0))
        assert (cell.input_tokens, cell.output_tokens, cell.load) == (1024, 64, 4.0)
        assert (cell.source, cell.winner) == (Source.MEASURED, Winner.SPLIT)

    def test_fewer_than_three_seeds_never_decide(self) -> None:
        cell = build([("a", planted(1024, 64, [4.0], seeds=2))]).measured[0]
        assert cell.winner is Winner.NONE
        assert cell.low is None
        assert "2 seeds" in cell.why

    def test_inside_the_margin_is_equal(self) -> None:
        cell = build([("a", planted(256, 64, [2.0]))]).measured[0]
        assert cell.winner is Winner.EQUAL

    def test_a_request_that_fails_weighs_as_a_miss(self) -> None:
        record = planted(1024, 64, [4.0])
        for probe in record["probes"]:
            if probe["path"] == SPLIT:
                for outcome in probe["outcomes"]:
                    outcome.update(failure="lost", ttft_s=None, e2e_s=None)
        cell = build([("a", record)]).measured[0]
        assert cell.winner is Winner.COLOCATED
        assert cell.split_stress == pytest.approx(FAILED_STRESS)

    def test_void_probes_and_warm_up_are_left_out(self) -> None:
        record = planted(1024, 64, [4.0])
        for probe in record["probes"]:
            probe["warm_up"] = 1
            probe["outcomes"][0].update(ttft_s=50.0, e2e_s=99.0)
        record["probes"].append({**record["probes"][0], "void": "late", "outcomes": [], "seed": 9})
        split, colocated = pair_of(record)
        (cell,) = measurements("a", record, split, colocated, TRUTH.layout, SLO)
        assert cell.ratio == pytest.approx(true_ratio(1024, 64, 4.0))
        assert cell.seeds == 3

    def test_tokens_from_a_cache_are_no_input(self) -> None:
        record = planted(1024, 64, [4.0])
        for probe in record["probes"]:
            for outcome in probe["outcomes"]:
                outcome["cached_tokens"] = 1000
        assert build([("a", record)]).measured[0].input_tokens == 24


class TestLookup:
    def test_a_measured_place_gives_the_measured_cell(self, exact: BreakEvenMap) -> None:
        known = exact.measured[4]
        for factor in (1.0, 1.09, 1 / 1.09):
            found = exact.lookup(known.input_tokens * factor, known.output_tokens, known.load)
            assert found == known
        assert exact.lookup(known.input_tokens, known.output_tokens, known.load, LINK * 1.05) == known
        assert exact.lookup(known.input_tokens * 1.2, known.output_tokens, known.load).source is Source.FITTED

    def test_between_measured_places_it_is_fitted(self, exact: BreakEvenMap) -> None:
        found = exact.lookup(512, 32, 4.0)
        assert found.source is Source.FITTED
        assert found.ratio == pytest.approx(true_ratio(512, 32, 4.0), rel=1e-3)

    @pytest.mark.parametrize(
        ("place", "why"),
        [
            ((10_000, 64, 1.0), "measured were prompts of 256 to 4096"),
            ((100, 64, 1.0), "measured were prompts"),
            ((1024, 1000, 1.0), "measured were outputs of 16 to 256"),
            ((1024, 64, 50.0), "measured were loads"),
            ((1024, 64, 0.001), "measured were loads"),
            ((4096, 64, 12.0), "within a factor of 2 of this combination"),
            ((1024, 64, 1.5, 10 * LINK), "another link than the measured one"),
        ],
    )
    def test_beyond_what_was_measured_it_says_so(self, exact: BreakEvenMap, place: tuple[float, ...], why: str) -> None:
        found = exact.lookup(*place)
        assert found.source is Source.OUTSIDE
        assert why in found.why

    def test_near_break_even_no_winner_is_called_and_outside_still_less(self, exact: BreakEvenMap) -> None:
        for cell in exact.cells:
            if cell.ratio is None or cell.source is Source.MEASURED:
                continue
            band = 0.25 if cell.source is Source.OUTSIDE else 0.15
            assert (cell.winner is Winner.NONE) == (abs(math.log(cell.ratio)) <= math.log1p(band))

    def test_a_poor_fit_widens_the_band(self, exact: BreakEvenMap) -> None:
        assert exact.fit is not None
        sure = exact.lookup(4096 / 1.4, 16, 1.0)
        assert sure.winner is Winner.COLOCATED
        poor = dataclasses.replace(exact, fit=dataclasses.replace(exact.fit, residual=0.3))
        unsure = poor.lookup(4096 / 1.4, 16, 1.0)
        assert unsure.winner is Winner.NONE
        assert unsure.ratio == sure.ratio
        assert "82% of break-even" in unsure.why

    def test_overload_has_no_ratio(self, exact: BreakEvenMap) -> None:
        both = exact.lookup(8192, 256, 40.0)
        assert (both.ratio, both.winner) == (None, Winner.NONE)
        assert "both arms are overloaded" in both.why
        one = next(cell for cell in exact.cells if (cell.split_stress is None) != (cell.colocated_stress is None))
        assert one.ratio is None
        assert "is overloaded" in one.why or "of break-even" in one.why

    @pytest.mark.parametrize("place", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, 1.0, 0.0)])
    def test_places_that_are_none_are_refused(self, exact: BreakEvenMap, place: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="above 0"):
            exact.lookup(*place)

    def test_nothing_follows_for_another_link_where_the_own_is_unknown(self, exact: BreakEvenMap) -> None:
        blind = dataclasses.replace(exact, bandwidth_bytes_per_s=None)
        assert blind.lookup(512, 32, 4.0).source is Source.FITTED
        found = blind.lookup(512, 32, 4.0, 1e9)
        assert (found.source, found.winner, found.ratio) == (Source.OUTSIDE, Winner.NONE, None)
        assert "bandwidth is unknown" in found.why


class TestRecords:
    def test_the_arms_of_an_experiment_are_paired_by_path(self) -> None:
        split, colocated = pair_of(experiment())
        assert (split.name, colocated.name) == (ARMS[1], ARMS[0])
        assert pair_of(experiment(), ARMS[2])[0].name == ARMS[2]
        with pytest.raises(MapError, match="no pair"):
            pair_of(experiment(), "none")

    def test_the_layout_comes_from_pools_and_parallelism(self) -> None:
        record = planted(256, 16, [1.0])
        settings = {
            "pools": {
                "prefill": {"role": "prefill", "replicas": 3},
                "decode": {"role": "decode", "replicas": 1},
                "both": {"role": "colocated", "replicas": 2, "engine": {"tensor_parallel_size": 4}},
            },
            "engine": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        }
        record["manifest"] = {"settings": settings}
        assert layout_of(record, *pair_of(record)) == Layout(prefill=3, decode=1, colocated=2, accelerators=16)
        assert layout_of({**record, "manifest": {}}, *pair_of(record)) is None

    def test_pools_that_the_experiment_applied_count_before_those_that_stood(self) -> None:
        record = experiment() | {"manifest": planted(256, 16, [1.0])["manifest"]}
        split, colocated = pair_of(record)

        def applied(pools: dict[str, Any], candidate: str) -> dict[str, Any]:
            return {"candidates": {candidate: {"apply": pools}}}

        record["experiment"] = {
            "arms": {
                split.name: applied(
                    {"p": {"role": "prefill", "replicas": 1}, "d": {"role": "decode", "replicas": 3}}, split.candidate
                ),
                colocated.name: applied({"c": {"role": "colocated", "replicas": 4}}, colocated.candidate),
            }
        }
        assert layout_of(record, split, colocated) == Layout(prefill=1, decode=3, colocated=4, accelerators=4)

    def test_other_models_machines_and_engines_do_not_mix(self) -> None:
        first = planted(256, 16, [1.0])
        manifest = json.loads(json.dumps(first["manifest"]))
        for change, why in (
            ({"model": "other"}, "another model"),
            ({"manifest": {**manifest, "hardware": {"host": "b", "cpu": "z"}}}, "another machine"),
            ({"manifest": {}}, "how many engines"),
        ):
            with pytest.raises(MapError, match=why):
                build([("a", first), ("b", planted(1024, 16, [1.0]) | change)])
        with pytest.raises(MapError, match="one record"):
            build([])

    def test_other_objectives_are_judged_anew_and_told(self) -> None:
        tight = planted(1024, 16, [1.0]) | {"slo": {**SLO, "ttft_s": 0.1}}
        found = build([("a", planted(256, 16, [1.0])), ("b", tight)])
        assert found.slo == SLO
        assert any("judged anew under the objective of a: b" in note for note in found.notes)


class TestFiles:
    def test_what_was_written_is_read_and_keeps_the_schema(self, exact: BreakEvenMap, tmp_path: Path) -> None:
        path = tmp_path / "map.json"
        path.write_text(to_json(exact))
        assert read(path) == exact
        Draft202012Validator(schema()).validate(json.loads(path.read_text()))

    @pytest.mark.parametrize(
        ("text", "why"),
        [("{", "not a map"), ("[]", "not a map"), ("{}", "schema version None"), ('{"schema_version": 1}', "Field required")],
    )
    def test_what_is_none_is_refused(self, tmp_path: Path, text: str, why: str) -> None:
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(MapError, match=why):
            read(tmp_path / "x.json")

    def test_the_command_writes_map_and_page(self, tmp_path: Path) -> None:
        for name, record in (("a", planted(256, 64, [1.0, 3.0], requests=10)), ("b", planted(1024, 64, [1.0, 3.0], requests=10))):
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        out = tmp_path / "out" / "m.json"
        arguments = ["compare", "map", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out), "--html"]
        done = CliRunner().invoke(cli.app, [*arguments, "--inputs", "256,512", "--bandwidths", "1,2"])
        assert done.exit_code == 0, done.output
        found = read(out)
        assert found.axes.input_tokens == (256, 512)
        assert found.axes.bandwidths == (1e9, 2e9)
        assert "Where splitting pays" in out.with_suffix(".html").read_text()
        for wrong in (["--engines", "1:1"], ["--inputs", "5,3"], ["--slo", "ttft=2x"]):
            assert CliRunner().invoke(cli.app, [*arguments, *wrong]).exit_code == 2
        assert CliRunner().invoke(cli.app, ["compare", "map", str(tmp_path / "none.json")]).exit_code == 1
        assert json.loads(CliRunner().invoke(cli.app, ["compare", "map", "--schema"]).output) == schema()
