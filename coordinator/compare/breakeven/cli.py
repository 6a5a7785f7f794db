"""`splitpoint compare map`: where splitting pays, from records. No system is needed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def make_map(
    records: Annotated[list[Path] | None, typer.Argument(metavar="RECORD...", help="Of one model on one machine.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The map, JSON.")] = Path("breakeven.json"),
    html: Annotated[bool, typer.Option("--html", help="A page beside it, FILE with the ending .html.")] = False,
    slo: Annotated[
        str, typer.Option(metavar="SLO", help="Absolute, such as ttft=500ms,tpot=50ms; else the first record's.")
    ] = "",
    bandwidth: Annotated[
        float, typer.Option(min=0, metavar="GB/S", help="Of the measured link; 0: as its fastest transfers say.")
    ] = 0.0,
    engines: Annotated[
        str, typer.Option(metavar="P:D:C:A", help="Prefill, decode, colocated engines, accelerators; else as the records say.")
    ] = "",
    arm: Annotated[str, typer.Option(metavar="NAME", help="The split arm, where a record has several.")] = "",
    inputs: Annotated[str, typer.Option(metavar="N,N,...", help="Uncached prompt tokens of the grid.")] = "",
    outputs: Annotated[str, typer.Option(metavar="N,N,...", help="Output tokens of the grid.")] = "",
    loads: Annotated[str, typer.Option(metavar="X,X,...", help="Requests/s and accelerator of the grid.")] = "",
    bandwidths: Annotated[str, typer.Option(metavar="X,X,...", help="Links of the grid, GB/s.")] = "",
    print_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a map and exit.")] = False,
) -> None:
    """Make a break-even map over prompt, output, load and link of the records of one model on one machine.

    Every cell says whether it was measured, fitted, or lies outside of what was measured.
    """
    from coordinator.compare.breakeven.build import build
    from coordinator.compare.breakeven.files import schema, to_json
    from coordinator.compare.breakeven.model import Layout
    from coordinator.compare.breakeven.observe import MapError
    from coordinator.compare.breakeven.page import as_plain, render
    from coordinator.compare.read import RecordError, read
    from coordinator.compare.record import write_text

    if print_schema:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
        return
    if not records:
        raise typer.BadParameter("name one record at least", param_hint="RECORD...")
    layout = None
    if engines:
        parts = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", engines)
        try:
            if parts is None:
                raise ValueError("write four whole numbers, 1:1:2:2")
            prefill, decode, colocated, accelerators = map(int, parts.groups())
            layout = Layout(prefill=prefill, decode=decode, colocated=colocated, accelerators=accelerators)
        except ValueError as error:
            raise typer.BadParameter(f"{engines!r}: {error}", param_hint="--engines") from None
    try:
        found = build(
            [(path.stem, read(path)) for path in records],
            slo=_objective(slo),
            layout=layout,
            bandwidth_bytes_per_s=bandwidth * 1e9 or None,
            challenger=arm,
            inputs=_numbers(inputs, "--inputs"),
            outputs=_numbers(outputs, "--outputs"),
            loads=_numbers(loads, "--loads"),
            bandwidths=[each * 1e9 for each in _numbers(bandwidths, "--bandwidths")],
        )
        write_text(to_json(found), out)
        if html:
            write_text(render(found), out.with_suffix(".html"))
    except (RecordError, MapError, OSError) as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console = Console()
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for name, value in as_plain(found).items():
        console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"map: {out}", markup=False, highlight=False, soft_wrap=True)


def _objective(text: str) -> dict[str, object] | None:
    import dataclasses

    from coordinator.compare.slo import SloError, parse

    if not text:
        return None
    try:
        spec = parse(text)
    except SloError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    if spec.ttft.multiple or spec.tpot.multiple or (spec.itl_p99 is not None):
        raise typer.BadParameter("a map needs absolute ttft and tpot, and judges nothing else", param_hint="--slo")
    return dataclasses.asdict(spec.resolve(unloaded_ttft_s=0.0, unloaded_tpot_s=0.0))


def _numbers(text: str, name: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write numbers, 512,1024,2048", param_hint=name) from None
    if any(not 0 < each < 1e15 for each in found) or sorted(set(found)) != found:
        raise typer.BadParameter(f"{text!r}: write rising numbers above 0", param_hint=name)
    return found
