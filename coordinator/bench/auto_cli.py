"""`splitpoint bench auto`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def auto(
    seeds: Annotated[int, typer.Option(min=2, help="Seeds that are judged.")] = 16,
    tuning_seeds: Annotated[int, typer.Option(min=1, help="Others, on which the better fixed path is chosen.")] = 4,
    workload: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="To run in.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record.")] = None,
    of: Annotated[
        Path | None,
        typer.Option("--of", metavar="RECORD", help="No run: the table of a record that `compare run` made with a path auto."),
    ] = None,
) -> None:
    """Goodput of path `auto` over both fixed paths': simulated engines that drift, predictions a fifth off. Minutes."""
    from coordinator.bench.auto_bench import CASES, measure, table

    if of is not None:
        _of_record(of)
        return
    for name in workload or ():
        if name not in CASES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(CASES)}", param_hint="--workload")
    record = measure(seeds, tuning_seeds, list(workload or CASES), processes)
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


def _of_record(file: Path) -> None:
    from coordinator.compare.auto_table import NoAutoError, table
    from coordinator.compare.read import RecordError, load

    try:
        text = table(load(file))
    except (RecordError, NoAutoError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    sys.stdout.write(text + "\n")
