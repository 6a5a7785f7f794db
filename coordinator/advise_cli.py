"""`splitpoint advise`: where workers should move between the phases, what it costs and gains, and what that rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from coordinator import admin_call
from coordinator.admin_call import DEFAULT_ADMIN, Admin, as_dict, fail
from coordinator.get_cli import Format, Output, print_data

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protos.splitpoint.v1 import admin_pb2


def advise(admin: Admin = DEFAULT_ADMIN, output: Output = Format.TABLE) -> None:
    """What the advisor would change about the pools, or has changed; wide: with the evidence. Changes nothing itself."""
    from protos.splitpoint.v1 import admin_pb2

    advisor = admin_call.call(admin, "GetStatus", admin_pb2.GetStatusRequest()).advisor
    if not advisor.enabled:
        raise fail("the advisor does not look: set advisor.enabled = true and restart `serve`")
    if output in (Format.JSON, Format.YAML):
        print_data(as_dict(advisor), output)
        return
    Console().print("\n".join(lines(advisor, wide=output is Format.WIDE)), markup=False, soft_wrap=True)


def lines(advisor: admin_pb2.AdvisorStatus, *, wide: bool) -> list[str]:
    """For people."""
    if not advisor.action:
        return ["nothing decided yet"]
    who = "carries out what it proposes" if advisor.apply else "proposes only"
    found = [
        f"{advisor.action}: {advisor.reason}",
        f"{advisor.mode}, {who}; looked {advisor.age_s:.0f} s ago",
        f"goodput {advisor.goodput_per_s:.3g} of {advisor.rate_per_s:.3g} requests/s (TTFT {advisor.ttft_goal_s:g} s, "
        f"TPOT {advisor.tpot_goal_s:g} s), {advisor.prompt_tokens:.0f} tokens in, {advisor.output_tokens:.0f} out",
    ]
    if advisor.HasField("proposal"):
        p = advisor.proposal
        found += [
            f"best other layout: {_moves(p.pools)} by {p.how} ({p.mode})",
            f"  goodput {p.goodput_now_per_s:.3g} becomes {p.goodput_then_per_s:.3g} requests/s",
            f"  costs {p.cost_requests:.3g} requests ({p.goodput_meanwhile_per_s:.3g}/s for {p.cost_s:.1f} s), "
            f"gains {p.gain_requests:.3g} until the horizon",
        ]
    if advisor.pending:
        found.append(f"not judged yet: {_moves(advisor.pending)}")
    waits = (("dwell", advisor.dwell_left_s), ("back-off", advisor.backoff_left_s))
    found += [f"{name}: {left_s:.0f} s left" for name, left_s in waits if left_s > 0]
    if wide:
        found += advisor.evidence
        found += [
            f"a {c.how} takes {c.cost_s:.1f} s, "
            + (f"the longest of {c.measured_changes} measured" if c.measured_changes else "as configured")
            for c in advisor.costs
        ]
    return found


def _moves(moves: Iterable[admin_pb2.AdvisorMove]) -> str:
    return ", ".join(f"{m.pool} {m.current_replicas} to {m.replicas}" for m in moves)
