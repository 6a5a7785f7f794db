"""`splitpoint get pools|workers|requests|autoscalers`: what there is, as a table, wide, JSON or YAML."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator import admin_call, autoscale_cli
from coordinator.admin_call import DEFAULT_ADMIN, Admin, as_dict, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

app = typer.Typer(no_args_is_help=True, help="What there is: pools, workers, requests in flight, autoscalers.")


class Format(enum.StrEnum):
    """How an answer is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, typer.Option("-o", "--output", help="wide: more columns; json, yaml: every field.")]


@app.command("pools")
def pools(admin: Admin = DEFAULT_ADMIN, output: Output = Format.TABLE) -> None:
    """Each pool's target beside what it has; JSON and YAML carry the version of the desired pools and the autoscalers too."""
    status = _status(admin)
    if output in (Format.JSON, Format.YAML):
        whole = as_dict(status)
        print_data({name: whole[name] for name in ("version", "unsettled", "pools", "autoscaling") if name in whole}, output)
        return
    columns: dict[str, Callable[[Any], str]] = {
        "pool": lambda p: p.name,
        "role": lambda p: p.role,
        "target": lambda p: str(p.target),
        "ready": lambda p: str(p.ready),
        "updated": lambda p: str(p.updated),
        "spares": lambda p: f"{p.spares_ready}/{p.spares}" if p.spares or p.spares_ready else "",
        "starting": lambda p: str(p.starting),
        "draining": lambda p: str(p.draining),
    }
    if output is Format.WIDE:
        columns |= {
            "autoscaled": lambda p: _autoscaled(status, p.name),
            "spare kind": lambda p: p.spare_kind if p.spares else "",
            "engine": lambda p: p.engine_json,
            "failures": lambda p: str(p.failures),
            "trouble": lambda p: p.detail,
        }
    print_table(columns, status.pools)


@app.command("workers")
def workers(
    pool: Annotated[str | None, typer.Option(help="Only this pool's.")] = None,
    admin: Admin = DEFAULT_ADMIN,
    output: Output = Format.TABLE,
) -> None:
    """Workers, their state and their load."""
    found = [w for w in _status(admin).workers if pool in (None, w.pool)]
    if output in (Format.JSON, Format.YAML):
        print_data([as_dict(w) for w in found], output)
        return
    columns: dict[str, Callable[[Any], str]] = {
        "worker": lambda w: w.worker_id,
        "pool": lambda w: w.pool,
        "role": lambda w: w.role,
        "state": admin_call.state_of,
        "running": lambda w: str(w.running),
        "waiting": lambda w: str(w.waiting),
        "leases": lambda w: str(w.leases),
        "KV used": lambda w: f"{w.kv_usage:.0%}",
        "heard": lambda w: f"{w.heartbeat_age_s:.1f} s",
    }
    if output is Format.WIDE:
        columns |= {
            "incarnation": lambda w: w.incarnation,
            "address": lambda w: w.address,
            "node": lambda w: w.node_id[:8],
            "rack": lambda w: w.rack,
            "pid": lambda w: str(w.pid),
            "transports": lambda w: ", ".join(w.transports),
            "former legs": lambda w: str(w.former_legs),
            "detail": lambda w: w.detail,
        }
    print_table(columns, found)


@app.command("autoscalers")
def autoscalers(admin: Admin = DEFAULT_ADMIN, output: Output = Format.TABLE) -> None:
    """Each autoscaled pool's limits, its last decision, and who would get the next accelerator; wide: with the evidence."""
    autoscaling = _status(admin).autoscaling
    if output in (Format.JSON, Format.YAML):
        print_data(as_dict(autoscaling), output)
        return
    columns: dict[str, Callable[[Any], str]] = {
        "pool": lambda a: a.pool,
        "limits": autoscale_cli.limits,
        "wants": lambda a: str(a.decision.wanted_replicas) if a.HasField("decision") else "",
        "last": autoscale_cli.last,
        "age": lambda a: f"{a.decision.age_s:.0f} s" if a.HasField("decision") else "",
    }
    if output is Format.WIDE:
        columns["evidence"] = lambda a: "\n".join(autoscale_cli.evidence(a))
    else:
        columns["why"] = lambda a: a.decision.reason
    print_table(columns, autoscaling.autoscalers)
    Console().print("\n".join(autoscale_cli.next_accelerator(autoscaling)), markup=False, soft_wrap=True)


@app.command("requests")
def requests(admin: Admin = DEFAULT_ADMIN, output: Output = Format.TABLE) -> None:
    """What is in flight at every gateway, the oldest first."""
    from protos.splitpoint.v1 import admin_pb2

    found = []
    for gateway in _status(admin).gateways:
        reply = admin_call.call(gateway.admin_address, "ListRequests", admin_pb2.ListRequestsRequest())
        found += [(gateway.gateway_id, request) for request in reply.requests]
    found.sort(key=lambda item: -item[1].age_s)
    if output in (Format.JSON, Format.YAML):
        print_data([{"gateway_id": gateway, **as_dict(request)} for gateway, request in found], output)
        return
    columns: dict[str, Callable[[Any], str]] = {
        "request": lambda item: item[1].request_id,
        "path": lambda item: item[1].path,
        "prefill": lambda item: item[1].prefill_worker,
        "decode": lambda item: item[1].decode_worker,
        "prompt": lambda item: str(item[1].prompt_tokens),
        "age": lambda item: f"{item[1].age_s:.2f} s",
        "first token": lambda item: f"{item[1].ttft_s:.2f} s" if item[1].ttft_s else "",
    }
    if output is Format.WIDE:
        columns |= {
            "gateway": lambda item: item[0],
            "client's id": lambda item: item[1].client_request_id,
            "transport": lambda item: item[1].transport,
            "attempts": lambda item: str(item[1].attempts),
        }
    print_table(columns, found)


def _autoscaled(status: Any, pool: str) -> str:
    autoscaler = autoscale_cli.found(status.autoscaling, pool)
    return "" if autoscaler is None else f"{autoscale_cli.limits(autoscaler)}, {autoscale_cli.last(autoscaler)}"


def _status(admin: str) -> Any:
    from protos.splitpoint.v1 import admin_pb2

    return admin_call.call(admin, "GetStatus", admin_pb2.GetStatusRequest())


def print_data(value: Any, output: Format) -> None:
    """As JSON or YAML, on standard output."""
    if output is Format.JSON:
        print_json(value)
        return
    import yaml  # type: ignore[import-untyped]

    sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def print_table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any]) -> None:
    """A row each, by what each column shows of it. What is too wide for a terminal goes on in its next line."""
    table = admin_call.folding_table(*columns)
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    admin_call.output_console().print(table)
