"""`splitpoint workload`: look at a workload before anything is sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from coordinator.compare.describe import Bin, Description

app = typer.Typer(no_args_is_help=True, help="Workloads of a comparison.")
BAR_WIDTH = 40


@app.callback()
def workload() -> None:
    """Workloads of a comparison."""


@app.command()
def describe(
    spec: Annotated[Path, typer.Argument(metavar="FILE", help="The specification, TOML.")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one value; repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which seed's sequence.")] = 1,
    rate: Annotated[float | None, typer.Option(help="Requests/s; default: the source's own, else 1.")] = None,
    cache_tokens: Annotated[
        list[int] | None, typer.Option(help="Also the ideal hits of a prefix cache of this many tokens; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lengths, arrivals and ideal prefix hits of one seed's workload, with its digest."""
    from coordinator.compare.describe import describe as figures
    from coordinator.compare.sources import read
    from coordinator.compare.traces import WorkloadError

    try:
        found = figures(read(spec, sets or ()).shapes(seed), rate_per_s=rate, cache_tokens=cache_tokens or ())
    except WorkloadError as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate" if "rate" in str(error) else "--cache-tokens") from None
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2) + "\n")
    else:
        show(found, Console())


def show(found: Description, console: Console) -> None:
    """Tables and histograms for people."""
    from rich.table import Table

    table = Table("", "mean", "p50", "p95", "max", title=f"Workload, seed {found.seed}", title_justify="left")
    for name, row in (("input tokens", found.input), ("output tokens", found.output)):
        table.add_row(name, f"{row['mean']:,.0f}", *(f"{row[key]:,.0f}" for key in ("p50", "p95", "max")))
    console.print(table)
    native = "" if found.native_rate_per_s is None else f" (the source's own: {found.native_rate_per_s:.3g}/s)"
    dispersion = "-" if found.dispersion is None else f"{found.dispersion:.3g}"
    lines = [
        f"{found.requests:,} requests in {found.duration_s:,.1f} s at {found.rate_per_s:.3g}/s{native}",
        f"gaps: coefficient of variation {found.arrival_cv:.2f}; dispersion of counts in 60 s {dispersion} (Poisson: 1 and 1)",
        f"{found.input_tokens:,} prompt tokens, {found.output_tokens:,} output tokens",
        f"ideal prefix hits: {found.hit_share:.1%}" + ("" if found.is_shared else " (distinct inputs)"),
        *(f"  with a cache of {size:,} tokens: {share:.1%}" for size, share in found.hit_share_of.items()),
    ]
    counts = found.counts
    for count, text in (
        (counts.dropped, "dropped, over a limit"),
        (counts.input_clipped, "prompts clipped"),
        (counts.output_clipped, "outputs clipped"),
        (counts.input_lengthened, "prompts lengthened to the salt"),
        (counts.spread, "rows of the source shared a time stamp and were spread"),
    ):
        if count:
            lines.append(f"{count:,} {text}")
    lines += [f"note: {note}" for note in found.notes]
    lines.append(f"digest {found.digest}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for title, rows in (("input tokens", found.input_bins), ("output tokens", found.output_bins)):
        console.print(f"\n{title}", highlight=False)
        for line in histogram(rows):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def histogram(rows: tuple[Bin, ...]) -> list[str]:
    """One line per bin, bars in proportion to the largest."""
    most = max(row.count for row in rows)
    return [f"{row.low:>9,} .. {row.high - 1:<9,} {row.count:>8,}  {'#' * round(BAR_WIDTH * row.count / most)}" for row in rows]
