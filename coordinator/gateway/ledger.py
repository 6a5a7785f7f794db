"""The stage ledger of one choice: exclusive parts of its critical path, adding up to its end-to-end time. Pure.

On the gateway's clock a request is a chain without gaps: gateway, a leg's window (sent until its end arrived), gateway, and
so on. A window is divided by what its worker reports, as durations of the worker's own clock: the stages, and how long the
leg took there altogether. What the window lasted beyond that is the hops there and back, the gateway's. What the worker took
beyond its stages is the residual: printed, never spread over the stages. A route that came to nothing is `retry`, unless the
client keeps tokens of it. docs/measurement.md defines each stage.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from protos.splitpoint.v1 import common_pb2, worker_pb2

STAGES = ("gateway", "prefill_queue", "prefill", "transfer_wait", "decode_queue", "decode", "worker", "retry")
"""Exclusive; with the residual they add up to the end-to-end time, on both paths."""


class Window(enum.Enum):
    """Whose turn it is on the critical path."""

    PREFILL = "prefill"
    DECODE = "decode"
    SOLO = "solo"


def _no_stages() -> dict[str, float]:
    return dict.fromkeys(STAGES, 0.0)


@dataclass(slots=True, kw_only=True)
class LedgerRecorder:
    """Collects stamps while the request lives. All stamps are seconds of the gateway's monotonic clock, in order."""

    received_s: float
    path: str = ""
    path_reason: str = ""
    """Of path `auto`: why this one. Who asked for the objective, and its predictions, follow."""
    objective_source: str = ""
    predicted_ttft_s: float = 0.0
    predicted_tpot_s: float = 0.0
    transport: str = ""
    transport_downgraded: bool = False
    placement_missed: bool = False
    attempts: int = 0
    recomputed: bool = False
    first_token_forwarded: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    partial: bool = False
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    first_token_s: float | None = None
    """When the first token was ready for the client."""
    second_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    _done: dict[str, float] = field(default_factory=_no_stages)
    _route: dict[str, float] = field(default_factory=_no_stages)
    _route_began_s: float | None = None
    _route_has_tokens: bool = False
    _mark_s: float | None = None
    _window: Window | None = None
    _first_arrival_s: float | None = None
    _staged_s: float | None = None

    def __post_init__(self) -> None:
        self._mark_s = self.received_s

    # Stamps ---------------------------------------------------------------------------------------------------------------

    def leg_sent(self, window: Window, worker_id: str, now_s: float) -> None:
        """A leg on the critical path is on its way."""
        if self._route_began_s is None:
            self._gateway_until(self._done, now_s)
            self._route_began_s = now_s
        else:
            self._gateway_until(self._route, now_s)
        self._window, self._mark_s, self._first_arrival_s = window, now_s, None
        if window is not Window.DECODE:
            self.prefill_worker = worker_id
        if window is not Window.PREFILL:
            self.decode_worker = worker_id

    def staged(self, arrived_s: float, event: worker_pb2.StagedEvent) -> None:
        """The KV is verified on the decode side."""
        self._staged_s = arrived_s
        self.transfer_s, self.transfer_bytes = event.seconds, event.bytes

    def tokens_arrived(self, arrived_s: float) -> None:
        """Tokens of the present window, whether or not the client sees them."""
        if self._first_arrival_s is None:
            self._first_arrival_s = arrived_s

    def emitted(self, now_s: float, tokens: int = 1) -> None:
        """So many tokens are ready for the client."""
        self._route_has_tokens = True
        self.last_token_s = now_s
        if self.second_token_s is None and (self.first_token_s is not None or tokens > 1):
            self.second_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s

    def leg_ended(self, arrived_s: float, times: worker_pb2.LegTimes) -> None:
        """The present window's worker reported its end."""
        if self._window is None or self._mark_s is None:
            return
        stages = self._route
        stages["worker"] += times.returning_s
        if times.elapsed_s:
            # Never negative: a worker that claims more than the window lasted shows as a negative residual.
            stages["gateway"] += max(0.0, arrived_s - self._mark_s - times.elapsed_s)
        if self._window is not Window.DECODE:
            stages["prefill_queue"] += times.queued_s
            stages["prefill"] += times.computing_s
            if self._window is Window.SOLO:
                stages["decode"] += times.decoding_s
        else:
            stages["transfer_wait"] += times.transfer_wait_s
            stages["decode_queue"] += times.queued_s
            stages["decode"] += times.computing_s + times.decoding_s
            if times.transfer_bytes:
                self.transfer_s, self.transfer_bytes = times.transfer_s, times.transfer_bytes
        self._window, self._mark_s = None, arrived_s

    def route_failed(self, now_s: float) -> None:
        """The present route ended without an answer; another may follow."""
        if self._route_began_s is None:
            return
        if self._route_has_tokens:
            self._cut_window(now_s)
            self._commit()
        else:
            self._done["retry"] += now_s - self._route_began_s
            self._route = _no_stages()
            self.transfer_s, self.transfer_bytes = 0.0, 0
        self._route_began_s, self._window, self._mark_s = None, None, now_s
        self._route_has_tokens, self._staged_s = False, None

    def finished(self, now_s: float) -> None:
        """The terminal event is ready for the front end. The first call counts."""
        if self.finished_s is not None:
            return
        self._cut_window(now_s)
        self._gateway_until(self._route, now_s)
        self._commit()
        self.finished_s = now_s

    # Reading --------------------------------------------------------------------------------------------------------------

    def stages(self) -> dict[str, float]:
        """Seconds per stage, of what has ended so far."""
        return {name: self._done[name] + self._route[name] for name in STAGES}

    def build(self, now_s: float) -> common_pb2.StageLedger:
        """The ledger up to `now_s`, or up to the end once there is one. A window that is still open is in the residual."""
        end_s = self.finished_s if self.finished_s is not None else now_s
        stages = self.stages()
        e2e_s = end_s - self.received_s
        return common_pb2.StageLedger(
            path=self.path,
            path_reason=self.path_reason,
            objective_source=self.objective_source,
            predicted_ttft_s=self.predicted_ttft_s,
            predicted_tpot_s=self.predicted_tpot_s,
            transport=self.transport,
            transport_downgraded=self.transport_downgraded,
            placement_missed=self.placement_missed,
            e2e_s=e2e_s,
            residual_s=e2e_s - sum(stages.values()),
            ttft_s=self.first_token_s - self.received_s if self.first_token_s is not None else 0.0,
            second_token_gap_s=self._second_token_gap_s(),
            transfer_s=self.transfer_s,
            transfer_bytes=self.transfer_bytes,
            attempts=self.attempts,
            recomputed=self.recomputed,
            first_token_forwarded=self.first_token_forwarded,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            partial=self.partial,
            **{f"{name}_s": value for name, value in stages.items()},
        )

    # Parts ----------------------------------------------------------------------------------------------------------------

    def _second_token_gap_s(self) -> float:
        if self.first_token_s is None or self.second_token_s is None:
            return 0.0
        return self.second_token_s - self.first_token_s

    def _gateway_until(self, stages: dict[str, float], now_s: float) -> None:
        if self._window is None and self._mark_s is not None:
            stages["gateway"] += now_s - self._mark_s
            self._mark_s = None

    def _cut_window(self, now_s: float) -> None:
        """Divide a window that ended without its worker's report, by the gateway's own stamps."""
        if self._window is None or self._mark_s is None:
            return
        began_s, stages = self._mark_s, self._route
        if self._window is Window.PREFILL:
            stages["prefill"] += now_s - began_s
        elif self._window is Window.SOLO:
            turn_s = _first(self._first_arrival_s, now_s)
            stages["prefill"] += turn_s - began_s
            stages["decode"] += now_s - turn_s
        else:
            turn_s = max(began_s, _first(self._staged_s, self._first_arrival_s, now_s))
            stages["transfer_wait"] += turn_s - began_s
            stages["decode"] += now_s - turn_s
        self.partial = True
        self._window, self._mark_s = None, now_s

    def _commit(self) -> None:
        for name, value in self._route.items():
            self._done[name] += value
        self._route = _no_stages()


def _first(*stamps: float | None) -> float:
    """The first stamp that was set; the last always is."""
    return next(stamp for stamp in stamps if stamp is not None)


def log_fields(ledger: common_pb2.StageLedger) -> dict[str, object]:
    """Every field of a ledger by its name, seconds to the microsecond, for a log line."""
    fields = {field.name: getattr(ledger, field.name) for field in ledger.DESCRIPTOR.fields}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
