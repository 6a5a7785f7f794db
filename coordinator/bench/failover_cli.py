"""`splitpoint bench failover`."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Who is lost here is lost on purpose: no warnings of it."""
    logger = logging.getLogger("coordinator.pools")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def failover(
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Arrivals and lengths: CSV or JSON lines, as for workloads.")],
    groups: Annotated[int, typer.Option(min=1, max=64, help="That carry the planned load.")] = 4,
    spares: Annotated[int, typer.Option(min=1, max=64, help="That stand by.")] = 1,
    headroom: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Of what a group can take, the share planned at the peak.")
    ] = 0.7,
    start_s: Annotated[float, typer.Option(min=1.0, help="What an engine takes to load.")] = 120.0,
    minutes: Annotated[float, typer.Option(min=12.0, max=600.0, help="Of the run; the loss is about in its middle.")] = 30.0,
    ttft_s: Annotated[float, typer.Option(min=0.01, help="Objective: seconds until the first token.")] = 2.0,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable; 1 to 6 unless given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw what was kept around the loss.")] = None,
) -> None:
    """Lose one of several groups at the peak of a trace: no spare, a placed one, a warm one, one group more. Virtual time."""
    from coordinator.bench.failover import measure, table
    from coordinator.bench.failover_spec import FailoverSpec
    from coordinator.compare.traces import WorkloadError, parse_trace

    spec = FailoverSpec(
        groups=groups,
        spares=spares,
        headroom=headroom,
        start_s=start_s,
        ttft_s=ttft_s,
        duration_s=60.0 * minutes,
        seeds=tuple(seed or (1, 2, 3, 4, 5, 6)),
    )
    if plot_file is not None:
        from coordinator.bench.failover_plot import unwritable

        if fault := unwritable(plot_file):
            typer.echo(f"--plot {plot_file}: {fault}", err=True)
            raise typer.Exit(2)
    try:
        with _quiet():
            record = measure(parse_trace(trace.read_text()), spec)
    except (OSError, UnicodeDecodeError, WorkloadError) as error:
        typer.echo(f"{trace}: {error}", err=True)
        raise typer.Exit(1) from error
    sys.stdout.write(table(record) + "\n")
    if json_file is not None:
        from coordinator.manifest import git_commit, hardware, versions

        record["manifest"] = {
            "hardware": hardware(),
            "versions": versions(),
            "git_commit": git_commit(),
            "command": sys.argv[1:],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if plot_file is not None:
        from coordinator.bench.failover_plot import plot

        plot(plot_file, record)
