"""`splitpoint autoscale`: let a pool's target follow its load; and how autoscalers are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator import admin_call
from coordinator.admin_call import DEFAULT_ADMIN, Admin, AsJson, as_dict, fail, print_json

if TYPE_CHECKING:
    from protos.splitpoint.v1 import admin_pb2

_Number = float | None


def autoscale(
    pool: Annotated[str, typer.Argument(help="prefill, decode, ...")],
    min_replicas: Annotated[int | None, typer.Option("--min", min=0, help="Fewest workers (default 1).")] = None,
    max_replicas: Annotated[int | None, typer.Option("--max", min=1, help="Most workers.")] = None,
    target_ongoing_requests: Annotated[_Number, typer.Option(help="Running and waiting, for one worker.")] = None,
    target_queued_tokens: Annotated[_Number, typer.Option(help="Prompt tokens that wait, for one prefill worker.")] = None,
    target_kv_usage: Annotated[_Number, typer.Option(help="Share of KV blocks in use.")] = None,
    target_decode_batch: Annotated[_Number, typer.Option(help="Sequences that run, for one decode worker.")] = None,
    ttft_goal_s: Annotated[_Number, typer.Option(help="Seconds to the first token.")] = None,
    tpot_goal_s: Annotated[_Number, typer.Option(help="Seconds for each further token.")] = None,
    target_attainment: Annotated[_Number, typer.Option(help="Share of requests that keep the goals (default 0.95).")] = None,
    upscale_delay_s: Annotated[_Number, typer.Option(help="For so long more are wanted first (default 30).")] = None,
    downscale_delay_s: Annotated[_Number, typer.Option(help="For so long fewer are wanted first (default 600).")] = None,
    downscale_to_zero_delay_s: Annotated[_Number, typer.Option(help="The same before the last one goes.")] = None,
    metrics_interval_s: Annotated[_Number, typer.Option(help="Between two looks (default 10).")] = None,
    look_back_period_s: Annotated[_Number, typer.Option(help="What one look takes into account (default 30).")] = None,
    aggregation_function: Annotated[str | None, typer.Option(help="mean, max or min over it (default mean).")] = None,
    upscaling_factor: Annotated[_Number, typer.Option(help="Share of the way up at once (default 1).")] = None,
    downscaling_factor: Annotated[_Number, typer.Option(help="Share of the way down at once (default 1).")] = None,
    tolerance: Annotated[_Number, typer.Option(help="By which share a load must miss its target (default 0.1).")] = None,
    budget: Annotated[
        int | None, typer.Option(min=0, help="Accelerators for all pools together, from now on; 0: no limit.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="The target stays where it is and is yours again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be decided now.")] = False,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Let a pool's target follow its load, between --min and --max. What is given replaces the pool's former policy; without any
    target or goal it is 2 ongoing requests for each worker."""
    policy = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("pool", "budget", "off", "dry_run", "admin", "as_json")
    }
    from protos.splitpoint.v1 import admin_pb2

    if off:
        if policy or dry_run or budget is not None:
            raise fail("--off stands alone")
        admin_call.call(admin, "RemoveAutoscaler", admin_pb2.RemoveAutoscalerRequest(pool=pool))
        if not as_json:
            Console().print(f"{pool}: not autoscaled any more")
        return
    if max_replicas is None:
        raise fail("--max is missing: how many workers the pool may have at most")
    request = admin_pb2.SetAutoscalerRequest(pool=pool, policy=policy, dry_run=dry_run, accelerator_budget=budget)
    status = admin_call.call(admin, "SetAutoscaler", request).autoscaler
    if as_json:
        print_json(as_dict(status))
        return
    lines = [f"{pool}: {limits(status)} workers", *evidence(status)]
    Console().print("\n".join(lines), markup=False, soft_wrap=True)


def limits(status: admin_pb2.AutoscalerStatus) -> str:
    """Of its pool's workers."""
    return f"{status.policy.min_replicas} to {status.policy.max_replicas}"


def last(status: admin_pb2.AutoscalerStatus) -> str:
    """What was decided last, in a few words."""
    if not status.HasField("decision"):
        return "nothing decided yet"
    decision = status.decision
    change = "" if decision.replicas == decision.current_replicas else f" {decision.current_replicas} to {decision.replicas}"
    return f"{decision.action}{change}"


def evidence(status: admin_pb2.AutoscalerStatus) -> list[str]:
    """The last decision and the figures that it rests on, a line each."""
    if not status.HasField("decision"):
        return []
    decision = status.decision
    lines = [f"{last(status)}: {decision.reason}"]
    return lines + [
        f"  {s.name}: {s.value:.4g} (target {s.target:g}) of {s.samples} samples wants {s.wanted_replicas}"
        for s in decision.signals
    ]


def next_accelerator(autoscaling: admin_pb2.Autoscaling) -> list[str]:
    """Who would get the next accelerator, and why, a line for each pool that may grow."""
    budget = f" of {autoscaling.accelerator_budget}" if autoscaling.HasField("accelerator_budget") else ""
    lines = [f"accelerators taken: {autoscaling.accelerators_taken}{budget}"]
    return lines + [
        f"{'the next one' if n == 0 else 'else'}: {g.pool}, {g.goodput_per_s:+.3g} requests/s in time for each accelerator"
        f" = {g.legs_per_s:.3g}/s x ({g.share_more:.3g} with {g.workers + 1} - {g.share_now:.3g} with {g.workers})"
        f" x {g.partner_share:.3g} in the other phase / {g.accelerators}, by {g.basis}"
        for n, g in enumerate(autoscaling.next)
    ]


def found(autoscaling: Any, pool: str) -> Any:
    """The autoscaler of one pool, or None."""
    return next((a for a in autoscaling.autoscalers if a.pool == pool), None)
