"""Commands that change pools and workers of a running system: `scale`, `pools`, `drain`, `cordon`, `uncordon`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator import admin_call
from coordinator.admin_call import DEFAULT_ADMIN, Admin, AsJson, as_dict, fail, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protos.splitpoint.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="The set of pools, and the caches of their workers.")

POLL_S = 0.25

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would become of each worker.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]
WaitLimit = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long --wait waits.")]
Expected = Annotated[
    int | None, typer.Option("--expected-version", min=0, help="Refuse when the desired pools are of another version.")
]
WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `get workers` shows it.")]


def scale(
    pool: Annotated[str, typer.Argument(help="prefill, decode, ...")],
    replicas: Annotated[int, typer.Option(min=0, help="How many workers the pool shall have.")],
    current_replicas: Annotated[int | None, typer.Option(min=0, help="Refuse when the present target is another.")] = None,
    expected_version: Expected = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also when it is autoscaled; its autoscaler goes on from there.")
    ] = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    timeout: WaitLimit = 600.0,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Change one pool's target; returns at once, or with --wait when the pool has exactly so many workers and all are ready."""
    from protos.splitpoint.v1 import admin_pb2

    request = admin_pb2.ScalePoolRequest(
        pool=pool, replicas=replicas, current_replicas=current_replicas, expected_version=expected_version, dry_run=dry_run,
        force=force,
    )  # fmt: skip
    reply = admin_call.call(admin, "ScalePool", request)
    if wait and not dry_run:
        reply.pool.CopyFrom(_wait(admin, timeout, lambda status: _pool_behind(status, pool), lambda s: _pool(s, pool)))
    if as_json:
        print_json(as_dict(reply))
        return
    if dry_run:
        _print_plan(reply.plan)
    Console().print(f"{reply.pool.name}: target {reply.pool.target}, ready {reply.pool.ready}, version {reply.version}")


@app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(help="TOML with one table [pools.NAME] for each pool: role, replicas, engine.")],
    expected_version: Expected = None,
    max_unavailable: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="Of a pool: may be away while its workers are replaced; 1: all at once."
        ),
    ] = None,
    surge: Annotated[
        bool, typer.Option("--surge", help="Nobody is away: successors start beside; takes the accelerators of one more.")
    ] = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    timeout: WaitLimit = 600.0,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Replace the whole set of pools. Workers whose engine arguments agree change their role as they run; others are drained
    batch by batch, and their successors started."""
    from coordinator.config import load_pools
    from coordinator.config_layers import ConfigError
    from coordinator.pools.admin import pool_specs
    from protos.splitpoint.v1 import admin_pb2

    try:
        pools, others = load_pools(file)
    except ConfigError as error:
        raise fail(str(error)) from None
    if others:
        note = f"only [pools] is applied; {', '.join(f'[{name}]' for name in others)} would need a restart of `serve`"
        Console(stderr=True).print(note, markup=False, soft_wrap=True)
    if scaled := [name for name, pool in pools.items() if pool.autoscaling_config is not None]:
        note = f"autoscaling_config of {', '.join(scaled)} is for `serve`: it is not applied, use `splitpoint autoscale`"
        Console(stderr=True).print(note, markup=False, soft_wrap=True)
    request = admin_pb2.ApplyPoolsRequest(
        pools=pool_specs(pools), dry_run=dry_run, expected_version=expected_version, max_unavailable=max_unavailable, surge=surge
    )
    began_s, waited = time.monotonic(), ""
    reply = admin_call.call(admin, "ApplyPools", request)
    if wait and not dry_run:
        _wait(admin, timeout, lambda status: list(status.unsettled), lambda status: status)
        waited = f", as desired after {time.monotonic() - began_s:.1f} s"
    if as_json:
        print_json(as_dict(reply))
        return
    _print_plan(reply.plan)
    Console().print(f"version {reply.version}{waited}", highlight=False)


@app.command("reset-caches")
def reset_caches(
    pools: Annotated[list[str] | None, typer.Argument(metavar="[POOL]...", help="None: all.")] = None,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Let ready workers forget their cached prefixes; refused while one of them has blocks in use."""
    from protos.splitpoint.v1 import admin_pb2

    reply = admin_call.call(admin, "ResetPrefixCaches", admin_pb2.ResetPrefixCachesRequest(pools=pools or []))
    if as_json:
        print_json(as_dict(reply))
    else:
        Console().print(f"{reply.workers} workers have forgotten their cached prefixes")


def drain(
    worker: WorkerId,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds; then what is left is ended. 0: the configured time.")] = 0.0,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Let a worker finish its requests and leases, then stop it; its pool starts another. Returns when it is gone."""
    from protos.splitpoint.v1 import admin_pb2

    limit_s = timeout + 60.0 if timeout else 3600.0
    request = admin_pb2.DrainWorkerRequest(worker_id=worker, timeout_s=timeout)
    _print_worker(admin_call.call(admin, "DrainWorker", request, timeout_s=limit_s), as_json)


def cordon(worker: WorkerId, admin: Admin = DEFAULT_ADMIN, as_json: AsJson = False) -> None:
    """Offer a worker nothing new. It finishes what it has and stays in its pool."""
    _cordon(worker, True, admin, as_json)


def uncordon(worker: WorkerId, admin: Admin = DEFAULT_ADMIN, as_json: AsJson = False) -> None:
    """Offer a cordoned worker requests again."""
    _cordon(worker, False, admin, as_json)


def _cordon(worker: str, cordoned: bool, admin: str, as_json: bool) -> None:
    from protos.splitpoint.v1 import admin_pb2

    request = admin_pb2.CordonWorkerRequest(worker_id=worker, cordoned=cordoned)
    _print_worker(admin_call.call(admin, "CordonWorker", request), as_json)


def _print_worker(reply: Any, as_json: bool) -> None:
    if as_json:
        print_json(as_dict(reply))
        return
    worker = reply.worker
    Console().print(f"{worker.worker_id}: {worker.detail or admin_call.state_of(worker)}")


def _print_plan(plan: Iterable[admin_pb2.WorkerPlan]) -> None:
    table = admin_call.folding_table("what", "worker", "from", "to", "why")
    for step in plan:
        table.add_row(step.action, step.worker_id, step.pool, step.new_pool, step.reason)
    admin_call.output_console().print(table)


def _pool(status: admin_pb2.GetStatusResponse, name: str) -> Any:
    """Raises `typer.Exit` when somebody has taken the pool away meanwhile."""
    found = next((pool for pool in status.pools if pool.name == name), None)
    if found is None:
        raise fail(f"pool {name} is gone: somebody has applied other pools")
    return found


def _pool_behind(status: admin_pb2.GetStatusResponse, name: str) -> list[str]:
    pool = _pool(status, name)
    counts = f"{pool.ready} ready, {pool.starting} starting, {pool.draining} draining of {pool.target}"
    spares = f", {pool.spares_ready} of {pool.spares} spares" if pool.spares else ""
    there = (pool.ready, pool.starting, pool.draining, pool.spares_ready) == (pool.target, 0, 0, pool.spares)
    return [] if there else [f"pool {name}: {counts}{spares}"]


def _wait(admin: str, limit_s: float, behind: Callable[[Any], list[str]], result: Callable[[Any], Any]) -> Any:
    """`result` of the first status that is not `behind`; ends the program, saying what is missing, after `limit_s`."""
    from protos.splitpoint.v1 import admin_pb2

    until_s = time.monotonic() + limit_s
    while True:
        status = admin_call.call(admin, "GetStatus", admin_pb2.GetStatusRequest())
        missing = behind(status)
        if not missing:
            return result(status)
        if time.monotonic() > until_s:
            raise fail(f"not done after {limit_s:g} s: {'; '.join(missing)}")
        time.sleep(POLL_S)
