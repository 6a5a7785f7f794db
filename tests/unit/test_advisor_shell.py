"""The advisor's shell: what was heard in, targets given as an operator gives them; beside the autoscaler, and over restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import ConfigError, load, served_model_name
from coordinator.gateway.latencies import bucket_of
from coordinator.gateway.pool_loads import PoolLoad
from coordinator.path_model import to_json
from coordinator.pools.autoscale_sampler import Heard
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.reports import Beat, GatewayReport
from coordinator.pools.scaling import Scaling
from coordinator.pools.store import Store
from coordinator.routing.auto import COLOCATED, SPLIT, StepTimes
from protos.ids import WorkerId
from protos.splitpoint.v1 import admin_pb2
from tests.support.views import worker_view

WALL_S = 1_700_000_000.0
LOOK_S = 10.0
QUICK = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0, "look_back_period_s": 30.0}


class Rig:
    """What the actor puts together, on one folder, without Ray; workers do as they are told. `again` is its next life."""

    def __init__(self, folder: Path, **sets: str) -> None:
        self.folder = folder
        values = {
            "engine.kind": "simulated",
            "pools.decode.replicas": "3",
            "advisor.enabled": "true",
            "advisor.apply": "true",
            "advisor.interval_s": f"{LOOK_S}",
            "advisor.window_s": "60",
            "advisor.hold_s": "20",
            "advisor.dwell_s": "300",
            **sets,
        }
        self.settings = load(sets=[f"{key}={value}" for key, value in values.items()], environment={})
        self.now_s = 1000.0
        self.legs: Counter[str] = Counter()
        self.ttft: Counter[int] = Counter()
        self.tpot: Counter[int] = Counter()
        self.loads: dict[str, PoolLoad] = {}
        self.again()

    def again(self) -> None:
        self.store = Store(self.folder / "state.sqlite3")
        self.store.begin_run("run", self.settings.pools)
        self.fleet = Fleet()
        self.pools = DesiredPools(self.settings, self.store, self.fleet, rules_of(self.settings).whole_roles)
        self.scaling = Scaling(self.settings, self.store, self.pools, self.fleet)

    def counts(self) -> dict[str, int]:
        return {target.name: target.replicas for target in self.pools.targets}

    def workers(self) -> None:
        """Every pool has its workers, and they have their labels."""
        number = 0
        for target in self.pools.targets:
            for _ in range(target.replicas):
                number += 1
                view = worker_view(f"w-{number}", target.role, pool=target.name)
                beat = Beat(view=view, slot=number, node_id="n", processes=(), refusing=False, uptime_s=1.0, engine=target.engine)
                self.fleet.heard(beat, self.now_s)
                self.fleet.relabel(WorkerId(f"w-{number}"), target.name, target.role)
                self.fleet.heard(beat, self.now_s)

    def look(self, *, settled: bool = True, late: int = 28, quick: int = 0, came: int = 40, tpot_s: float = 0.02) -> bool:
        """One pass of both, `LOOK_S` later. Since the last one `came` prompts, of which `late` and `quick` ones were computed and
        answered; where some are late, prompts wait."""
        self.now_s += LOOK_S
        if settled:
            self.workers()
        done = late + quick
        self.legs += Counter(prefill=came, decode=done)
        self.ttft += Counter({bucket_of(3.0): late, bucket_of(0.3): quick})
        self.tpot += Counter({bucket_of(tpot_s): done})
        tokens = self.ttft.total()
        self.loads = {
            "prefill": PoolLoad(
                legs=self.legs["prefill"], ttft=dict(self.ttft), prompt_tokens=1000 * tokens, queued_tokens=60_000 if late else 0
            ),
            "decode": PoolLoad(legs=self.legs["decode"], tpot=dict(self.tpot), output_tokens=100 * tokens),
        }
        report = GatewayReport(
            gateway_id="gateway/0", http_address="", grpc_address="", admin_address="", in_flight=0, pid=1, tasks=0, open_files=0,
            membership_age_s=0.0, ready=True, epoch=self.fleet.epoch, version=self.fleet.version, loads=self.loads,
        )  # fmt: skip
        heard = Heard(reports={"gateway/0": report}, heard_s={"gateway/0": self.now_s}, expected=("gateway/0",))
        wall_s = WALL_S + self.now_s
        scaled = self.scaling.look_autoscaler(heard, self.now_s, wall_s)
        return self.scaling.look_advisor(heard, self.now_s, wall_s) or scaled

    def until_changed(self, looks: int = 20, **known: Any) -> int:
        """How many looks until the pools are others."""
        before = self.counts()
        for n in range(1, looks + 1):
            self.look(**known)
            if self.counts() != before:
                return n
        raise AssertionError(self.status())

    def autoscale(self, pool: str, *, budget: int | None = None, **policy: Any) -> None:
        request = admin_pb2.SetAutoscalerRequest(pool=pool, policy={**QUICK, **policy}, accelerator_budget=budget)
        self.scaling.autoscaler.set(request, self.now_s)

    def status(self) -> admin_pb2.AdvisorStatus:
        return self.scaling.advisor.status(WALL_S + self.now_s)

    def metric(self, name: str, **labels: str) -> float | None:
        labels["model_name"] = served_model_name(self.settings)
        found = self.scaling.metrics.registry.get_sample_value(f"splitpoint_{name}", labels)
        return None if found is None else float(found)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.store.close()


def test_prompts_that_wait_get_a_decode_worker_and_the_change_is_timed(rig: Rig) -> None:
    rig.until_changed()
    assert rig.counts() == {"prefill": 2, "decode": 2}
    assert rig.status().action == "apply"
    assert {(m.pool, m.current_replicas, m.replicas) for m in rig.status().pending} == {("prefill", 1, 2), ("decode", 3, 2)}
    rig.look(settled=False)
    assert "not settled" in rig.status().reason
    rig.look(late=0, quick=40)
    costs = {c.how: (c.cost_s, c.measured_changes) for c in rig.status().costs}
    assert costs == {"relabel": (2 * LOOK_S, 1), "restart": (300.0, 0)}


def test_without_apply_it_is_only_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, **{"advisor.apply": "false"})
    for _ in range(15):
        assert not rig.look()
    status = rig.status()
    assert (status.action, rig.counts()) == ("propose", {"prefill": 1, "decode": 3})
    assert (status.proposal.how, status.proposal.mode) == ("relabel", "split")
    assert status.proposal.goodput_then_per_s > status.proposal.goodput_now_per_s
    assert any("prefill: 1 workers, 4 legs/s" in line for line in status.evidence), status.evidence
    assert any("gateway.auto.model_file is not set" in line for line in status.evidence)
    rig.store.close()


def test_what_it_remembers_survives_the_coordinator_and_no_new_run(rig: Rig) -> None:
    rig.until_changed()
    before = rig.status()
    assert before.dwell_left_s == 300.0
    rig.store.close()
    rig.again()
    rig.now_s += 100
    after = rig.status()
    assert (after.pending, after.costs) == (before.pending, before.costs)
    assert after.dwell_left_s == 200.0
    for _ in range(10):
        rig.look(late=0, quick=14, came=14)
    assert "not judged under another load" in rig.status().reason
    rig.store.begin_run("another", rig.settings.pools)
    assert rig.store.advisor() is None


def test_a_change_that_has_made_it_worse_is_rolled_back_also_by_the_next_coordinator(rig: Rig) -> None:
    rig.until_changed(late=20, quick=18)
    rig.store.close()
    rig.again()
    assert rig.counts() == {"prefill": 2, "decode": 2}
    rig.until_changed(late=0, quick=40, tpot_s=0.2)
    assert rig.counts() == {"prefill": 1, "decode": 3}
    status = rig.status()
    assert (status.action, status.rollbacks, status.backoff_left_s) == ("roll_back", 1, 3600.0)
    assert rig.metric("advisor_decisions_total", action="roll_back") == 1


def test_an_operators_change_at_the_same_moment_stands(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = rig.pools.apply

    def late(pools: Any, **guards: Any) -> Any:
        rig.pools.scale("decode", 4)  # an operator's, between the look and the change
        return apply(pools, **guards)

    monkeypatch.setattr(rig.pools, "apply", late)
    rig.until_changed()
    assert rig.counts() == {"prefill": 1, "decode": 4}
    status = rig.status()
    assert status.action == "refused"
    assert "look again" in status.reason
    assert not status.pending
    assert status.dwell_left_s == 0


def test_a_file_that_has_gone_leaves_it_with_what_is_measured(tmp_path: Path) -> None:
    times = StepTimes(first_token_s=0.02, prompt_token_s=0.0002, step_s=0.02, running_s=0.0005)
    file = tmp_path / "times.json"
    file.write_text(to_json({SPLIT: times, COLOCATED: times}))
    rig = Rig(tmp_path, **{"gateway.auto.model_file": str(file), "gateway.default_path": "auto"})
    for _ in range(9):
        rig.look(late=0, quick=40)
    assert not any("model_file" in line for line in rig.status().evidence)
    file.unlink()
    rig.store.close()
    rig.again()
    for _ in range(9):
        rig.look(late=0, quick=40)
    assert any(f"{file}: No such file" in line for line in rig.status().evidence), rig.status().evidence
    rig.store.close()


# Beside the autoscaler -----------------------------------------------------------------------------------------------------


def test_a_full_budget_moves_a_worker_and_the_autoscaler_leaves_it_there(rig: Rig) -> None:
    rig.autoscale("prefill", max_replicas=4, target_queued_tokens=20_000, budget=4)
    rig.autoscale("decode", max_replicas=4, target_decode_batch=32, downscale_delay_s=86_400.0)
    rig.until_changed()
    assert rig.counts() == {"prefill": 2, "decode": 2}
    assert {d.pool: d.action for d in rig.scaling.autoscaler.decisions}["prefill"] == "limited"
    assert rig.metric("scale_events_total", source="advisor", pool="prefill", direction="up") == 1
    assert rig.metric("scale_events_total", source="autoscaler", pool="prefill", direction="up") is None
    for _ in range(60):
        rig.look(late=4, quick=36)
        assert rig.counts() == {"prefill": 2, "decode": 2}, "neither of them undoes what the other has done"
    assert rig.scaling.autoscaler.status(rig.now_s).accelerators_taken == 4


def test_as_long_as_the_budget_has_room_the_autoscaler_alone_keeps_its_pools(rig: Rig) -> None:
    rig.autoscale("prefill", max_replicas=2, target_queued_tokens=20_000, budget=5)
    rig.autoscale("decode", max_replicas=4, target_decode_batch=32, downscale_delay_s=86_400.0)
    for _ in range(20):
        rig.look()
    assert rig.counts() == {"prefill": 2, "decode": 3}, "one more, of its own, up to its limit"
    assert "its autoscaler keeps its number" in rig.status().reason
    assert rig.metric("scale_events_total", source="autoscaler", pool="prefill", direction="up") == 1


def test_an_autoscaled_pool_is_moved_within_its_limits_only(rig: Rig) -> None:
    rig.autoscale("prefill", max_replicas=4, target_queued_tokens=20_000, budget=4)
    rig.autoscale("decode", min_replicas=3, max_replicas=4, target_decode_batch=32)
    for _ in range(20):
        rig.look()
    assert rig.counts() == {"prefill": 1, "decode": 3}
    assert rig.status().reason == "no worker may move"


def test_a_pool_that_is_gone_does_not_count_as_limited(rig: Rig) -> None:
    rig.autoscale("prefill", max_replicas=4, target_queued_tokens=20_000, budget=4)
    rig.look()
    assert rig.scaling.autoscaler.limited
    pools = dict(rig.pools.present.settings.pools)
    pools["other"] = pools.pop("prefill")
    rig.pools.apply(pools)
    rig.look()
    assert not rig.scaling.autoscaler.limited
    assert rig.scaling.autoscaler.decisions == ()


def test_a_look_that_changes_nothing_writes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.look(late=0, quick=40)
    written: list[str] = []
    monkeypatch.setattr(rig.store, "put_advisor", written.append)
    for _ in range(5):
        rig.look(late=0, quick=0, came=0)
    assert written == []


# Configuration and metrics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dwell_s", "-1", "advisor.dwell_s"),
        ("margin", "1.5", "advisor.margin"),
        ("horizon_s", "inf", "advisor.horizon_s"),
        ("ttft_goal_s", "0", "advisor.ttft_goal_s"),
        ("window_s", "5", "window_s must be at least twice interval_s (5), got 5"),
        ("window_s", "80000", "window_s must be at most 1000 times interval_s (5), got 80000"),
        ("apply", "true", "apply is true and enabled is not"),
        ("dwel_s", "5", "did you mean 'dwell_s'?"),
    ],
)
def test_a_bad_setting_is_refused_by_its_path_and_limit(key: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(sets=[f"advisor.{key}={value}"], environment={})
    assert said in str(caught.value)


def test_a_metrics_port_that_a_gateway_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is also coordinator\.metrics_port"):
        load(sets=["coordinator.metrics_port=8000", "gateway.http_port=8000", "gateway.http_host=127.0.0.1"], environment={})
