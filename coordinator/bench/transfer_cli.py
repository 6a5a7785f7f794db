"""`splitpoint bench transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def transfer(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: under three minutes.")] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a record: samples, ratios, machine.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw GB/s over size (.png, .svg, .pdf).")] = None,
    model: Annotated[
        Path, typer.Option("--model", help="A checkpoint whose config vLLM's NixlConnector reads its shape from.")
    ] = Path("models/smollm2-135m-instruct"),
) -> None:
    """Rates between two processes of this host: transports ucx and grpc, NIXL READ, vLLM's NixlConnector, a raw gRPC stream, and
    what memory allows; in turns, in one run."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from coordinator.bench import transfer_report as report
    from coordinator.bench.transfer import Plan, measure
    from coordinator.bench.transfer_summary import rates
    from kvtransfer.bench.halves import PathError

    plan = Plan.make(quick=quick, model=model)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting")
        try:
            outcome = measure(
                plan,
                lambda text: progress.update(task, description=text),
                lambda what, done, of: progress.update(task, description=what, completed=done, total=of),
            )
        except PathError as error:
            Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
    console = Console()
    console.print(report.table(rates(outcome.samples)))
    if json is not None:
        report.write(json, report.record(outcome, plan))
    if plot is not None:
        report.plot(plot, outcome)
    for line in report.lines(outcome):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
