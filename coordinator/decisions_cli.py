"""`splitpoint decisions`: what path `auto` chose, and by how much it lost where it did."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from coordinator import admin_call
from coordinator.admin_call import DEFAULT_ADMIN, Admin, as_dict
from coordinator.get_cli import Format, Output, print_data, print_table

SHOWN = 20


def decisions(
    every: Annotated[bool, typer.Option("--all", help="Not only those that lost; the newest first.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="The first so many of each gateway; 0: all that it remembers.")] = SHOWN,
    admin: Admin = DEFAULT_ADMIN,
    output: Output = Format.TABLE,
) -> None:
    """What path `auto` chose: requests for which the choice lost, the worst first, and by how much."""
    from protos.splitpoint.v1 import admin_pb2

    status = admin_call.call(admin, "GetStatus", admin_pb2.GetStatusRequest())
    asked = admin_pb2.ListDecisionsRequest(lost_only=not every, limit=limit)
    replies = [(g.gateway_id, admin_call.call(g.admin_address, "ListDecisions", asked)) for g in status.gateways]
    if output in (Format.JSON, Format.YAML):
        print_data([{"gateway_id": gateway, **as_dict(reply)} for gateway, reply in replies], output)
        return
    rows = [(gateway, each) for gateway, reply in replies for each in reply.decisions]
    if not every:
        rows.sort(key=lambda row: -row[1].lost_by)
    print_table(_columns(output), rows)
    for gateway, reply in replies:
        Console().print(_summary(gateway, reply), highlight=False, markup=False, soft_wrap=True)


def _columns(output: Format) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "request": lambda row: row[1].request_id,
        "path": lambda row: row[1].path,
        "reason": lambda row: row[1].reason,
        "prompt": lambda row: str(row[1].prompt_tokens),
        "lost by": lambda row: f"{row[1].lost_by:.1%}" if row[1].measured else "",
        "objective": lambda row: row[1].objective_source,
        "used": lambda row: f"{row[1].stress:.1%}" if row[1].measured else "",
        "predicted": lambda row: ", ".join(f"{p.path} {p.stress:.1%}" for p in row[1].predictions),
    }
    if output is Format.WIDE:
        columns |= {
            "gateway": lambda row: row[0],
            "worker": lambda row: row[1].solo_role,
            "answer": lambda row: str(row[1].output_tokens),
            "TTFT of": lambda row: f"{row[1].ttft_s * 1e3:.1f} of {row[1].slo_ttft_s * 1e3:g} ms" if row[1].measured else "",
            "TPOT of": lambda row: f"{row[1].tpot_s * 1e3:.2f} of {row[1].slo_tpot_s * 1e3:g} ms" if row[1].measured else "",
            "misses": lambda row: ", ".join(f"{p.path} {p.own_misses:.2f}+{p.others_misses:.2f}" for p in row[1].predictions),
            "queued": lambda row: ", ".join(f"{p.path} {p.queued_tokens}" for p in row[1].predictions),
            "running": lambda row: ", ".join(f"{p.path} {p.running}" for p in row[1].predictions),
        }
    return columns


def _summary(gateway: str, reply: Any) -> str:
    if not reply.corrections:
        return f"{gateway}: no path auto (gateway.auto.model_file)"
    factors = "; ".join(
        f"{c.path} TTFT x {c.ttft_factor:.2f}, TPOT x {c.tpot_factor:.2f} of {c.measured}" for c in reply.corrections
    )
    return f"{gateway}: {reply.decided} decided, {reply.lost} of the last {reply.remembered} lost; corrections: {factors}"
