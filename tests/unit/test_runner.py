"""The full comparison over a known queue in virtual time: what it finds, what it saves, and how it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.compare import bracket, judged, prober, runner
from coordinator.compare.blocks import schedule
from coordinator.compare.experiment import Experiment, ExperimentError, check, digest, read
from coordinator.compare.faults import LATE_CLIENT
from coordinator.compare.load import ArmTarget, Piece, Probe, RequestFailedError, run_probe
from coordinator.compare.merge import MergeError, merge, other_system
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.read import RecordError
from coordinator.compare.record import Record, write
from coordinator.compare.rig import RigError
from coordinator.compare.run import ComparisonError
from coordinator.compare.run_cli import _before
from coordinator.compare.runner import run
from coordinator.compare.sources import Material
from coordinator.compare.sources import check as check_source
from coordinator.compare.sources import read as read_workload
from coordinator.compare.tools import Progress, Tools
from coordinator.compare.verdict import Verdict
from coordinator.compare.workload import TUNING_SEEDS_FROM, PlannedRequest, Workload, WorkloadSpec, make
from coordinator.config import PoolSettings, load
from coordinator.routing.auto import AUTO, COLOCATED, SPLIT

pytestmark = pytest.mark.timeout(60)

STEP_S = 0.05
ROOT = Path(__file__).parents[2]


class Servers:
    """Each candidate's pools are a queue in front of so many servers; a request holds one for its whole time."""

    def __init__(self, servers: dict[str, int]) -> None:
        self.slow = ""
        self._slots = {pools: asyncio.Semaphore(count) for pools, count in servers.items()}
        self._targets: dict[str, ArmTarget] = {}
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.broken = ""

    def know(self, name: str, target: ArmTarget) -> None:
        self._targets[name] = target

    def target(self, name: str) -> ArmTarget:
        return self._targets[name]

    async def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        target = self._targets[path]
        pools = ",".join(target.pools)
        self.asked.append((pools, request.prompt_token_ids))
        if pools == self.broken:
            raise RequestFailedError("UNAVAILABLE: no worker")
        async with self._slots[pools]:
            for number in range(request.output_tokens):
                await asyncio.sleep(STEP_S * (20 if pools == self.slow else 1))
                last = number + 1 == request.output_tokens
                yield Piece(1, ledger={"e2e_s": 1.0, "residual_s": 0.0} if last else None)


class Rig:
    """Notes what it was asked to put in place."""

    def __init__(self, refuses: bool = False) -> None:
        self.applied: list[dict[str, Any]] = []
        self.resets = 0
        self._refuses = refuses

    async def apply(self, pools: Any) -> None:
        if self._refuses:
            raise RigError("no")
        self.applied.append(dict(pools))

    async def reset_caches(self) -> None:
        self.resets += 1

    def watch(self, arm: str, probe: int, pools: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def usage(self) -> list[Any]:
        return []

    def notes(self) -> list[str]:
        return []


def workloads(seed: int, requests: int) -> Workload:
    return make(WorkloadSpec(seed=seed, requests=requests, prompt_tokens=(8, 16), output_tokens=(4, 4)))


def experiment(**changes: Any) -> Experiment:
    three = {"one": {"pools": ["c2"]}, "two": {"pools": ["c4"]}, "three": {"pools": ["c3"]}}
    plan: dict[str, Any] = {
        "workload": "unused.toml",
        "arms": {
            "colocated": {"path": "colocated", "candidates": three},
            "split": {"path": "split", "candidates": {"a": {"pools": ["s3"]}, "b": {"pools": ["s6"]}, "c": {"pools": ["s5"]}}},
        },
        "slo": "ttft=300ms,tpot=100ms",
        "requests": 120,
        "rates": 4,
        "spread": 1.4,
        "looks": [4],
        "tuning_seeds": 1,
        "margin": 0.1,
    }
    return check({**plan, **changes})


TUNED_S = 200.0
"""Tuning takes 153 s of it, a seed more than 100."""
SERVERS = {"c2": 2, "c4": 4, "c3": 3, "s3": 3, "s6": 6, "s5": 5}


@dataclasses.dataclass
class Ran:
    record: Record
    saved: list[Record]
    servers: Servers
    rig: Rig
    said: list[Progress]


def measure(
    plan: Experiment,
    *,
    servers: dict[str, int] | None = None,
    broken: str = "",
    slow: str = "",
    rig: Rig | None = None,
    **more: Any,
) -> Ran:
    async def work() -> Ran:
        loop = asyncio.get_running_loop()
        client, used = Servers(servers or SERVERS), rig or Rig()
        client.broken, client.slow = broken, slow
        saved: list[Record] = []
        said: list[Progress] = []
        tools = Tools(
            client=client,
            know=client.know,
            rig=used,
            now=loop.time,
            say=said.append,
            save=lambda record: saved.append(dataclasses.replace(record)),
            salt="s",
        )
        options: dict[str, Any] = {"target": "t", "model": "m", "digest": digest(plan.as_dict(), {}), **more}
        return Ran(await run(plan, workloads, tools, **options), saved, client, used, said)

    return run_virtual(work(), turn_s=1e-4)


@pytest.fixture(scope="module")
def usual() -> Ran:
    return measure(experiment())


def test_more_servers_win_with_the_best_candidate_of_each_arm(usual: Ran) -> None:
    ran = usual
    record = ran.record
    assert [(arm.name, arm.candidate, arm.pools) for arm in record.arms] == [
        ("colocated", "two", ("c4",)),
        ("split", "b", ("s6",)),
    ]
    assert record.judgement.verdict is Verdict.SPLIT
    assert record.judgement.seeds == 4
    assert record.judgement.ratio == pytest.approx(6 / 4, rel=0.25)
    assert record.verdicts == {"split": record.judgement}
    assert [fault.text for fault in record.faults if fault.unfit] == []
    assert len(record.probes) == len(record.knees) * 4 * 2 * 2
    assert {probe.seed for probe in record.probes} == {entry["seed"] for entry in record.knees} >= {1, 2, 3, 4}
    assert len(record.rates_per_s) == 4
    assert record.loaded[0].path == "colocated"
    assert ran.said[-1].of == 120


def test_tuning_uses_seeds_of_its_own_and_says_its_path(usual: Ran) -> None:
    record = usual.record
    steps = [step for arm in record.arms for step in arm.tuning]
    assert {step.seed for step in steps} == {TUNING_SEEDS_FROM}
    assert {step.candidate for step in steps if step.chosen} == {"two", "b"}
    assert record.arms[0].tried["two"] > record.arms[0].tried["three"] > record.arms[0].tried["one"]


def test_every_probe_has_prompts_of_its_own_and_ends_that_are_not_judged(usual: Ran) -> None:
    prompts = [prompt for _, prompt in usual.servers.asked]
    assert len(set(prompts)) == len(prompts)
    for probe in usual.record.probes:
        # 1.3 unloaded request times at either end, 0.2 s each.
        edge = math.ceil(1.3 * 0.2 * probe.rate_per_s)
        assert probe.warm_up == probe.cool_down == pytest.approx(edge, abs=1)
        assert len(probe.judged) == 120 - 2 * probe.warm_up


def test_equal_arms_are_never_called_different() -> None:
    plan = experiment(
        arms={
            "colocated": {
                "path": "colocated",
                "candidates": {"a": {"pools": ["x"]}, "b": {"pools": ["y"]}, "c": {"pools": ["z"]}},
            },
            "split": {"path": "split", "candidates": {"a": {"pools": ["x"]}, "b": {"pools": ["y"]}, "c": {"pools": ["z"]}}},
        }
    )
    record = measure(plan, servers={"x": 4, "y": 2, "z": 3}).record
    assert record.judgement.verdict in (Verdict.EQUIVALENT, Verdict.UNDECIDED)
    assert record.judgement.ratio == pytest.approx(1, rel=0.02)


def test_an_arm_that_was_not_tuned_decides_nothing() -> None:
    arms = {
        "colocated": {"path": "colocated", "candidates": {"only": {"pools": ["c4"]}}},
        "split": {"path": "split", "candidates": {"a": {"pools": ["s6"]}, "b": {"pools": ["s5"]}, "c": {"pools": ["s3"]}}},
    }
    record = measure(experiment(arms=arms)).record
    assert record.judgement.verdict is Verdict.UNDECIDED
    assert "was not chosen from 3" in record.judgement.reason


def test_a_run_goes_on_where_the_last_one_ended() -> None:
    plan = experiment()
    first = measure(plan, budget_s=TUNED_S)
    assert first.record.knees == []
    assert first.record.judgement.verdict is Verdict.UNDECIDED
    assert any("out of time before seed 1" in note for note in first.record.notes)
    tuning = first.record.arms[0].tuning
    whole = measure(plan, before=first.record)
    assert whole.record.arms[0].tuning == tuning
    assert whole.record.rates_per_s == first.record.rates_per_s
    assert whole.record.judgement.verdict is Verdict.SPLIT
    assert {pools for pools, _ in whole.servers.asked} == {"c4", "s6"}
    assert not any("out of time" in note for note in whole.record.notes)


def test_a_run_that_ends_between_seeds_keeps_whole_seeds_and_no_look_is_taken_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TAIL_S", 0.0)
    plan = experiment(looks=[3, 4])
    first = measure(plan, before=measure(plan, budget_s=TUNED_S).record, budget_s=130.0).record
    assert 0 < len(first.knees) < 3
    assert first.judgement.verdict is Verdict.UNDECIDED
    assert len(first.probes) == 16 * len(first.knees)
    assert measure(plan, before=first).record.judgement.seeds >= 3


def test_a_run_may_end_between_candidates_and_none_is_tuned_again() -> None:
    plan = experiment()
    first = measure(plan, budget_s=50.0)
    assert list(first.record.arms[0].tried) == ["one"]
    assert first.record.notes == ["out of time before colocated, two, is tuned: it takes about 31 s, 17 s were left"]
    whole = measure(plan, before=first.record)
    assert "c2" not in {pools for pools, _ in whole.servers.asked}
    assert whole.record.judgement.verdict is Verdict.SPLIT
    assert not any("out of time" in note for note in whole.record.notes)


def test_a_measured_seed_says_how_long_the_next_one_takes(usual: Ran) -> None:
    part = dataclasses.replace(usual.record, experiment=experiment().as_dict(), **_cut(usual.record, 1), verdicts={}, notes=[])
    # By its schedule, with `TAIL_S` for each of 16 probes, it would take more than this.
    gone_on = measure(experiment(), before=part, budget_s=130.0).record
    assert [entry["seed"] for entry in gone_on.knees] == [1, 2]
    assert any("out of time before seed 3: it takes about 1" in note for note in gone_on.notes)


def test_a_rate_that_cannot_be_sent_on_time_is_not_tried_again_while_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    def late_from(rate: float) -> None:
        async def run_late(*args: Any, **more: Any) -> Probe:
            probe = await run_probe(*args, **more)
            sent.append(probe.rate_per_s)
            if probe.rate_per_s >= rate and probe.seed >= TUNING_SEEDS_FROM:
                probe.void = "the client fell behind"
            return probe

        monkeypatch.setattr(prober, "run_probe", run_late)

    late_from(40.0)
    record = measure(experiment(start_rate_per_s=90.0)).record
    assert sent[:5] == [90.0, 90.0, 60.0, 60.0, 40.0]
    steps = record.arms[0].tuning
    assert [(step.rate_per_s, step.void) for step in steps[:2]] == [
        (90.0, "the client fell behind"),
        (60.0, "the client fell behind"),
    ]
    assert record.judgement.verdict is Verdict.SPLIT
    late_from(0.1)
    with pytest.raises(ComparisonError, match=r"no knee within 8 rates; the client fell behind, at .* probes are void") as ended:
        measure(experiment())
    assert ended.value.fault is not None
    assert ended.value.fault.kind == LATE_CLIENT


def test_a_knee_is_read_off_probes_that_load_the_system() -> None:
    """Two servers carry ten requests a second. Thirty all at once are over in three, which is what the objective allows them."""
    arms = {
        name: {"path": name, "candidates": {pool: {"pools": [pool]} for pool in (f"{name}-a", f"{name}-b", f"{name}-c")}}
        for name in ("colocated", "split")
    }
    servers = {f"{name}-{letter}": count for name in arms for letter, count in (("a", 2), ("b", 2), ("c", 2))}
    plan: dict[str, Any] = {"arms": arms, "slo": "ttft=3s,tpot=100ms", "requests": 30, "looks": [3]}
    record = measure(experiment(**plan), servers=servers, budget_s=600.0).record  # One seed.
    for arm in record.arms:
        for candidate, (knee,) in arm.tried.items():
            assert 0.8 < knee / (5 * servers[candidate]) < 1.5, candidate
        for step in arm.tuning:
            assert step.requests % 30 == 0
            assert step.requests / step.rate_per_s >= 3 * 3.3, "thrice what the objective allows"
    assert any(len(probe.outcomes) > 30 for probe in record.probes)
    assert not any("before their load has built up" in note for note in record.notes)
    with pytest.raises(ComparisonError, match="no knee within 8 rates; at best 100% meet"):
        measure(experiment(**plan, load_spans=0, start_rate_per_s=20.0), servers=servers)


def test_a_probe_that_stays_too_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "MOST_REPEATS", 1)
    record = measure(experiment(slo="ttft=1s,tpot=100ms", requests=100, looks=[3], load_spans=6), budget_s=300.0).record
    assert any("probes end before their load has built up: it takes" in note for note in record.notes)
    assert {len(probe.outcomes) for probe in record.probes} == {100}


def test_a_seed_whose_knees_lie_beyond_the_rates_is_measured_at_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bracket, "rates_around", lambda knees, count, spread: (14.0, 18.2, 23.7, 30.8))
    record = measure(experiment(looks=[3])).record
    # The knees lie near 19 and 34.
    assert {entry[arm]["why"] for entry in record.knees for arm in ("colocated", "split")} == {""}
    rates = sorted({round(probe.rate_per_s, 1) for probe in record.probes})
    assert rates[:4] == [14.0, 18.2, 23.7, 30.8]
    assert rates[4:] == [40.0]
    for entry in record.knees:
        own = [probe for probe in record.probes if probe.seed == entry["seed"]]
        places = {(probe.rate_per_s, probe.path, probe.half) for probe in own}
        assert len(places) == len(own) == 4 * len({probe.rate_per_s for probe in own}), "of both arms, in both halves"
    assert record.rates_per_s == [14.0, 18.2, 23.7, 30.8]


def test_a_further_rate_is_tried_only_while_there_is_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bracket, "further_rate", lambda rates, whys: 1e-6)
    record = measure(experiment(looks=[3], requests=40, rates=2), budget_s=1e6).record
    assert len(record.knees) >= 3, "seeds are kept"
    assert {probe.rate_per_s for probe in record.probes} == set(record.rates_per_s)
    assert any(note.startswith("out of time before a further rate of seed 1: ") for note in record.notes)


def test_a_seed_that_had_no_time_for_its_further_rates_gets_them_when_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bracket, "rates_around", lambda knees, count, spread: (14.0, 18.2, 23.7, 30.8))
    plan = experiment(looks=[3])
    with monkeypatch.context() as clock:
        ask = runner._Run._out_of_time

        def ends_early(run: Any, before: str, needed_s: float) -> bool:
            return ask(run, before, math.inf if before.startswith(("a further rate", "seed 4")) else needed_s)

        clock.setattr(runner._Run, "_out_of_time", ends_early)
        cut = measure(plan, budget_s=1e6).record
    missed = {entry["seed"] for entry in cut.knees if entry["split"]["why"] or entry["colocated"]["why"]}
    assert missed
    assert {probe.rate_per_s for probe in cut.probes} == set(cut.rates_per_s)
    before = {id(probe) for probe in cut.probes}
    whole = measure(plan, before=cut).record
    assert {entry[arm]["why"] for entry in whole.knees for arm in ("colocated", "split")} == {""}
    assert [entry["seed"] for entry in whole.knees][:3] == [1, 2, 3]
    added = [probe for probe in whole.probes if id(probe) not in before and probe.seed in missed]
    assert {probe.seed for probe in added} == missed
    assert not {probe.rate_per_s for probe in added} & set(cut.rates_per_s), "what was measured is not measured again"
    assert len(whole.workload_digests) == len(whole.workloads) == len(whole.knees)
    assert not any("out of time" in note for note in whole.notes)


def test_a_further_rate_lies_where_a_knee_was_missed() -> None:
    below, above = "below the lowest rate tried (2/s)", "above the highest rate tried (4/s)"
    assert bracket.further_rate([2.0, 4.0], ["", ""]) is None
    assert bracket.further_rate([4.0, 2.0], ["", below]) == pytest.approx(1.0)
    assert bracket.further_rate([2.0, 3.0, 4.5], [above, ""]) == pytest.approx(6.75)
    assert bracket.further_rate([2.0, 4.0], ["not measured"]) is None
    with pytest.raises(ValueError, match="needs two"):
        bracket.further_rate([2.0], [below])


def test_the_first_arm_of_a_block_changes_from_seed_to_seed(usual: Ran) -> None:
    record = usual.record
    firsts = [next(probe.path for probe in record.probes if probe.seed == seed) for seed in (1, 2, 3)]
    assert firsts == ["colocated", "split", "colocated"]


def test_arms_that_take_turns_are_put_in_place_as_seldom_as_the_order_allows() -> None:
    arms = {
        name: {
            "path": name,
            "candidates": {str(n): {"apply": {f"{name}-{n}": {"role": "colocated", "replicas": n}}} for n in (3, 4, 5)},
        }
        for name in ("colocated", "split")
    }
    rig = Rig()
    servers = {f"{name}-{n}": n for name in arms for n in (3, 4, 5)}
    record = measure(experiment(arms=arms, looks=[3]), servers=servers, rig=rig).record
    assert [arm.pools for arm in record.arms] == [("colocated-5",), ("split-5",)]
    # Each candidate once for tuning; then A B B A, B A A B, A B B A, where equal neighbours need no change.
    after = [next(iter(pools)) for pools in rig.applied[6:]]
    assert after == [("colocated-5", "split-5")[place % 2] for place in range(len(after))]
    assert len(after) == 3 * len(record.knees)


def test_an_arm_of_path_auto_is_told_the_objective_that_it_is_judged_by() -> None:
    arms = {path: {"path": path, "candidates": {"both": {"pools": ["c4"]}}} for path in (COLOCATED, SPLIT, AUTO)}
    plan = experiment(arms=arms, looks=[3], requests=24, rates=2, edge_e2es=0.0, slo="ttft=4x,tpot=100ms")
    ran = measure(plan, budget_s=0.0)
    assert [arm.path for arm in ran.record.arms] == [COLOCATED, SPLIT, AUTO]
    assert {name: ran.servers.target(name).slo for name in arms} == {COLOCATED: None, SPLIT: None, AUTO: ran.record.slo}
    assert dict(ran.servers.target(AUTO).headers(100))["x-splitpoint-slo-ttft-ms"] == f"{ran.record.slo.ttft_s * 1e3:.6g}"


@pytest.mark.parametrize("beside", [{"parity_requests": 4}, {"quality": True}])
def test_path_auto_is_not_asked_for_equal_tokens(beside: dict[str, Any]) -> None:
    auto = {"path": AUTO, "candidates": {"both": {}}}
    with pytest.raises(ExperimentError, match="an arm of path auto takes either"):
        experiment(arms={"colocated": {"path": "colocated", "candidates": {"both": {}}}, "auto": auto}, **beside)


def test_what_cannot_be_done_says_so() -> None:
    with pytest.raises(ComparisonError, match="split path fails even unloaded: UNAVAILABLE"):
        measure(experiment(), broken="s3")
    with pytest.raises(ComparisonError, match="colocated: no knee within 8 rates"):
        measure(experiment(slo="ttft=300ms,tpot=1ms"))
    arms = {name: {"path": name, "candidates": {"a": {"apply": {"p": {"role": "colocated"}}}}} for name in ("colocated", "split")}
    with pytest.raises(RigError):
        measure(experiment(arms=arms), rig=Rig(refuses=True), servers={"p": 3})


def test_caches_are_emptied_before_each_probe_where_asked() -> None:
    ran = measure(experiment(looks=[3], reset_caches=True))
    assert ran.rig.resets >= len(ran.record.probes)


def test_several_challengers_are_judged_together() -> None:
    arms = {
        "colocated": {
            "path": "colocated",
            "candidates": {"a": {"pools": ["c4"]}, "b": {"pools": ["c3"]}, "c": {"pools": ["c2"]}},
        },
        "split": {"path": "split", "candidates": {"a": {"pools": ["s6"]}, "b": {"pools": ["s5"]}, "c": {"pools": ["s3"]}}},
        "other": {"path": "split", "candidates": {"a": {"pools": ["o4"]}, "b": {"pools": ["o3"]}, "c": {"pools": ["o2"]}}},
    }
    record = measure(experiment(arms=arms), servers={**SERVERS, "o4": 4, "o3": 3, "o2": 2}).record
    assert set(record.verdicts) == {"split", "other"}
    assert record.verdicts["split"].verdict is Verdict.SPLIT
    assert record.verdicts["other"].verdict is not Verdict.SPLIT
    assert record.verdicts["other"].challenger == "other"
    assert "other/colocated 1.0" in record.verdicts["other"].sentence()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slo": "ttft=3"}, "slo: ttft=3: write"),
        ({"looks": [2]}, "looks must be rising numbers of seeds from 3 up"),
        ({"looks": [5, 4]}, "looks must be rising"),
        ({"requests": 19}, "requests: "),
        ({"rates": 1}, "rates: "),
        ({"margin": 0}, "margin: "),
        ({"arms": {"a": {"path": "split", "candidates": {"x": {}}}}}, "arms: "),
        ({"arms": {n: {"path": "both", "candidates": {"x": {}}} for n in "ab"}}, "arms.a.path: "),
        ({"arms": {n: {"path": "split", "candidates": {}} for n in "ab"}}, "arms.a.candidates: "),
        ({"wokload": 1}, "wokload: Extra inputs"),
        (
            {"arms": {n: {"path": "split", "candidates": {"x": {"pools": ["p"], "apply": {"q": {}}}}} for n in "ab"}},
            "pools ['p'] are not among those applied",
        ),
        (
            {"arms": {n: {"path": "split", "candidates": {"x": {"apply": {"q": {"max_num_seqs": 1}}}}} for n in "ab"}},
            "apply.q: max_num_seqs not among engine, replicas, role",
        ),
        (
            {"arms": {n: {"path": "split", "candidates": {"x": {"apply": {"q": {}} if n == "a" else {}}}} for n in "ab"}},
            "either every candidate brings its pools or none",
        ),
    ],
)
def test_a_bad_plan_is_refused_by_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        experiment(**changes)
    assert says in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Any) -> None:
    (tmp_path / "x.toml").write_text("a = ")
    for name, says in (("none.toml", "No such file"), ("x.toml", "not TOML")):
        with pytest.raises(ExperimentError, match=says):
            read(tmp_path / name)


def test_what_makes_runs_one_experiment() -> None:
    plan, source = experiment(), {"kind": "synthetic"}
    same = plan.model_copy(update={"first_seed": 9, "parity_requests": 3})
    assert digest(plan.as_dict(), source) == digest(same.as_dict(), source)
    assert digest(plan.as_dict(), source) != digest(experiment(requests=400).as_dict(), source)
    assert digest(plan.as_dict(), source) != digest(plan.as_dict(), {"kind": "trace"})
    assert digest(plan.as_dict(), source, "a") != digest(plan.as_dict(), source, "b")


def test_a_record_of_other_sequences_is_not_gone_on_from(usual: Ran, tmp_path: Path) -> None:
    plan = experiment()
    fixed = {"kind": "fixed", "tokens": 8}
    material = Material(check_source({"kind": "synthetic", "input": fixed, "output": fixed}))
    record = dataclasses.replace(
        usual.record,
        experiment=plan.as_dict(),
        experiment_digest=digest(plan.as_dict(), material.source.model_dump(mode="json")),
        workload_digests={"1": material.shapes(1, plan.requests).digest},
    )
    path = tmp_path / "r.json"
    write(record, path)
    found = _before(path, plan, material)
    assert found is not None
    assert found.unit_gaps
    write(dataclasses.replace(record, workload_digests={"1": "another"}), path)
    with pytest.raises(RecordError, match="seed 1 was sent another sequence than this version makes"):
        _before(path, plan, material)
    write(record, path)
    with pytest.raises(RecordError, match=r"another experiment \(requests was 120, is 140\)"):
        _before(path, experiment(requests=140), material)
    with pytest.raises(RecordError, match=r"another experiment \(its workload differs\)"):
        _before(path, plan, Material(check_source({"kind": "synthetic", "input": fixed, "output": {**fixed, "tokens": 9}})))


def test_a_record_of_an_earlier_plan_is_refused_by_name() -> None:
    file = ROOT / "deploy" / "experiments" / "512-512-gpu-8b.toml"
    plan = read(file)
    with pytest.raises(RecordError, match="load_spans was not known when it was made"):
        _before(ROOT / "docs" / "benchmarks" / "512-512-h200.json.gz", plan, read_workload(file.parent / plan.workload))


@pytest.mark.parametrize("name", ["azure-conv-cpu", "decode-heavy-cpu"])
def test_a_published_record_is_of_the_experiment_beside_it(name: str) -> None:
    file = ROOT / "deploy" / "experiments" / f"{name}.toml"
    plan = read(file)
    found = _before(ROOT / "docs" / "benchmarks" / f"{name}.json.gz", plan, read_workload(file.parent / plan.workload))
    assert found is not None
    assert found.unit_gaps


def test_the_search_steps_up_or_down_until_the_knee_lies_between_two_rates() -> None:
    assert bracket.next_rate({}, 2.0, 100) == 2.0
    assert bracket.next_rate({2.0: 0.95}, 2.0, 100) == 3.0
    assert bracket.next_rate({2.0: 0.5}, 2.0, 100) == pytest.approx(4 / 3)
    assert bracket.next_rate({2.0: 0.95, 3.0: 0.6}, 2.0, 100) is None
    assert bracket.next_rate({2.0: 1.0, 3.0: 0.0}, 2.0, 100) == pytest.approx(6**0.5)
    assert bracket.next_rate({}, 2.0, 100, ceiling_per_s=2.0) == pytest.approx(4 / 3)
    assert bracket.next_rate({2.0: 0.95}, 2.0, 100, ceiling_per_s=2.5) == pytest.approx(5**0.5)
    assert 2 < (bracket.found({2.0: 0.95, 3.0: 0.6}, 100) or 0) < 3
    assert bracket.found({2.0: 0.5}, 100) is None
    assert bracket.found({}, 100) is None
    with pytest.raises(ValueError, match="positive"):
        bracket.next_rate({}, 0.0, 100)


def test_rates_lie_around_all_knees_at_equal_ratios() -> None:
    rates = bracket.rates_around([2.0, 4.0], 4, 1.25)
    assert (rates[0], rates[-1]) == (pytest.approx(1.6), pytest.approx(5.0))
    assert rates[1] / rates[0] == pytest.approx(rates[2] / rates[1])
    for bad in (([], 4, 1.2), ([0.0], 4, 1.2), ([1.0], 1, 1.2), ([1.0], 4, 1.0)):
        with pytest.raises(ValueError, match="rates need"):
            bracket.rates_around(*bad)


def test_arms_that_are_costly_to_change_run_all_rates_at_once() -> None:
    turns = [(turn.arm, turn.rate_per_s) for turn in schedule(["a", "b"], [1], [1.0, 2.0], by_seed=True)]
    assert turns == [("a", 1.0), ("a", 2.0), ("b", 1.0), ("b", 2.0), ("b", 1.0), ("b", 2.0), ("a", 1.0), ("a", 2.0)]
    assert math.isclose(sum(rate for _, rate in turns), 12)


def test_runs_with_seeds_of_their_own_merge_into_one_verdict() -> None:
    plan = experiment()
    tuned = measure(plan, budget_s=TUNED_S).record
    parts = []
    for first_seed in (1, 3):
        part = plan.model_copy(update={"first_seed": first_seed, "looks": (2,)})
        before = dataclasses.replace(tuned, arms=list(tuned.arms), probes=[], knees=[], workloads=[], workload_digests={})
        parts.append(dataclasses.replace(measure(part, before=before).record, experiment=plan.as_dict()))
    assert [entry["seed"] for entry in parts[0].knees][:2] == [1, 2]
    whole = merge([dataclasses.replace(part, **_cut(part, 2)) for part in parts])
    assert [entry["seed"] for entry in whole.knees] == [1, 2, 3, 4]
    assert whole.judgement.seeds == 4
    assert whole.judgement.verdict is Verdict.SPLIT
    assert whole.verdicts == {"split": whole.judgement}
    assert [summary.path for summary in whole.loaded] == ["colocated", "split"]
    with pytest.raises(MergeError, match="planned in its experiment"):
        merge(parts, [4])
    with pytest.raises(MergeError, match="a record at least"):
        merge([])
    alone = dataclasses.replace(parts[0], **_cut(parts[0], 2))
    stale = dataclasses.replace(alone, verdicts={}, judgement=dataclasses.replace(alone.judgement, reason="by older rules"))
    again = merge([stale])
    assert again.verdicts == {"split": again.judgement}
    assert again.judgement.reason != "by older rules"
    assert (again.kind, again.notes, again.knees, again.wall_s) == (alone.kind, alone.notes, alone.knees, alone.wall_s)
    older = [dataclasses.replace(part, experiment={**part.experiment, "warm_up_share": 0.1}) for part in parts]
    with pytest.raises(MergeError, match="another version of this program"):
        merge([dataclasses.replace(part, **_cut(part, 2)) for part in older])
    other = dataclasses.replace(parts[1], experiment_digest="other")
    with pytest.raises(MergeError, match="experiments differ"):
        merge([parts[0], other])
    unscaled = dataclasses.replace(parts[1], unit_gaps=False)
    with pytest.raises(MergeError, match="scales of drawn gaps differ"):
        merge([parts[0], unscaled])
    traces = [dataclasses.replace(part, source={"kind": "trace"}) for part in (parts[0], unscaled)]
    assert merge([dataclasses.replace(part, **_cut(part, 2)) for part in traces]).judgement.seeds == 4


def _cut(record: Record, seeds: int) -> dict[str, Any]:
    """The first seeds of a record."""
    kept = [entry["seed"] for entry in record.knees][:seeds]
    return {"knees": record.knees[:seeds], "probes": [probe for probe in record.probes if probe.seed in kept]}


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "experiments").glob("*.toml")), ids=lambda path: path.stem)
def test_every_experiment_that_is_shipped_fits_its_system(path: Path) -> None:
    plan = read(path)
    workload = read_workload(path.parent / plan.workload).workload(1, plan.requests)
    system = path.read_text().splitlines()[0].rsplit("system: ", 1)[1].rstrip(".")
    pools = load(ROOT / system).pools
    tried: set[int] = set()
    for arm in plan.arms.values():
        for candidate in arm.candidates.values():
            assert set(candidate.pools) <= set(pools)
            applied = {pool: PoolSettings.model_validate(each) for pool, each in candidate.apply.items()}
            tried |= {load(ROOT / system).with_pools(applied).engine_of(pool).max_num_seqs for pool in applied}
    # Path auto is compared with both others on the same engines, whatever these are.
    assert plan.is_tuned or any(arm.path == AUTO for arm in plan.arms.values())
    assert (len(tried) > 1) == (path.stem == "sequences-cpu")
    assert len(workload.requests) == plan.requests


def test_what_no_candidate_varies_is_said(usual: Ran) -> None:
    """As far as the plan or the manifest tells; nothing is said of what nobody told."""

    def notes(plan: Experiment, pools: dict[str, Any]) -> list[str]:
        manifest = {"settings": {"engine": {"max_num_seqs": 16}, "pools": pools}}
        record = dataclasses.replace(usual.record, manifest=manifest)
        judged.refresh(record, plan, [workloads(entry["seed"], plan.requests) for entry in record.knees])
        return [note for note in record.notes if "not tuned over" in note]

    assert notes(experiment(), {}) == []
    standing = {name: {"engine": {"max_num_batched_tokens": 64 * count}} for name, count in SERVERS.items()}
    assert notes(experiment(), standing) == [
        "colocated was not tuned over max_num_seqs: every candidate has 16",
        "split was not tuned over max_num_seqs: every candidate has 16",
    ]
    standing["c2"]["engine"]["max_num_seqs"] = standing["s3"]["engine"]["max_num_seqs"] = 8
    assert notes(experiment(), standing) == []
    engines = {
        "colocated": [{"both": {"engine": {"max_num_seqs": n}}} for n in (4, 8, 16)],
        "split": [
            {pool: {"engine": {"max_num_batched_tokens": n, "max_num_seqs": seqs}} for pool, seqs in (("p", 4), ("d", 32))}
            for n in (64, 128, 256)
        ],
    }
    arms = {
        name: {"path": name, "candidates": {str(n): {"apply": pools} for n, pools in enumerate(own)}}
        for name, own in engines.items()
    }
    assert notes(experiment(arms=arms), {}) == ["split was not tuned over max_num_seqs: every candidate has 4 and 32"]


def test_what_the_first_probe_of_a_block_leaves_behind_is_a_fault_of_method() -> None:
    plan = experiment()
    record = measure(plan).record
    for entry in record.knees:
        for name in plan.arms:
            entry[name + "_second"] = {"rate_per_s": 1.2 * (entry[name + "_first"]["rate_per_s"] or 10.0), "why": ""}
            entry[name + "_first"]["rate_per_s"] = entry[name + "_second"]["rate_per_s"] / 1.2
    sent = [workloads(entry["seed"], plan.requests) for entry in record.knees]
    judged.refresh(record, plan, sent)
    assert [fault.kind for fault in record.faults if fault.unfit] == ["carry-over"]
    assert record.judgement.verdict is Verdict.UNDECIDED


def test_a_candidate_without_a_knee_counts_as_one_that_serves_nothing() -> None:
    plan = experiment(
        arms={
            "colocated": {
                "path": "colocated",
                "candidates": {"a": {"pools": ["c4"]}, "b": {"pools": ["none"]}, "c": {"pools": ["c2"]}},
            },
            "split": {"path": "split", "candidates": {"a": {"pools": ["s6"]}, "b": {"pools": ["s5"]}, "c": {"pools": ["s3"]}}},
        },
        slo="ttft=300ms,tpot=100ms",
        looks=[3],
    )
    record = measure(plan, servers={**SERVERS, "none": 1}, slow="none").record
    assert record.arms[0].tried["b"] == [0.0]
    assert record.arms[0].candidate == "a"
    assert not any(fault.kind == "mistuned" for fault in record.faults)


def test_a_system_that_is_gone_ends_the_run_and_spoils_no_seed() -> None:
    plan = experiment(looks=[3])
    tuned = measure(plan, budget_s=TUNED_S).record
    with pytest.raises(ComparisonError, match="every request failed: UNAVAILABLE"):
        measure(plan, before=tuned, broken="s6")
    assert tuned.knees == []
    assert tuned.probes == []


def entry(seed: int, split: float | None, colocated: float | None, why: str = "") -> dict[str, Any]:
    def point(rate: float | None) -> dict[str, Any]:
        return {"rate_per_s": rate, "why": "" if rate else why}

    halves = {
        f"{name}_{half}": point(10.0 + 0.02 * (-1) ** seed * (half == "second"))
        for name in ("colocated", "split")
        for half in ("first", "second")
    }
    return {"seed": seed, "split": point(split), "colocated": point(colocated), **halves}


def test_the_first_look_that_decides_stands_whatever_comes_after() -> None:
    plan = experiment(looks=[3, 5], margin=0.05)
    knees = [entry(seed, 20.0 + 0.001 * seed, 10.0) for seed in range(1, 4)]
    first = judged.judge_challengers(knees, plan, [])["split"]
    assert (first.verdict, first.seeds) == (Verdict.SPLIT, 3)
    more = [*knees, *(entry(seed, rate, 10.0) for seed, rate in ((4, 10.0), (5, 5.0), (6, 2.0)))]
    for count in (4, 5, 6):
        assert judged.judge_challengers(more[:count], plan, [])["split"] == first


def test_a_verdict_that_rests_on_leaving_out_missed_seeds_is_none() -> None:
    plan = experiment(looks=[4], margin=0.05)
    knees = [entry(seed, 12.0 + 0.01 * seed, 10.0) for seed in range(1, 5)]
    assert judged.judge_challengers(knees, plan, [])["split"].verdict is Verdict.SPLIT
    high = [*knees, entry(5, None, 10.0, "above the highest rate tried (15/s)")]
    assert judged.judge_challengers(high, plan, [])["split"].verdict is Verdict.SPLIT
    low = [*knees, entry(5, None, 10.0, "below the lowest rate tried (8/s)")]
    found = judged.judge_challengers(low, plan, [])["split"]
    assert found.verdict is Verdict.UNDECIDED
    assert "whose knee the rates missed" in found.reason


def test_what_is_another_system() -> None:
    first = {
        "model": {"sha": "a"},
        "settings": {"coordinator": {"state_dir": "x"}, "gateway": {"http_port": 1}, "engine": {"seed": 0}},
    }
    moved = {
        "model": {"sha": "a"},
        "settings": {"coordinator": {"state_dir": "y"}, "gateway": {"http_port": 2}, "engine": {"seed": 0}},
    }
    assert other_system(first, moved) == ""
    assert other_system(first, {"settings": {**first["settings"], "engine": {"seed": 1}}}) == "settings"
    assert other_system(first, {"model": {"sha": "b"}}) == "model"
    assert other_system(first, {}) == ""
