"""The autoscaler's shell: policies that survive, samples of what was heard, targets given as an operator gives them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Settings, load
from coordinator.config_layers import ConfigError
from coordinator.gateway.latencies import bucket_of
from coordinator.gateway.pool_loads import PoolLoad
from coordinator.pools.autoscale_policy import AutoscalePolicy
from coordinator.pools.autoscale_sampler import Heard
from coordinator.pools.autoscaler import IDLE_INTERVAL_S, Autoscaler
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.reports import Beat, GatewayReport
from coordinator.pools.store import Store
from coordinator.routing.views import Role
from protos.errors import Code, SplitpointError
from protos.ids import WorkerId
from protos.splitpoint.v1 import admin_pb2
from tests.support.views import worker_view

QUICK = {"max_replicas": 4, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0}


class Coordinator:
    """What the actor puts together, on one folder, without Ray; `again` is the actor's next life."""

    def __init__(self, folder: Path, **sets: str) -> None:
        self._folder = folder
        values = {"pools.decode.replicas": "2", **sets}
        self.settings: Settings = load(sets=[f"{key}={value}" for key, value in values.items()], environment={})
        self.again()

    def again(self) -> None:
        self.store = Store(self._folder / "state.sqlite3")
        self.store.begin_run("run", self.settings.pools)
        self.fleet = Fleet()
        self.pools = DesiredPools(self.settings, self.store, self.fleet, rules_of(self.settings).whole_roles)
        self.scaler = Autoscaler(self.store, self.pools, self.fleet, 3.0)
        self.report: dict[str, Any] = {"loads": {}, "lacking": {}, "pid": 1}

    def beat(self, name: str, role: Role, now_s: float, **load: int) -> None:
        view = worker_view(name, role, **load)  # type: ignore[arg-type]
        beat = Beat(view=view, slot=0, node_id="n", processes=(), refusing=False, uptime_s=1.0)
        self.fleet.heard(beat, now_s)

    def run(self, now_s: float, *, silent: bool = False) -> bool:
        reports = {} if silent else {"gateway/0": gateway(**self.report)}
        heard = Heard(reports=reports, heard_s={"gateway/0": now_s}, expected=("gateway/0",))
        return self.scaler.run(heard, now_s)

    def replicas(self, pool: str) -> int:
        target = self.pools.present.target(pool)
        assert target is not None
        return target.replicas

    def set(self, pool: str, *, now_s: float = 0.0, dry_run: bool = False, budget: int | None = None, **policy: Any) -> Any:
        request = admin_pb2.SetAutoscalerRequest(pool=pool, policy=policy, dry_run=dry_run, accelerator_budget=budget)
        return self.scaler.set(request, now_s)

    def decision(self, pool: str) -> Any:
        return next(a.decision for a in self.scaler.status(0.0).autoscalers if a.pool == pool)


def gateway(**known: Any) -> GatewayReport:
    return GatewayReport(
        gateway_id="gateway/0", http_address="", grpc_address="", admin_address="", in_flight=0, tasks=0, open_files=0,
        membership_age_s=0.0, ready=True, **known,
    )  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path)
    yield coordinator
    coordinator.store.close()


def refused(call: Callable[[], object]) -> SplitpointError:
    with pytest.raises(SplitpointError) as caught:
        call()
    return caught.value


def test_a_policy_and_the_budget_survive_the_coordinator_and_no_new_run(made: Coordinator) -> None:
    assert made.scaler.interval_s == IDLE_INTERVAL_S
    made.set("decode", budget=7, metrics_interval_s=2.0, **QUICK)
    made.set("prefill", max_replicas=3, ttft_goal_s=0.5)
    before = made.scaler.status(0.0)
    made.store.close()
    made.again()
    after = made.scaler.status(0.0)
    assert after == before
    assert [a.pool for a in after.autoscalers] == ["decode", "prefill"]
    assert (after.accelerator_budget, made.scaler.interval_s) == (7, 2.0)
    assert made.set("decode", budget=0, **QUICK)
    assert not made.scaler.status(0.0).HasField("accelerator_budget")
    made.store.begin_run("another", made.settings.pools)
    assert (made.store.autoscalers(), made.store.accelerator_budget()) == ({}, None)


def test_the_configuration_of_the_guide_is_there_from_the_start_and_given_up_by_operators(tmp_path: Path) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()
    (block,) = re.findall(r"```toml\n(\[pools\.prefill\]\nrole = \"prefill\"\nautoscaling_config.*?)```", guide, re.DOTALL)
    file = tmp_path / "splitpoint.toml"
    file.write_text(block)
    settings = load(file, environment={})
    store = Store(tmp_path / "state.sqlite3")
    assert store.begin_run("one", settings.pools, settings.coordinator.accelerator_budget)
    kept = {pool: AutoscalePolicy.model_validate_json(text) for pool, text in store.autoscalers().items()}
    assert kept == {name: pool.autoscaling_config for name, pool in settings.pools.items()}
    assert (list(kept), store.accelerator_budget()) == (["prefill", "decode"], 8)
    store.put_autoscaler("decode", None)
    store.put_accelerator_budget(None)
    assert not store.begin_run("one", settings.pools, 8)
    assert (list(store.autoscalers()), store.accelerator_budget()) == (["prefill"], None), "a restart keeps what operators said"
    assert store.begin_run("two", settings.pools, 8)
    assert (list(store.autoscalers()), store.accelerator_budget()) == (["prefill", "decode"], 8)
    store.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{max_replicas = 0}", "pools.decode.autoscaling_config.max_replicas"),
        ("{max_replica = 1}", "did you mean 'max_replicas'?"),
        ("{max_replicas = 2, ttft_goal_s = 1.0}", "pools.decode.autoscaling_config: ttft_goal_s"),
    ],
)
def test_a_bad_autoscaler_in_the_configuration_is_refused_by_its_path(value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(sets=[f"pools.decode.autoscaling_config={value}"], environment={})
    assert said in str(caught.value)


def test_targets_follow_what_workers_and_gateways_say(made: Coordinator) -> None:
    made.set("prefill", target_queued_tokens=1000, **QUICK)
    made.set("decode", target_decode_batch=4, **QUICK)
    for second in range(0, 50, 10):
        made.beat("prefill-1", Role.PREFILL, second, running=1, waiting=3)
        made.beat("decode-1", Role.DECODE, second, running=6)
        made.beat("decode-2", Role.DECODE, second, running=6)
        made.report["loads"] = {
            "prefill": PoolLoad(queued_tokens=2500, legs=10 * second, ttft={bucket_of(0.1): second}),
            "decode": PoolLoad(legs=10 * second),
        }
        changed = made.run(second)
        assert changed is (second == 0), "at once: more load than anybody doubts needs no history"
    assert (made.replicas("prefill"), made.replicas("decode")) == (3, 3)
    decided = made.decision("prefill")
    assert (decided.wanted_replicas, decided.signals[0].name, decided.signals[0].value) == (3, "target_queued_tokens", 2500)
    gains = {g.pool: g for g in made.scaler.status(40.0).next}
    assert gains["prefill"].legs_per_s == pytest.approx(10.0), "counts since the sample before, not since the gateway's start"


def test_counts_of_a_gateway_that_restarted_begin_anew(made: Coordinator) -> None:
    made.set("decode", **QUICK)
    made.report["loads"] = {"decode": PoolLoad(legs=500)}
    made.run(0)
    made.report |= {"loads": {"decode": PoolLoad(legs=30)}, "pid": 2}
    made.run(10)
    assert {g.pool: g.legs_per_s for g in made.scaler.status(10.0).next} == {"decode": pytest.approx(3.0)}


def test_an_idle_pool_shrinks_only_when_everybody_was_heard_for_long_enough(made: Coordinator) -> None:
    made.set("decode", **QUICK)
    for second in range(0, 100, 10):
        made.beat("decode-1", Role.DECODE, second)
        made.beat("decode-2", Role.DECODE, second)
        made.run(second, silent=second == 20)
        told = made.decision("decode").reason
        if second in (20, 30, 40):
            assert "gateway/0 does not answer" in told
        assert made.replicas("decode") == (2 if second < 50 else 1), second


def test_a_silent_worker_keeps_its_pool_from_shrinking(made: Coordinator) -> None:
    made.set("decode", **QUICK)
    made.beat("decode-2", Role.DECODE, 0)
    for second in range(0, 100, 10):
        made.beat("decode-1", Role.DECODE, second)
        made.run(second)
    assert made.replicas("decode") == 2
    assert "decode-2 is silent for 90 s" in made.decision("decode").reason


def test_after_a_restart_nothing_shrinks_before_it_has_looked_for_long_enough(made: Coordinator) -> None:
    made.set("decode", **QUICK)
    made.store.close()
    made.again()
    for second in (100, 110, 120, 130):
        made.beat("decode-1", Role.DECODE, second)
        made.run(second)
        assert (made.replicas("decode") == 2) is (second < 120), "two steps back is as good as the whole period"
        assert second > 110 or "are observed" in made.decision("decode").reason


def test_an_operators_change_at_the_same_moment_stands(made: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    made.set("decode", target_decode_batch=1, **QUICK)
    made.beat("decode-1", Role.DECODE, 0, running=4)
    scale = made.pools.scale

    def late(pool: str, replicas: int, **guards: Any) -> Any:
        scale("prefill", 3)  # an operator's, between the look and the change
        return scale(pool, replicas, **guards)

    monkeypatch.setattr(made.pools, "scale", late)
    made.run(0)
    assert (made.replicas("prefill"), made.replicas("decode")) == (3, 2)
    assert made.decision("decode").action == "refused"
    assert "look again" in made.decision("decode").reason
    monkeypatch.undo()
    assert made.run(1)
    assert made.replicas("decode") == 4


def test_a_manual_scale_of_an_autoscaled_pool_is_refused_unless_forced(made: Coordinator) -> None:
    made.set("decode", **QUICK)
    error = refused(lambda: made.scaler.check_operator(admin_pb2.ScalePoolRequest(pool="decode", replicas=3)))
    assert (error.code, error.param) == (Code.CONFLICT, "replicas")
    assert "decode is autoscaled, 1 to 4 workers" in error.message
    made.scaler.check_operator(admin_pb2.ScalePoolRequest(pool="decode", replicas=3, force=True))
    made.scaler.check_operator(admin_pb2.ScalePoolRequest(pool="prefill", replicas=3))
    made.scaler.remove("decode")
    made.scaler.check_operator(admin_pb2.ScalePoolRequest(pool="decode", replicas=3))
    assert refused(lambda: made.scaler.remove("decode")).code == Code.NOT_FOUND


@pytest.mark.parametrize(
    ("pool", "policy", "code", "param", "said"),
    [
        ("decod", {"max_replicas": 2}, Code.NOT_FOUND, "pool", "no pool 'decod'; pools: prefill, decode"),
        ("decode", {}, Code.INVALID_VALUE, "max_replicas", "max_replicas: Field required"),
        ("decode", {"max_replicas": 5000}, Code.INVALID_VALUE, "max_replicas", "less than or equal to 4096, got 5000"),
        ("decode", {"max_replicas": 1, "min_replicas": 2}, Code.INVALID_VALUE, "policy", "at least min_replicas (2), got 1"),
        (
            "decode",
            {"max_replicas": 1, "aggregation_function": "p9"},
            Code.INVALID_VALUE,
            "aggregation_function",
            "'mean', 'max'",
        ),
        ("decode", {"max_replicas": 1, "ttft_goal_s": 1.0}, Code.INVALID_VALUE, "policy", "ttft_goal_s"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_changes_nothing(
    made: Coordinator, pool: str, policy: dict[str, Any], code: Code, param: str, said: str
) -> None:
    error = refused(lambda: made.set(pool, **policy))
    assert (error.code, error.param) == (code, param)
    assert said in error.message
    assert made.store.autoscalers() == {}


def test_no_phase_may_go_to_0_where_nobody_else_serves_whole_requests(tmp_path: Path) -> None:
    made = Coordinator(tmp_path, **{"gateway.routing.colocated_roles": "[['colocated']]"})
    error = refused(lambda: made.set("prefill", min_replicas=0, max_replicas=2))
    assert error.code == Code.CONFLICT
    assert "its prefill leg would have no worker" in error.message
    made.store.close()


def test_a_pool_whose_way_out_has_gone_meanwhile_stays(made: Coordinator) -> None:
    made.set("prefill", min_replicas=0, max_replicas=2, downscale_delay_s=0)
    made.set("decode", min_replicas=0, max_replicas=2, downscale_delay_s=0)
    for second in range(0, 60, 10):
        for name, role in (("prefill-1", Role.PREFILL), ("decode-1", Role.DECODE), ("decode-2", Role.DECODE)):
            made.beat(name, role, second)
        made.run(second)
    assert sorted([made.replicas("prefill"), made.replicas("decode")]) in ([0, 1], [0, 2]), "one of them goes, one stays"
    stays = "decode" if made.replicas("decode") else "prefill"
    assert made.decision(stays).action == "refused"
    assert f"its {stays} leg would have no worker" in made.decision(stays).reason


def test_a_dry_run_says_what_would_be_decided_and_keeps_nothing(made: Coordinator) -> None:
    for second in range(0, 50, 10):
        made.beat("decode-1", Role.DECODE, second, running=9)
        made.beat("decode-2", Role.DECODE, second, running=9)
        made.run(second)
    said = made.set("decode", now_s=40.0, dry_run=True, budget=4, target_decode_batch=6, **QUICK)
    assert (said.decision.action, said.decision.replicas) == ("up", 3)
    assert said.decision.signals[0].value == 18
    tight = made.set("decode", now_s=40.0, dry_run=True, budget=3, target_decode_batch=6, **QUICK)
    assert (tight.decision.action, tight.decision.replicas) == ("limited", 2)
    assert (made.store.autoscalers(), made.replicas("decode"), made.scaler.status(40.0).autoscalers) == ({}, 2, [])


def test_a_worker_that_drains_still_has_its_accelerator(made: Coordinator) -> None:
    made.set("decode", budget=4, target_decode_batch=1, **QUICK)
    made.beat("prefill-1", Role.PREFILL, 0)
    made.beat("decode-1", Role.DECODE, 0, running=9)
    made.beat("decode-2", Role.DECODE, 0)
    made.beat("decode-9", Role.DECODE, 0)
    made.fleet.drain(WorkerId("decode-9"), 100.0)
    made.run(0)
    assert (made.replicas("decode"), made.scaler.status(0.0).accelerators_taken) == (2, 4)
    assert made.decision("decode").action == "limited"
    made.fleet.died(WorkerId("decode-9"), "drained", 1.0, wanted=True)
    made.run(10)
    assert (made.replicas("decode"), made.scaler.status(0.0).accelerators_taken) == (3, 4)


def test_a_pass_over_1000_workers_is_quick(made: Coordinator) -> None:
    """It shares a loop with the reconcile pass. By the processor's time, which others on the machine do not take."""
    made.set("decode", **QUICK)
    made.set("prefill", **QUICK)
    for n in range(1000):
        made.beat(f"decode-{n}" if n % 2 else f"prefill-{n}", Role.DECODE if n % 2 else Role.PREFILL, 0)
    latencies = dict.fromkeys(range(-100, 100), 1000)
    made.report["loads"] = {pool: PoolLoad(ttft=latencies, tpot=latencies) for pool in ("prefill", "decode")}
    took_s = []
    for second in range(10, 40, 10):
        began_s = time.thread_time()
        made.run(second)
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.3, took_s


def test_an_autoscaler_whose_pool_is_gone_rests_until_it_is_back(made: Coordinator) -> None:
    made.set("decode", **QUICK)
    made.run(0)
    pools = dict(made.pools.present.settings.pools)
    made.pools.apply({"both": pools["decode"].model_copy(update={"role": Role.COLOCATED})})
    made.run(10)
    [resting] = made.scaler.status(10.0).autoscalers
    assert (resting.pool, resting.HasField("decision")) == ("decode", False)
    made.pools.apply(pools)
    made.run(20)
    assert made.scaler.status(20.0).autoscalers[0].HasField("decision")
