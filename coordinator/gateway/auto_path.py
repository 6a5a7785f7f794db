"""Path `auto` at one gateway: asked by running choices, counted in its metrics, shown to operators."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.gateway.api import Submission
from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.ledger import LedgerRecorder
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.routing.auto import AutoPath, AutoSettings, Decision, Objective, StepTimes, Times
from coordinator.routing.path_choice import PathChooser
from coordinator.routing.phases import Answer, PhaseBook
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router
from protos.ids import Incarnation
from protos.splitpoint.v1 import admin_pb2

HEADER = "header"


class AutoPaths:
    """Tell `phases` of every leg, of whatever path; `decide` for those that leave the path to the gateway."""

    def __init__(
        self, settings: GatewaySettings, router: Router, metrics: GatewayMetrics, step_times: Mapping[str, StepTimes] | None
    ) -> None:
        """Raises `ValueError` where the settings have path `auto` and there are no `step_times`."""
        if settings.auto.model_file is not None and not step_times:
            raise ValueError(f"gateway.auto.model_file: {settings.auto.model_file} was not read")
        self._metrics = metrics
        self._default = Objective(ttft_s=settings.auto.slo_ttft_s, tpot_s=settings.auto.slo_tpot_s, source="default")
        self._of_key = {
            name: Objective(ttft_s=key.ttft_ms / 1e3, tpot_s=key.tpot_ms / 1e3, source=f"key {name}")
            for name, key in settings.auto.keys.items()
        }
        self.phases = PhaseBook()
        self._chooser: PathChooser | None = None
        if step_times:
            chosen = AutoSettings(
                hysteresis=settings.auto.hysteresis,
                explore_share=settings.auto.explore_share,
                learning_rate=settings.auto.learning_rate,
                decisions=settings.auto.decisions,
            )
            self._chooser = PathChooser(router, AutoPath(step_times, chosen), self.phases)

    def decide(self, submission: Submission, ask: Ask, now_s: float) -> Decision | None:
        """The path of a request that starts now; None where no worker can take it on either.

        Raises:
            RuntimeError: this gateway has no path `auto`; its front ends refuse such requests.
        """
        if self._chooser is None:
            raise RuntimeError("path auto without a prediction model")
        decision = self._chooser.decide(
            submission.request_id,
            ask,
            self.objective(submission),
            max_tokens=submission.sampling.max_tokens,
            now_s=now_s,
            transport=submission.transport,
            pools=submission.pools,
        )
        if decision is None:
            self._metrics.event("auto_no_path")
        else:
            self._metrics.path_decided(decision.path, decision.why)
        return decision

    def objective(self, submission: Submission) -> Objective:
        """What a request is to meet: its headers', else its key's, else the default; each time by itself."""
        own = self._of_key.get(submission.key_name, self._default)
        ttft_s, tpot_s = submission.slo_ttft_s, submission.slo_tpot_s
        if ttft_s is None and tpot_s is None:
            return own
        sources = [own.source if given is None else HEADER for given in (ttft_s, tpot_s)]
        source = HEADER if sources[0] == sources[1] else f"TTFT {sources[0]}, TPOT {sources[1]}"
        return Objective(
            ttft_s=own.ttft_s if ttft_s is None else ttft_s, tpot_s=own.tpot_s if tpot_s is None else tpot_s, source=source
        )

    def answer(self, submission: Submission) -> Answer | None:
        """What `phases` is told of the answer to a request, on whatever path; None where nobody asks."""
        if self._chooser is None:
            return None
        return self._chooser.answer(self.objective(submission), max_tokens=submission.sampling.max_tokens)

    def answered(self, decision: Decision, submission: Submission, ledger: LedgerRecorder, output_tokens: int) -> None:
        """A request whose path was decided had its answer at the first attempt. What says nothing of that path is left out: it
        was served on another one, or its tokens came all at once."""
        first_s, last_s = ledger.first_token_s, ledger.last_token_s
        if self._chooser is None or first_s is None or last_s is None or last_s <= first_s:
            return
        if ledger.path != decision.path or ledger.recomputed:
            self._metrics.event("auto_path_not_taken")
            return
        times = Times(first_s - ledger.received_s, (last_s - first_s) / (output_tokens - 1))
        self._chooser.answered(decision, times, max_tokens=submission.sampling.max_tokens, output_tokens=output_tokens)
        predicted = decision.predicted[decision.path]
        self._metrics.path_measured(
            decision.path,
            ttft_ratio=times.ttft_s / predicted.ttft_s,
            tpot_ratio=times.tpot_s / predicted.tpot_s,
            lost=decision.lost_by() > 0,
        )

    def refresh(self, members: frozenset[Incarnation]) -> None:
        """Bring the corrections' gauges up to date, and forget workers that are not `members`."""
        self.phases.forget(members)
        if self._chooser is not None:
            for path in self._chooser.auto.times:
                factors = self._chooser.auto.correction(path)
                self._metrics.path_correction(path, ttft=factors.ttft_s, tpot=factors.tpot_s)

    def shown(self, *, lost_only: bool = False, limit: int = 0) -> admin_pb2.ListDecisionsResponse:
        """For operators: lost decisions the worst first, or all of them the newest first; `limit` 0: all that are remembered."""
        if self._chooser is None:
            return admin_pb2.ListDecisionsResponse()
        auto = self._chooser.auto
        lost = auto.lost()
        found = lost if lost_only else list(reversed(auto.log))
        return admin_pb2.ListDecisionsResponse(
            decisions=[_decision(each) for each in (found[:limit] if limit else found)],
            decided=auto.decided,
            remembered=len(auto.log),
            lost=len(lost),
            corrections=[_correction(auto, path) for path in auto.times],
        )


def _decision(decision: Decision) -> admin_pb2.PathDecision:
    measured = decision.measured
    return admin_pb2.PathDecision(
        request_id=decision.request_id,
        path=decision.path,
        reason=decision.why,
        prompt_tokens=decision.work.prompt_tokens,
        output_tokens=decision.work.output_tokens,
        slo_ttft_s=decision.objective.ttft_s,
        slo_tpot_s=decision.objective.tpot_s,
        objective_source=decision.objective.source,
        predictions=[
            admin_pb2.PathPrediction(
                path=path,
                ttft_s=times.ttft_s,
                tpot_s=times.tpot_s,
                stress=times.against(decision.objective),
                queued_tokens=decision.loads[path].queued_tokens,
                running=decision.loads[path].running,
                prompt_share=decision.loads[path].prompt_share,
                cached_tokens=decision.loads[path].cached_tokens,
                own_misses=decision.misses[path].own,
                others_misses=decision.misses[path].others,
            )
            for path, times in decision.predicted.items()
        ],
        measured=measured is not None,
        ttft_s=measured.ttft_s if measured is not None else 0.0,
        tpot_s=measured.tpot_s if measured is not None else 0.0,
        stress=measured.against(decision.objective) if measured is not None else 0.0,
        lost_by=decision.lost_by(),
        solo_role=decision.solo_role.value if decision.solo_role is not None else "",
    )


def _correction(auto: AutoPath, path: str) -> admin_pb2.PathCorrection:
    factors = auto.correction(path)
    return admin_pb2.PathCorrection(path=path, ttft_factor=factors.ttft_s, tpot_factor=factors.tpot_s, measured=auto.seen(path))
