"""What `splitpoint bench failover` plays: the groups, their engines, and what is lost. Values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Loss = Literal["process", "node"]
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverSpec:
    """`groups` are planned at `headroom` of what they can take, and `spares` stand by. Seconds, and tokens per second of a group:
    `prefill_tokens_per_s` of prompts, `decode_tokens_per_s` of all that it decodes together, `token_s` for one sequence's next
    token. `start_s` is what an engine takes to load; a lost node's accelerators are back after `repair_s`. A request is kept
    within `ttft_s` and `tpot_s`; the objective holds where `attainment` of them are. One without a first token after `deadline_s`
    fails. The group is lost in the `phase_s` after half the time, a round of probes and a heartbeat: when in that round it is
    decides how soon a silence is noticed.
    """

    groups: int = 4
    spares: int = 1
    headroom: float = 0.7
    duration_s: float = 1800.0
    losses: tuple[Loss, ...] = ("process", "node")
    phase_s: float = 6.0
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    prefill_tokens_per_s: float = 15_000.0
    decode_tokens_per_s: float = 3_000.0
    token_s: float = 0.03
    start_s: float = 120.0
    repair_s: float = 3600.0
    ttft_s: float = 2.0
    tpot_s: float = 0.06
    attainment: float = 0.95
    deadline_s: float = 60.0

    def lost_s(self, seed: int) -> float:
        """When the group is lost: with seeds in a row, evenly over the phases."""
        return self.duration_s / 2 + self.phase_s * (seed * _GOLDEN % 1.0)

    def work_s(self, input_tokens: int, output_tokens: int) -> float:
        """What a request takes of a group's time."""
        return input_tokens / self.prefill_tokens_per_s + output_tokens / self.decode_tokens_per_s
