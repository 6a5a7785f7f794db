"""`splitpoint rollout`: replace every worker of a pool, and every gateway, by a fresh one while requests run."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from coordinator import admin_call
from coordinator.admin_call import DEFAULT_ADMIN, Admin, AsJson, as_dict, fail, print_json
from coordinator.pools_cli import POLL_S, Wait, WaitLimit

app = typer.Typer(no_args_is_help=True, help="Restart workers and gateways in turn, without failing a request.")


@app.command("restart")
def restart(
    pools: Annotated[list[str] | None, typer.Argument(metavar="[POOL]...", help="Whose workers are replaced.")] = None,
    gateways: Annotated[bool, typer.Option("--gateways", help="Every gateway too.")] = False,
    surge: Annotated[
        bool, typer.Option("--surge", help="A worker goes when its successor serves; takes the accelerators of one more.")
    ] = False,
    wait: Wait = False,
    timeout: WaitLimit = 600.0,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Replace workers one of each pool at a time, gateways one at a time: each drains, keeping leases that it has given, and
    the next one goes when its successor serves and every gateway reaches it. Returns at once, or with --wait when all is done."""
    from protos.splitpoint.v1 import admin_pb2

    request = admin_pb2.RestartRequest(pools=pools or [], gateways=gateways, surge=surge)
    reply = admin_call.call(admin, "Restart", request)
    if wait:
        _wait(admin, timeout)
    if as_json:
        print_json(as_dict(reply))
        return
    names = ", ".join([*reply.workers, *reply.gateways]) or "nobody"
    Console().print(f"restarted: {names}" if wait else f"to be restarted: {names}", soft_wrap=True)


@app.command("status")
def status(timeout: WaitLimit = 600.0, admin: Admin = DEFAULT_ADMIN) -> None:
    """Wait until everything is as desired, restarts among it; say what is missing when the time is over."""
    _wait(admin, timeout)
    Console().print("everything is as desired")


def _wait(admin: str, limit_s: float) -> None:
    """Also while the gateway that is asked is itself restarted, or the coordinator is away."""
    from protos.errors import SplitpointError
    from protos.splitpoint.v1 import admin_pb2

    until_s = time.monotonic() + limit_s
    while True:
        answer = admin_call.ask(admin, "GetStatus", admin_pb2.GetStatusRequest())
        missing = [str(answer)] if isinstance(answer, SplitpointError) else list(answer.unsettled)
        if not missing:
            return
        if time.monotonic() > until_s:
            raise fail(f"not done after {limit_s:g} s: {'; '.join(missing)}")
        time.sleep(POLL_S)
