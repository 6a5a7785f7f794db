"""`splitpoint bench transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from coordinator.bench.transfer_decode import DecodePlan


def transfer(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: under three minutes.")] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a record: samples, ratios, machine.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw GB/s over size (.png, .svg, .pdf).")] = None,
    model: Annotated[
        Path, typer.Option("--model", help="A checkpoint whose config vLLM's NixlConnector reads its shape from.")
    ] = Path("models/smollm2-135m-instruct"),
    own_cores: Annotated[
        bool, typer.Option("--own-cores", help="Half of the cores for each of the two processes, instead of all for both.")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Instead: what transfers cost an engine (--model, on CPUs) that decodes beside them.")
    ] = False,
    rate_mb: Annotated[float, typer.Option("--rate-mb", min=1, help="With --decode: transfers asked for, MB/s.")] = 200.0,
    nice: Annotated[int, typer.Option("--nice", min=0, max=19, help="With --decode: niceness of the receiving node.")] = 0,
) -> None:
    """Rates between two processes of this host: transports ucx and grpc, NIXL READ, vLLM's NixlConnector, a raw gRPC stream, and
    what memory allows; in turns, in one run. With --decode, inter-token latency alone and beside transfers, in turns."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from coordinator.bench import transfer_report as report
    from coordinator.bench.transfer import Plan, measure
    from coordinator.bench.transfer_decode import DecodePlan
    from coordinator.bench.transfer_summary import rates
    from kvtransfer.bench.halves import PathError

    if decode:
        _decode(DecodePlan(model=model, rate_bytes_per_s=rate_mb * 1e6, quads=2 if quick else 6, nice=nice), json)
        return
    try:
        plan = Plan.make(quick=quick, model=model, own_cores=own_cores)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--own-cores") from None
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


def _decode(plan: DecodePlan, json: Path | None) -> None:
    from coordinator.bench import transfer_decode
    from coordinator.bench.transfer_report import write
    from kvtransfer.bench.halves import PathError

    errors = Console(stderr=True)
    try:
        with errors.status("starting") as status:
            turns = transfer_decode.measure(plan, status.update)
    except PathError as error:
        errors.print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if json is not None:
        write(json, transfer_decode.record(turns, plan))
    for line in transfer_decode.lines(turns):
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
