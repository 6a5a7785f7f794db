"""What the advisor says, as messages of `AdminService`."""

from __future__ import annotations

from coordinator.pools.advisor_config import AdvisorSettings
from coordinator.pools.advisor_decide import Advice, Memory, Proposal, evidence
from coordinator.pools.advisor_layouts import PHASES, Situation
from protos.splitpoint.v1 import admin_pb2


def status_of(
    settings: AdvisorSettings,
    situation: Situation | None,
    advice: Advice | None,
    memory: Memory,
    now_s: float,
    *,
    age_s: float,
) -> admin_pb2.AdvisorStatus:
    """`situation` and `advice` are of the last look, `age_s` ago; None before the first."""
    status = admin_pb2.AdvisorStatus(enabled=settings.enabled, apply=settings.apply, rollbacks=memory.rollbacks)
    if memory.changed_s is not None:
        status.dwell_left_s = max(0.0, memory.changed_s + settings.dwell_s - now_s)
    status.backoff_left_s = max(0.0, memory.backoff_until_s - now_s)
    for how in ("relabel", "restart"):
        cost_s, measured = memory.cost_s(how, settings)
        status.costs.add(how=how, cost_s=cost_s, measured_changes=measured)
    if memory.pending is not None:
        status.pending.extend(_counts(memory.pending.before, memory.pending.after))
    if situation is None or advice is None:
        return status
    status.action, status.reason, status.mode, status.age_s = advice.action, advice.reason, advice.mode, age_s
    status.goodput_per_s = advice.measured.goodput_per_s
    status.rate_per_s = situation.load.rate_per_s
    status.prompt_tokens, status.output_tokens = situation.load.prompt_tokens, situation.load.output_tokens
    status.ttft_goal_s, status.tpot_goal_s = situation.goal.ttft_s, situation.goal.tpot_s
    status.evidence.extend(evidence(situation, advice.proposal))
    for role in PHASES:
        phase = situation.phases[role]
        if phase.workers or phase.legs_per_s:
            status.phases.add(
                role=role.value,
                workers=phase.workers,
                legs_per_s=phase.legs_per_s,
                attainment=phase.kept(situation.goal),
                queued_tokens=phase.queued_tokens,
                kv_usage=phase.kv_used,
                decode_batch=phase.batch,
            )
    if advice.proposal is not None:
        status.proposal.CopyFrom(_proposal(situation, advice.proposal))
    return status


def _proposal(situation: Situation, proposal: Proposal) -> admin_pb2.AdvisorProposal:
    return admin_pb2.AdvisorProposal(
        pools=_counts(situation.counts, proposal.counts),
        mode=proposal.mode,
        how=proposal.how,
        goodput_now_per_s=proposal.baseline_per_s,
        goodput_then_per_s=proposal.then.goodput_per_s,
        goodput_meanwhile_per_s=proposal.meanwhile.goodput_per_s,
        cost_s=proposal.cost_s,
        cost_requests=proposal.cost_requests,
        gain_requests=proposal.gain_requests,
    )


def _counts(before: dict[str, int], after: dict[str, int]) -> list[admin_pb2.AdvisorMove]:
    return [
        admin_pb2.AdvisorMove(pool=name, current_replicas=count, replicas=after[name])
        for name, count in before.items()
        if after[name] != count
    ]
