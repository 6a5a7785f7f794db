"""`splitpoint bench routing`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def routing(
    workers: Annotated[
        int | None, typer.Option(min=2, help="Workers, 1000 unless it says otherwise; with --trace, prefill workers, 4.")
    ] = None,
    gateways: Annotated[int, typer.Option(min=1, help="Routers that share the decisions.")] = 10,
    decisions: Annotated[int, typer.Option(min=10, help="Decisions per policy.")] = 10_000,
    placement: Annotated[str, typer.Option(help="Where the two workers of a pair are: gateway.routing.placement.")] = "any",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay a trace with hash_ids (JSON lines) in virtual time instead."),
    ] = None,
    cache_tokens: Annotated[int, typer.Option(min=512, help="With --trace: KV that one worker caches.")] = 4_194_304,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record.")] = None,
) -> None:
    """Time decisions and reconcile passes among many workers, or replay a trace and count prefix hits and load."""
    from coordinator.compare.traces import WorkloadError

    try:
        if trace is not None:
            record, text = _replayed(trace, workers or 4, cache_tokens)
        else:
            record, text = _timed(workers or 1000, gateways, decisions, placement)
    except (OSError, UnicodeDecodeError, WorkloadError) as error:
        typer.echo(f"{trace}: {error}", err=True)
        raise typer.Exit(1) from error
    sys.stdout.write(text + "\n")
    if json_file is not None:
        from coordinator.manifest import git_commit, hardware, versions

        record["manifest"] = {
            "hardware": hardware(),
            "versions": versions(),
            "git_commit": git_commit(),
            "command": sys.argv[1:],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def _timed(workers: int, gateways: int, decisions: int, placement: str) -> tuple[dict[str, Any], str]:
    from coordinator.bench.routing_scale import ScaleSpec, measure, table
    from coordinator.routing.views import Placement

    if placement not in tuple(Placement):
        raise typer.BadParameter(f"{placement!r} is none of {', '.join(Placement)}", param_hint="--placement")
    spec = ScaleSpec(workers=workers, gateways=gateways, decisions=decisions, placement=Placement(placement))
    record = measure(spec, say=lambda what: typer.echo(what, err=True))
    return record, table(record)


def _replayed(trace: Path, workers: int, cache_tokens: int) -> tuple[dict[str, Any], str]:
    from coordinator.bench.routing_trace import ReplaySpec, replay, table
    from coordinator.compare.traces import parse_trace

    record = replay(parse_trace(trace.read_text()), ReplaySpec(workers=workers, cache_tokens=cache_tokens))
    return record, table(record)
