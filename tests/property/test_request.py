"""Any order of events, from live, late and lying workers: no token twice, exactly one end, nothing left open."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.request_actions import (
    ChooseRoute,
    Closed,
    DeadlinePassed,
    Emit,
    Finish,
    NoRoute,
    Routed,
    SendColocated,
    SendDecode,
    SendPrefill,
    SendPrepare,
    Start,
)
from coordinator.request_states import TERMINAL, State
from coordinator.routing.goals import LocalGoal, PairGoal, PairRoute, SoloRoute
from coordinator.routing.views import Role
from engine.handover import forwarding_refusal
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2
from tests.support.request_driver import SENDS, Driver
from tests.support.views import worker_view

PREFILL = [worker_view(f"p{i}") for i in range(2)]
DECODE = [worker_view(f"d{i}", Role.DECODE) for i in range(2)]
SOLO = [worker_view(f"c{i}", Role.COLOCATED) for i in range(2)]
FAILURES = [
    Code.WORKER_LOST,
    Code.QUEUE_FULL,
    Code.STAGING_FULL,
    Code.TRANSFER_FAILED,
    Code.TRANSFER_REFUSED,
    Code.INCOMPATIBLE_PEER,
    Code.INTERNAL,
    Code.CANCELLED,
    Code.INVALID_VALUE,
    Code.DEADLINE_EXCEEDED,
]
SAMPLING: list[dict[str, Any]] = [{}, {"seed": 1, "temperature": 1.0}, {"presence_penalty": 1.0}, {"min_tokens": 2}]


class World:
    """Workers that count: output position k holds token k, so a lost or doubled token shows in what the client has."""

    def __init__(self, driver: Driver, data: st.DataObject) -> None:
        self.driver = driver
        self.data = data
        self.next_token: dict[str, int] = {}

    def step(self) -> None:
        driver = self.driver
        if driver.request.state is State.ROUTING:
            what = self.data.draw(st.sampled_from(["route", "route", "route", "none", "deadline", "closed"]))
        else:
            what = self.data.draw(st.sampled_from([*["report"] * 12, "deadline", "closed"]))
        match what:
            case "route":
                driver.feed(Routed(self.route()))
            case "none":
                driver.feed(NoRoute(SplitpointError(Code.NO_WORKER, "none")))
            case "deadline":
                driver.feed(DeadlinePassed())
            case "closed":
                driver.feed(Closed("client_left"))
            case _:
                self.report()

    def route(self) -> PairRoute | SoloRoute:
        goals = self.driver.goals()
        if not goals:
            # Routing would have refused; a pair is what it had before.
            return SoloRoute(worker=SOLO[0])
        goal = self.data.draw(st.sampled_from(goals))
        if isinstance(goal, PairGoal):
            p, d = self.data.draw(st.sampled_from(PREFILL)), self.data.draw(st.sampled_from(DECODE))
            return PairRoute(prefill=p, decode=d, transport="ucx")
        if isinstance(goal, LocalGoal):
            return SoloRoute(worker=next(d for d in DECODE if d.incarnation == goal.incarnation), local=True)
        return SoloRoute(worker=self.data.draw(st.sampled_from(SOLO)))

    def report(self) -> None:
        """Some attempt, over or not, says something that its kind of leg says; sometimes something else."""
        driver = self.driver
        legs = driver.of(SENDS)  # type: ignore[arg-type]
        if not legs:
            return
        live = [leg for leg in legs if leg.attempt_id in driver.open_attempts()]
        leg = self.data.draw(st.sampled_from(legs if self.data.draw(st.integers(0, 4)) == 0 or not live else live))
        usual = {
            SendPrefill: ["sealed", "sealed", "finished", "failed"],
            SendPrepare: ["staged", "staged", "failed"],
            SendDecode: ["tokens", "tokens", "finished", "failed"],
            SendColocated: ["tokens", "tokens", "finished", "failed"],
        }[type(leg)]
        odd = self.data.draw(st.integers(0, 19)) == 0
        what = self.data.draw(st.sampled_from(["sealed", "staged", "tokens", "finished", "failed"] if odd else usual))
        match what:
            case "sealed":
                self.seal(leg)
            case "staged":
                event = worker_pb2.LegEvent(attempt_id=leg.attempt_id, staged=worker_pb2.StagedEvent(transport="ucx"))
                driver.feed(event)
            case "tokens":
                driver.tokens(leg, *self.make(leg, self.data.draw(st.integers(1, 3))))
            case "finished":
                driver.finished(
                    leg,
                    *self.make(leg, self.data.draw(st.integers(0, 2))),
                    reason=self.data.draw(st.sampled_from(["stop", "length", "abort"])),
                    recomputed=self.data.draw(st.booleans()),
                )
            case _:
                driver.failed(leg, self.data.draw(st.sampled_from(FAILURES)))

    def seal(self, leg: Any) -> None:
        driver = self.driver
        good = isinstance(leg, SendPrefill) and leg.grant is not None
        seal = driver.seal() if driver.of(SendPrefill) else kv_transfer_pb2.Seal()
        if good:
            seal.transfer_id, seal.incarnation = leg.grant.transfer_id, leg.worker.incarnation
        if self.data.draw(st.integers(0, 9)) == 0:
            seal.token_hash = b"another"
        event = worker_pb2.SealedEvent(first=worker_pb2.TokensEvent(token_ids=[0]), seal=seal)
        driver.feed(worker_pb2.LegEvent(attempt_id=leg.attempt_id, sealed=event))

    def make(self, leg: Any, count: int) -> list[int]:
        begin = self.next_token.get(leg.attempt_id)
        if begin is None:
            begin = len(leg.output_token_ids) if isinstance(leg, SendDecode) else 0
            begin = len(leg.sent_token_ids) if isinstance(leg, SendColocated) else begin
        self.next_token[leg.attempt_id] = begin + count
        return list(range(begin, begin + count))


def check_now(driver: Driver) -> None:
    assert driver.emitted == list(range(len(driver.emitted))), "a token was lost, doubled or out of order"
    assert len(driver.emitted) <= driver.spec.sampling.max_tokens
    assert len(driver.terminals) <= 1
    assert driver.open_attempts() == set(driver.request.live_attempts)
    assert driver.request.rounds <= driver.spec.extra_attempts + 1
    if driver.request.state is not State.ROUTING:
        assert not isinstance(driver.actions[-1] if driver.actions else None, ChooseRoute)


def check_end(driver: Driver) -> None:
    assert driver.request.state in TERMINAL
    assert len(driver.terminals) == 1
    assert not driver.open_attempts()
    ended_well = isinstance(driver.terminals[0], Finish)
    for prepare in driver.of(SendPrepare):
        transfer_id = prepare.grant.transfer_id
        released = {w for t, w in driver.released() if t == transfer_id}
        decodes = [d for d in driver.of(SendDecode) if d.seal.transfer_id == transfer_id]
        known_to_be_over = ended_well and bool(decodes) and not released
        assert known_to_be_over or released == {prepare.prefill.worker_id, prepare.worker.worker_id}
    terminal_at = driver.actions.index(driver.terminals[0])
    assert not [a for a in driver.actions[terminal_at:] if isinstance(a, (Emit, *SENDS))]
    if not ended_well and driver.emitted:
        resumes = [s for s in driver.of(SendColocated) if s.sent_token_ids]
        assert not resumes or forwarding_refusal(driver.spec.sampling) is None


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    path=st.sampled_from(["split", "split", "colocated"]),
    strict=st.booleans(),
    sampling=st.sampled_from(SAMPLING),
    max_tokens=st.integers(1, 6),
    extra_attempts=st.integers(0, 3),
)
def test_any_order_of_events_ends_once_and_leaves_nothing(
    data: st.DataObject, path: str, strict: bool, sampling: dict[str, Any], max_tokens: int, extra_attempts: int
) -> None:
    options = {**sampling, "max_tokens": max_tokens, "min_tokens": min(max_tokens, sampling.get("min_tokens", 0))}
    driver = Driver(path=path, strict=strict, extra_attempts=extra_attempts, **options)
    world = World(driver, data)
    driver.feed(Start())
    for _ in range(40):
        world.step()
        check_now(driver)
        if driver.request.state in TERMINAL and data.draw(st.booleans()):
            break
    driver.feed(DeadlinePassed())
    check_now(driver)
    check_end(driver)
