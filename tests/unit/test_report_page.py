"""Records read back, and the page made of them: one file, nothing from outside, nothing executed, every part there."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from coordinator import cli
from coordinator.compare.html import quality
from coordinator.compare.html.arms import arms_of
from coordinator.compare.html.figures import attainment, distributions, kv_use, ledger
from coordinator.compare.html.page import STAGE_COLOURS, render
from coordinator.compare.html.svg import BOTTOM, HEIGHT, RIGHT, TOP, WIDTH, Bar, Series, line_chart, stacked_bars
from coordinator.compare.html.tables import (
    configurations,
    goodput_head,
    goodput_means,
    goodputs,
    peaks,
    sentence,
    sentences,
    void_probes,
)
from coordinator.compare.read import NotARecordError, RecordError, find, read, schema
from coordinator.compare.record import Record, write
from coordinator.compare.summary import STAGES
from coordinator.compare.workload import make
from tests.support.records import ARMS, SPEC, VOID, comparison, experiment


def plain(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(comparison(**changes).to_json())
    return found


class Page(HTMLParser):
    """Collects what a browser would fetch or run, and checks that tags close."""

    VOID_TAGS = frozenset({"meta", "br", "link", "img", "line", "circle", "rect", "polyline", "polygon"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            str(value) for name, value in attrs if name in ("src", "href", "data", "action") or name.startswith("on")
        ]
        if tag not in self.VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID_TAGS:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID_TAGS:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


class TestPage:
    def test_it_holds_every_part_and_closes_every_tag(self) -> None:
        page = Page(render([("first", plain())]))
        assert page.open == []
        assert page.tags.count("svg") == 5
        for word in (
            "splitting serves more", "TTFT under load", "ITL under load", "Where the time went", "a note", VOID, "prefill queue",
            "above the highest rate tried", make(SPEC).digest, "Splitting lost for", "usually break-even",
        ):  # fmt: skip
            assert word in page.words, word

    def test_nothing_is_fetched_or_run(self) -> None:
        text = render([("first", plain()), ("second", plain())])
        page = Page(text)
        assert "script" not in page.tags
        assert page.fetched == ["#r1", "#r2"]
        assert not re.search(r"@import|url\(", text)

    def test_what_a_record_says_is_text(self) -> None:
        evil = "<script>alert(1)</script>"
        page = Page(render([(evil, plain(model=evil, notes=[evil], manifest={evil: evil}))]))
        assert "script" not in page.tags
        assert evil in page.words

    def test_all_probes_void_draws_nothing_and_says_so(self) -> None:
        probes = [dataclasses.replace(each, void=VOID) for each in comparison().probes]
        page = Page(render([("void", plain(probes=probes))]))
        assert "nothing that may be drawn" in page.words
        assert page.tags.count("svg") == 1

    def test_light_dark_narrow_and_print_have_rules(self) -> None:
        text = render([("first", plain())])
        for rule in ("prefers-color-scheme: dark", "width=device-width", "@media print", "overflow-x: auto"):
            assert rule in text

    def test_the_verdict_in_one_sentence(self) -> None:
        text = sentence(plain()["judgement"])
        assert text.startswith("split: splitting serves more")
        assert "1.35" in text
        assert "95.0% interval" in text

    def test_every_part_of_the_ledger_has_a_colour(self) -> None:
        assert len(STAGE_COLOURS) == len(STAGES) - 1
        assert len(set(STAGE_COLOURS)) == len(STAGE_COLOURS)


class TestArms:
    def test_every_part_of_an_experiment_is_on_its_page(self) -> None:
        page = Page(render([("three arms", experiment())]))
        assert page.open == []
        assert page.tags.count("svg") == 6
        for word in (
            "tuned-colocated (baseline)", "split-fp8", "KV use over time",
            "Memory and KV, peaks", "max_num_batched_tokens",
            "chosen", "pools prefill, decode", "chunk-8192", "80.0% of 40", "the drop may exceed", "near-tie",
            "one-to-one lost for",
        ):  # fmt: skip
            assert word in page.words, word

    def test_each_other_arm_has_its_own_verdict(self) -> None:
        found = sentences(experiment())
        assert [verdict for verdict, _ in found] == ["split", "undecided"]
        assert found[0][1].startswith("one-to-one: split: splitting serves more")
        assert "one-to-one over tuned-colocated 1.30" in found[0][1]
        assert "more would settle it if they look like these" in found[1][1]

    def test_goodput_is_the_seeds_mean_with_its_interval(self) -> None:
        assert goodput_head(experiment()) == ["seed", *ARMS, "one-to-one / tuned-colocated", "split-fp8 / tuned-colocated"]
        assert goodputs(experiment())[0] == ["1", "2.02/s", "2.63/s", "3.03/s", "1.300", "1.500"]
        (_, shown, _), *_ = goodput_means(experiment())
        assert shown == "2.04/s (1.99 to 2.09)"

    def test_goodput_at_99_percent_needs_requests(self) -> None:
        assert goodput_means(experiment())[0][2] == "needs 200 requests a rate"
        record = experiment()
        for each in record["probes"]:
            each["outcomes"] *= 4
        # Nobody is late at 1/s, 6 of 20 at 4/s.
        assert 1.0 < float(goodput_means(record)[0][2].removesuffix("/s")) < 2.0

    def test_an_experiment_keeps_the_records_schema(self) -> None:
        Draft202012Validator(schema()).validate(experiment())

    def test_parts_of_unknown_form_are_plain_facts(self) -> None:
        found = quality.parts({"quality": {"a": {"b": 0.123456, "c": [1, 2]}, "many": list(range(9))}, "parity": {"ok": True}})
        assert found[0].rows == [["a.b", "0.1235"], ["a.c", "[1, 2]"], ["many", "9 entries, in the record"]]
        assert found[1].rows == [["ok", "yes"]]

    def test_arms_share_colours_only_with_their_path(self) -> None:
        assert [arm.style for arm in arms_of(experiment())] == ["colocated", "split", "arm-2"]
        assert [(arm.name, arm.baseline) for arm in arms_of(plain())] == [("split", False), ("colocated", True)]

    def test_what_a_void_probe_held_is_not_shown(self) -> None:
        record = experiment()
        record["probes"][3]["void"] = VOID
        assert {row[0] for row in peaks(record)} == set(ARMS[1:])
        assert peaks(record)[0] == [ARMS[1], f"{ARMS[1]}-0", "50%", "5 / 1", "1,024", "-", "1"]

    def test_kv_use_is_a_line_per_worker_of_one_probe_each(self) -> None:
        chart, key, rate = kv_use(experiment())
        assert len(ElementTree.fromstring(chart).findall(".//{http://www.w3.org/2000/svg}polyline")) == 6
        assert len(key) == 6
        assert rate == 4.0

    def test_the_warm_up_is_not_judged(self) -> None:
        record = experiment()
        for each in record["probes"]:
            each["warm_up"] = 19
        # Left is the last request, which is late in every arm at the higher rate.
        svg = ElementTree.fromstring(attainment(record))
        lines = {each.get("class"): each.get("points") for each in svg.iter("{http://www.w3.org/2000/svg}polyline")}
        assert float(str(lines["split"]).split()[-1].split(",")[1]) == pytest.approx(HEIGHT - BOTTOM)


class TestFigures:
    def test_void_probes_are_listed_and_not_drawn(self) -> None:
        assert void_probes(plain()) == [["split", "3", "4", VOID]]
        clean = [each for each in comparison().probes if not each.void]
        assert attainment(plain()) == attainment(plain(probes=clean))

    def test_attainment_is_the_outcomes_own_judgement(self) -> None:
        """85 % of split at 4/s, on a chart from 1 to 4 requests/s and 0 to 100 %."""
        svg = ElementTree.fromstring(attainment(plain()))
        lines = {each.get("class"): each.get("points") for each in svg.iter("{http://www.w3.org/2000/svg}polyline")}
        x, y = (float(value) for value in str(lines["split"]).split()[-1].split(","))
        assert x == pytest.approx(WIDTH - RIGHT)
        assert y == pytest.approx(HEIGHT - BOTTOM - 0.85 * (HEIGHT - TOP - BOTTOM), abs=0.1)

    def test_distributions_are_steps_that_end_at_one(self) -> None:
        charts = dict(distributions(plain()))
        assert list(charts) == ["TTFT", "TPOT", "ITL"]
        for chart in charts.values():
            for line in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}polyline"):
                heights = [float(point.split(",")[1]) for point in str(line.get("points")).split()]
                assert heights == sorted(heights, reverse=True)
                assert heights[-1] == pytest.approx(TOP)

    def test_the_ledger_has_both_arms_side_by_side(self) -> None:
        chart, rows = ledger(plain())
        assert [name for name, _ in rows][-1] == "e2e"
        assert all(len(cells) == 2 for _, cells in rows)
        ElementTree.fromstring(chart)

    def test_a_seed_without_a_knee_says_why(self) -> None:
        assert goodputs(plain()) == [["1", "2/s", "above the highest rate tried", "-"]]


class TestSvg:
    def test_one_point_and_none(self) -> None:
        assert line_chart("t", "x", "y", []) == ""
        assert stacked_bars("t", "ms", [Bar(name="a", parts=(("p", "c", -1.0),))]) == ""
        for log in (False, True):
            chart = line_chart("t", "x", "y", [Series(name="a", style="split", points=((2.0, 0.0),))], x_log=log)
            assert "nan" not in chart
            ElementTree.fromstring(chart)

    def test_names_cannot_break_out(self) -> None:
        chart = line_chart('"><b>', "<x>", "&y", [Series(name="a", style='"><i>', points=((1.0, 1.0), (2.0, 2.0)))])
        ElementTree.fromstring(chart)
        assert "<b>" not in chart
        assert "<i>" not in chart

    @pytest.mark.parametrize("high", [0.0031, 1.0, 7.0, 123456.0])
    def test_ticks_are_few_and_inside(self, high: float) -> None:
        chart = line_chart("t", "x", "y", [Series(name="a", style="s", points=((0.0, 0.0), (high, high)))])
        ticks = ElementTree.fromstring(chart).findall(".//{http://www.w3.org/2000/svg}text[@class='tick']")
        assert 6 <= len(ticks) <= 14


class TestRecords:
    def test_a_compressed_record_is_read_and_found(self, tmp_path: Path) -> None:
        write(comparison(), tmp_path / "a.json.gz")
        write(comparison(), tmp_path / "b.json")
        assert read(tmp_path / "a.json.gz") == read(tmp_path / "b.json")
        assert [path.name for path, _ in find(tmp_path)] == ["a.json.gz", "b.json"]
        (tmp_path / "a.json.gz").write_bytes((tmp_path / "a.json.gz").read_bytes()[:40])
        with pytest.raises(RecordError, match=r"a\.json\.gz"):
            read(tmp_path / "a.json.gz")

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        write(comparison(), tmp_path / "a.json")
        assert read(tmp_path / "a.json") == plain()

    def test_the_schema_names_every_field(self) -> None:
        assert set(schema()["properties"]) == {field.name for field in dataclasses.fields(Record)}

    @pytest.mark.parametrize(
        ("text", "error", "why"),
        [
            ("{", NotARecordError, "not JSON"),
            ("[]", NotARecordError, "not a record"),
            ('{"format": 1}', NotARecordError, "not a record"),
            (json.dumps({**json.loads(comparison().to_json()), "schema_version": 99}), RecordError, "schema version 99"),
            (json.dumps({**json.loads(comparison().to_json()), "probes": 3}), RecordError, "probes: 3"),
        ],
    )
    def test_what_is_none_is_refused(self, tmp_path: Path, text: str, error: type[RecordError], why: str) -> None:
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(error, match=why):
            read(tmp_path / "x.json")

    def test_a_folder_is_searched_and_broken_records_are_told(self, tmp_path: Path) -> None:
        write(comparison(), tmp_path / "deep" / "a.json")
        (tmp_path / "other.json").write_text("{}")
        (tmp_path / "z.json").write_text('{"judgement": 1, "schema_version": 1}')
        found = dict(find(tmp_path))
        assert {path.name for path in found} == {"a.json", "z.json"}
        assert isinstance(found[tmp_path / "z.json"], RecordError)
        with pytest.raises(RecordError, match="not a folder"):
            list(find(tmp_path / "none"))


class TestCommands:
    @staticmethod
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})

    def test_report_writes_one_page_of_all(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write(comparison(), tmp_path / f"{name}.json")
        out = tmp_path / "pages" / "r.html"
        done = self.run("report", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out))
        assert done.exit_code == 0
        assert [path.name for path in out.parent.iterdir()] == ["r.html"]
        assert "Side by side" in out.read_text()

    def test_report_refuses_what_is_no_record(self, tmp_path: Path) -> None:
        done = self.run("report", str(tmp_path / "none.json"))
        assert done.exit_code == 1
        assert "No such file" in done.output

    def test_records_lists_as_table_and_json(self, tmp_path: Path) -> None:
        write(comparison(), tmp_path / "a.json")
        assert "1 of 13" in self.run("records", str(tmp_path)).output
        (row,) = json.loads(self.run("records", str(tmp_path), "--json").output)
        assert (row["verdict"], row["seeds"], row["void"]) == ("split", 3, 1)
        assert self.run("records", str(tmp_path / "none")).exit_code == 1

    def test_the_schema_is_printed(self) -> None:
        assert json.loads(self.run("records", "--schema").output) == schema()


def test_arguments_that_all_pools_share_are_said_once() -> None:
    engine = {
        name: {"kind": "vllm", "max_num_seqs": 8, "simulated": {"step_base_s": 1.0}, "max_num_batched_tokens": chunk}
        for name, chunk in (("prefill", 1024), ("decode", 64))
    }
    record = {"arms": [{"name": "split", "path": "split", "engine": engine}]}
    (found,) = configurations(record)
    assert found["arguments"] == [
        ("kind", "vllm"),
        ("max_num_seqs", "8"),
        ("prefill.max_num_batched_tokens", "1024"),
        ("decode.max_num_batched_tokens", "64"),
    ]
