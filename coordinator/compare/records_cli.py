"""`splitpoint report` and `splitpoint records`: what was compared before. No system is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def report(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Files that `compare --json` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page of one or several records, side by side."""
    from coordinator.compare.html.page import render
    from coordinator.compare.read import RecordError, read
    from coordinator.compare.record import write_text

    try:
        page = render([(_name(path), read(path)) for path in records])
        write_text(page, out)
    except (RecordError, OSError) as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    Console().print(f"report: {out}", markup=False, highlight=False, soft_wrap=True)


def records(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Searched with everything below it.")] = Path("runs"),
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a record and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the records of comparisons."""
    from coordinator.compare.read import RecordError, find
    from coordinator.compare.read import schema as made

    if schema:
        _print_json(made())
        return
    try:
        found = list(find(folder))
    except RecordError as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    errors = Console(stderr=True)
    rows = []
    for path, record in found:
        if isinstance(record, RecordError):
            errors.print(f"not listed: {record}", style="yellow", markup=False, soft_wrap=True)
        else:
            rows.append(_row(path, record))
    if as_json:
        _print_json(rows)
        return
    from rich.table import Table

    table = Table("record", "started", "model", "verdict", "split / colocated", "seeds", "void", title_justify="left")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(
            row["path"],
            row["started_at"],
            row["model"],
            row["verdict"],
            ratio,
            str(row["seeds"]),
            f"{row['void']} of {row['probes']}",
        )
    Console().print(table)


def family(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="One of each workload.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge several workloads together: at most a 5 % chance that any verdict among them is false. Needs no system."""
    import dataclasses

    from rich.table import Table

    from coordinator.compare.family import FamilyError, judge_records
    from coordinator.compare.read import RecordError, load

    try:
        found = judge_records({_name(path): load(path) for path in records})
    except (RecordError, FamilyError) as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        _print_json({name: dataclasses.asdict(judgement) for name, judgement in found.items()})
        return
    table = Table("workload", "verdict", "ratio", "seeds", "p", "p, adjusted", "why", title_justify="left")
    for name, judgement in found.items():
        ratio = "-" if judgement.ratio is None else f"{judgement.ratio:.2f}"
        p, adjusted = (("-" if value is None else f"{value:.3f}") for value in (judgement.p, judgement.p_adjusted))
        table.add_row(name, judgement.winner, ratio, str(judgement.seeds), p, adjusted, judgement.reason)
    Console().print(table)


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")


def _row(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    judgement = record["judgement"]
    return {
        "path": str(path),
        "kind": record["kind"],
        "started_at": record["started_at"],
        "model": record["model"],
        "verdict": judgement["verdict"],
        "ratio": judgement["ratio"],
        "low": judgement["low"],
        "high": judgement["high"],
        "seeds": judgement["seeds"],
        "probes": len(record["probes"]),
        "void": sum(bool(probe["void"]) for probe in record["probes"]),
    }


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
