"""`splitpoint compare proof --engine`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.compare.proof.engine_cells import CELLS
from coordinator.compare.proof.engine_record import EngineProofError, criteria, prove
from coordinator.compare.proof.engine_table import show

EXPERIMENTS = 20


def run(experiments: int, seed: int, names: Sequence[str], path: Path | None, processes: int) -> None:
    """Run what is missing, print the tables.

    Raises:
        typer.Exit: status 1, a criterion fails or the record is another proof's.
        typer.BadParameter: there is no such cell.
    """
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {', '.join(CELLS)}", param_hint="--cell")
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=errors, transient=True) as progress:
            task = progress.add_task("", total=1.0)
            found = prove(
                experiments,
                seed,
                names=names,
                path=path,
                processes=processes,
                told=lambda text, share: progress.update(task, description=text, completed=share),
            )
    except (EngineProofError, OSError) as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    show(found, Console())
    if not all(held for _, held in criteria(found)):
        raise typer.Exit(1)
