"""`splitpoint compare`: send one workload through both paths of a running system, and judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.compare import calibrate_cli, records_cli, run_cli
from coordinator.compare.breakeven.cli import make_map
from coordinator.compare.quality_cli import quality
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc

DEFAULT_ADMIN = "127.0.0.1:50052"
ADMIN_TIMEOUT_S = 5.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(quality)


@app.callback(invoke_without_command=True)
def compare(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="The short form: at most 90 s; shows much, decides nothing.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record here.")] = None,
    target: Annotated[
        str,
        typer.Option(metavar="TARGET", help="A gateway's gRPC address, or its http://HOST:PORT; else its admin is asked."),
    ] = "",
    admin: Annotated[str, typer.Option(envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="Admin address.")] = DEFAULT_ADMIN,
    url: Annotated[str, typer.Option(metavar="URL", help="Of the gateways that admin knows, the one with this URL.")] = "",
    workload: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML; `splitpoint workload describe` shows it.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Of the workload; repeatable.")] = None,
    slo: Annotated[
        str, typer.Option(metavar="SLO", help="Such as ttft=500ms,tpot=2.5x,itl_p99=100ms; x: of the unloaded value.")
    ] = "",
    first_seed: Annotated[int, typer.Option(min=1, help="Runs of one experiment take different seeds; see `merge`.")] = 1,
    api_key: Annotated[str, typer.Option(envvar="SPLITPOINT_API_KEY", help="Bearer key, where the gateway asks for one.")] = "",
) -> None:
    """Send one workload through both paths of a running system, and judge which pays."""
    if context.invoked_subcommand is not None:
        return
    from coordinator.compare.report import show
    from coordinator.compare.run import ComparisonError
    from coordinator.compare.run import quick as run
    from coordinator.compare.slo import SloError, parse
    from coordinator.compare.sources import read
    from coordinator.compare.traces import WorkloadError

    if not quick:
        raise typer.BadParameter("only the short comparison is here; give --quick")
    try:
        wanted = parse(slo) if slo else None
    except SloError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    if sets and workload is None:
        raise typer.BadParameter("changes the workload that --workload names", param_hint="--set")
    errors = Console(stderr=True)
    try:
        material = None if workload is None else read(workload, sets or ())
    except WorkloadError as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    found_target, manifest = ask_admin(admin, url)
    target = target or found_target
    if not target:
        errors.print(f"no gateway: {admin} does not answer or knows none, and no --target was given", style="red", markup=False)
        raise typer.Exit(1)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    try:
        # Drawn between probes only: a thread that draws would delay what is being sent.
        with Progress(*columns, console=errors, transient=True, auto_refresh=False) as progress:
            task = progress.add_task("connecting", total=1.0)

            def say(text: str, share: float) -> None:
                progress.update(task, description=text, completed=share, refresh=True)

            record = asyncio.run(
                run(
                    target,
                    json_path=json_path,
                    manifest=manifest,
                    say=say,
                    api_key=api_key,
                    material=material,
                    slo=wanted,
                    first_seed=first_seed,
                )
            )
    except (ComparisonError, WorkloadError, OSError) as error:
        errors.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    console = Console()
    show(record, console)
    if json_path is not None:
        console.print(f"record: {json_path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Of one experiment, each with seeds of its own.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The record of all seeds.")],
    looks: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of seeds at which it was planned to judge.")] = "",
) -> None:
    """Judge the seeds of several runs together: short machine time adds up. Needs no system."""
    from coordinator.compare.merge import MergeError
    from coordinator.compare.merge import merge as merged
    from coordinator.compare.read import RecordError, load
    from coordinator.compare.record import write
    from coordinator.compare.report import show

    try:
        planned = [int(word) for word in looks.split(",")] if looks else []
    except ValueError:
        raise typer.BadParameter(f"{looks!r}: write rising numbers of seeds, 3,5,8", param_hint="--looks") from None
    try:
        record = merged([load(path) for path in records], planned)
        write(record, out)
    except (RecordError, MergeError, OSError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--looks") from None
    console = Console()
    show(record, console)
    console.print(f"record: {out}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def proof(
    experiments: Annotated[int | None, typer.Option(min=20, help="Of each cell; 2,000 unless given, 20 with --engine.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same table.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record here.")] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Whole comparisons of simulated engines in virtual time. Goes on with --json's FILE.")
    ] = False,
    cells: Annotated[list[str] | None, typer.Option("--cell", metavar="NAME", help="With --engine: only it; repeatable.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=256, help="With --engine: so many at once.")] = 1,
) -> None:
    """Prove the instrument on a system whose goodput is known: coverage, errors, power, planted faults. Needs no system.

    Exit status 1 when what it must hold does not.
    """
    if engine:
        from coordinator.compare.proof import engine_cli

        engine_cli.run(experiments or engine_cli.EXPERIMENTS, seed, cells or (), json_path, processes)
        return
    if cells or processes != 1:
        raise typer.BadParameter("goes with --engine", param_hint="--cell" if cells else "--processes")
    from coordinator.compare.proof.record import criteria, prove
    from coordinator.compare.proof.table import show as show_proof
    from coordinator.compare.record import write_text

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        found = prove(experiments or 2000, seed, lambda text, share: progress.update(task, description=text, completed=share))
    show_proof(found, Console())
    if json_path is not None:
        write_text(json.dumps(found.as_dict(), indent=1) + "\n", json_path)
    if not all(held for _, held in criteria(found)):
        raise typer.Exit(1)


app.command()(run_cli.run)
app.command()(calibrate_cli.calibrate)
app.command()(records_cli.family)
app.command("map")(make_map)


def main(arguments: Sequence[str]) -> int:
    """Run the command on these arguments. Returns the exit status: 0 done, 1 failed, 2 wrong usage."""
    try:
        app(list(arguments), prog_name="splitpoint compare")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def ask_admin(address: str, url: str) -> tuple[str, dict[str, Any]]:
    """The gRPC address of the gateway (the first, or the one with this URL) and the manifest; empty where there is none."""
    wanted = url.removeprefix("http://").rstrip("/")
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            gateways = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=ADMIN_TIMEOUT_S).gateways
            manifest = stub.GetManifest(admin_pb2.GetManifestRequest(), timeout=ADMIN_TIMEOUT_S).manifest_json
        except grpc.RpcError:
            return "", {}
    target = next((g.grpc_address for g in gateways if not wanted or g.http_address == wanted), "")
    return target, json.loads(manifest) if manifest else {}
