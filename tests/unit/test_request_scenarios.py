"""Whole lives of requests as text: commands and, under each, what the state machine answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.request_actions import (
    AbortLeg,
    Action,
    Blame,
    ChooseRoute,
    Closed,
    Credit,
    DeadlinePassed,
    Emit,
    Ended,
    Fail,
    Finish,
    LegOver,
    NoRoute,
    Note,
    ReleaseTransfer,
    Routed,
    SendColocated,
    SendDecode,
    SendPrefill,
    SendPrepare,
    Start,
)
from coordinator.routing.goals import Goal, LocalGoal, PairGoal, PairRoute, SoloRoute
from coordinator.routing.views import Role
from protos.errors import Code, SplitpointError
from tests.support.request_driver import SENDS, Driver
from tests.support.scenarios import check_scenario
from tests.support.views import worker_view

FOLDER = Path(__file__).parent / "scenarios"
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}


def worker(name: str) -> Any:
    return worker_view(name, ROLES[name[0]])


def option(text: str) -> Any:
    return int(text) if text.lstrip("-").isdigit() else {"true": True}.get(text, text)


class Scenario:
    """Runs the commands of one file."""

    def __init__(self) -> None:
        self.driver = Driver()

    def run(self, line: str) -> list[str]:
        command, *words = line.split()
        if command == "request":
            options = {k: option(v) for k, v in (w.split("=") for w in words)}
            if "penalty" in options:
                options["presence_penalty"] = float(options.pop("penalty"))
            self.driver = Driver(**options)
            return []
        actions = getattr(self, f"do_{command}")(*words)
        return [*(show(a) for a in actions), f"= {self.driver.request.state}"]

    def leg(self, attempt_id: str) -> Any:
        return next(a for a in self.driver.of(SENDS) if a.attempt_id == attempt_id)  # type: ignore[arg-type]

    def do_start(self) -> list[Action]:
        return self.driver.feed(Start())

    def do_pair(self, prefill: str, decode: str) -> list[Action]:
        return self.driver.feed(Routed(PairRoute(prefill=worker(prefill), decode=worker(decode), transport="ucx")))

    def do_one(self, name: str, local: str = "") -> list[Action]:
        return self.driver.feed(Routed(SoloRoute(worker=worker(name), local=bool(local))))

    def do_none(self) -> list[Action]:
        return self.driver.feed(NoRoute(SplitpointError(Code.NO_WORKER, "no worker can take this request")))

    def do_sealed(self, first: str) -> list[Action]:
        return self.driver.sealed([int(first)])

    def do_staged(self) -> list[Action]:
        return self.driver.staged()

    def do_tokens(self, attempt: str, *tokens: str) -> list[Action]:
        return self.driver.tokens(self.leg(attempt), *map(int, tokens))

    def do_finished(self, attempt: str, reason: str, *tokens: str) -> list[Action]:
        return self.driver.finished(self.leg(attempt), *map(int, tokens), reason=reason)

    def do_recomputed(self, attempt: str, reason: str, *tokens: str) -> list[Action]:
        return self.driver.finished(self.leg(attempt), *map(int, tokens), reason=reason, recomputed=True)

    def do_failed(self, attempt: str, code: str) -> list[Action]:
        return self.driver.failed(self.leg(attempt), Code(code))

    def do_deadline(self) -> list[Action]:
        return self.driver.feed(DeadlinePassed())

    def do_close(self, reason: str) -> list[Action]:
        return self.driver.feed(Closed(reason))


def show_goal(goal: Goal) -> str:
    if isinstance(goal, LocalGoal):
        return f"{goal.incarnation.removesuffix('-i')} by itself"
    words = ["pair" if isinstance(goal, PairGoal) else "one worker"]
    if goal.exclude:
        words.append("without " + " ".join(sorted(name.removesuffix("-i") for name in goal.exclude)))
    if isinstance(goal, PairGoal) and goal.prefer_prefill:
        words.append("best with " + goal.prefer_prefill.removesuffix("-i"))
    return " ".join(words)


def show(action: Action) -> str:
    match action:
        case ChooseRoute():
            return "choose: " + ", else ".join(map(show_goal, action.goals)) if action.goals else "choose: nothing"
        case SendPrefill():
            grant = f"stage transfer {action.grant.transfer_id[-1]}" if action.grant is not None else "stage nothing"
            return f"-> {action.worker.worker_id}: prefill {action.attempt_id}, {grant}"
        case SendPrepare():
            transfer = action.grant.transfer_id[-1]
            return (
                f"-> {action.worker.worker_id}: prepare {action.attempt_id}, transfer {transfer} from {action.prefill.worker_id}"
            )
        case SendDecode():
            after = f"after {list(action.output_token_ids)}" if action.output_token_ids else "from the prompt"
            recompute = "" if action.allow_recompute else ", no recompute"
            left = action.sampling.max_tokens
            return f"-> {action.worker.worker_id}: decode {action.attempt_id} {after}, {left} tokens left{recompute}"
        case SendColocated():
            after = f" after {list(action.sent_token_ids)}" if action.sent_token_ids else ""
            left = action.sampling.max_tokens
            return f"-> {action.worker.worker_id}: colocated {action.attempt_id}{after}, {left} tokens left"
        case AbortLeg():
            return f"-> {action.worker.worker_id}: abort {action.attempt_id} ({action.reason})"
        case ReleaseTransfer():
            return f"-> {action.worker.worker_id}: release transfer {action.transfer_id[-1]} ({action.reason})"
        case LegOver():
            return f"{action.attempt_id} is over"
        case Emit():
            return f"client <- {list(action.token_ids)}"
        case Finish():
            return f"client <- finished: {action.finish_reason}"
        case Fail():
            return f"client <- {action.error.code}, {action.error.tokens_sent} tokens sent"
        case Ended():
            return f"ended: {action.reason}"
        case Note():
            return f"note {action.name}" + (f": {action.detail}" if action.detail else "")
        case Blame():
            return f"blame {' '.join(w.worker_id for w in action.workers)}: {action.code}"
        case Credit():
            return f"credit {' '.join(w.worker_id for w in action.workers)}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    check_scenario(path, Scenario().run)


def test_there_are_scenarios() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 5
