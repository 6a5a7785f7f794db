"""`splitpoint compare run`: an experiment file through a system that stands, or is served for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.compare.serving import system

if TYPE_CHECKING:
    from coordinator.compare.experiment import Experiment
    from coordinator.compare.record import Record
    from coordinator.compare.sources import Material
    from coordinator.compare.tools import Progress as Step

REDRAW_S = 2.0
"""Drawing takes the client's time: seldom enough that no request is late for it."""


def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="TOML; deploy/experiments/ has examples.")],
    record: Annotated[Path, typer.Option("--record", "-r", metavar="FILE", help="Written after every stage; gone on from.")],
    serve: Annotated[Path | None, typer.Option("--serve", metavar="CONFIG", help="Serve this configuration meanwhile.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Of CONFIG; repeatable.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="FILE", help="What path auto of CONFIG predicts from; measured first where missing."),
    ] = None,
    workload: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML, instead of the experiment's workload.")] = None,
    target: Annotated[str, typer.Option(metavar="ADDRESS", help="A gateway's HOST:PORT, or http://HOST:PORT.")] = "",
    admin: Annotated[str, typer.Option(envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="Admin address.")] = "",
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the HTML page here.")] = None,
    first_seed: Annotated[int | None, typer.Option(min=1, help="Instead of the experiment's.")] = None,
    max_minutes: Annotated[float | None, typer.Option(min=0.5, help="Begin no seed that would not end by then.")] = None,
    state_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Of a system that is served meanwhile.")] = Path(
        "runs/compare"
    ),
    api_key: Annotated[str, typer.Option(envvar="SPLITPOINT_API_KEY", help="Bearer key, where the gateway asks for one.")] = "",
) -> None:
    """Tune every arm, find the rates, then measure seed after seed until a planned look decides. Can be run again to go on."""
    from coordinator.compare.cli import DEFAULT_ADMIN, ask_admin
    from coordinator.compare.experiment import ExperimentError
    from coordinator.compare.merge import other_system
    from coordinator.compare.read import RecordError
    from coordinator.compare.rig import RigError
    from coordinator.compare.run import ComparisonError
    from coordinator.compare.step_times import CalibrationError
    from coordinator.compare.traces import WorkloadError
    from coordinator.served import ServeError

    began = time.monotonic()
    if calibrate is not None and serve is None:
        raise typer.BadParameter("is for a system that --serve brings", param_hint="--calibrate")
    if sets and serve is None:
        raise typer.BadParameter("changes the configuration that --serve names", param_hint="--set")
    if serve is not None and (target or admin):
        raise typer.BadParameter("brings a system of its own: no --target or --admin beside it", param_hint="--serve")
    known = (ExperimentError, WorkloadError, RecordError, ComparisonError, RigError, CalibrationError, ServeError, OSError)
    errors = Console(stderr=True)
    status = 0
    done: Record | None = None
    try:
        plan, material = _planned(experiment, workload, first_seed)
        before = _before(record, plan, material)
        given = list(sets or [])
        if calibrate is not None and serve is not None:
            given.append(_calibrated(calibrate, serve, given, state_dir, material, api_key))
        with system(serve, given, state_dir) as running:
            address = running or admin or ("" if target else DEFAULT_ADMIN)
            found, manifest = ask_admin(address, "") if address else ("", {})
            gateway = target or found
            if calibrate is not None:
                manifest["step_times"] = json.loads(calibrate.read_text(encoding="utf-8"))
            if not gateway:
                raise ComparisonError(f"no gateway: {address} does not answer or knows none, and no --target was given")
            if before is not None and (part := other_system(before.manifest, manifest)):
                raise ComparisonError(f"{record}: measured on another system, its {part} differs; name another --record")
            left_s = math.inf if max_minutes is None else 60 * max_minutes - (time.monotonic() - began)
            done = asyncio.run(
                _measure(
                    plan,
                    material,
                    record,
                    before,
                    gateway=gateway,
                    admin=address if found else "",
                    manifest=manifest,
                    api_key=api_key,
                    budget_s=left_s,
                    errors=errors,
                )
            )
    except known as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        status = 1
    if done is None:
        raise typer.Exit(status)
    # Also where the system did not end in order: it was measured.
    _show(done, record, report)
    if status:
        raise typer.Exit(status)


def _planned(experiment: Path, workload: Path | None, first_seed: int | None) -> tuple[Experiment, Material]:
    """The plan and what its workloads are made from. Raises `ExperimentError` or `WorkloadError`."""
    from coordinator.compare.experiment import read
    from coordinator.compare.sources import read as read_workload
    from coordinator.compare.sources import windows
    from coordinator.compare.traces import WorkloadError

    plan = read(experiment)
    if first_seed is not None:
        plan = plan.model_copy(update={"first_seed": first_seed})
    material = read_workload(workload or experiment.parent / plan.workload)
    have, need = windows(material, plan.requests), plan.seeds + plan.tuning_seeds
    if have is not None and have < need:
        text = f"{plan.workload}: its {len(material.rows)} rows make {have} windows of {plan.requests}, the plan needs {need}"
        raise WorkloadError(f"{text}: fewer requests, looks or tuning seeds, or a longer trace (--workload)")
    return plan, material


def _show(done: Record, path: Path, report: Path | None) -> None:
    from coordinator.compare.html.page import render
    from coordinator.compare.read import read
    from coordinator.compare.record import write_text
    from coordinator.compare.report import show

    console = Console()
    show(done, console)
    console.print(f"record: {path}", markup=False, highlight=False, soft_wrap=True)
    if report is not None:
        write_text(render([(path.name.removesuffix(".gz").removesuffix(".json"), read(path))]), report)
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)


def _calibrated(file: Path, serve: Path, sets: list[str], state_dir: Path, material: Material, api_key: str) -> str:
    """The setting that names what path `auto` predicts from; measured first, on a system of its own, where the file is missing.

    Raises `CalibrationError`, `ServeError` or `OSError`.
    """
    from coordinator.compare.calibrate_cli import LEAST, write_step_times
    from coordinator.compare.run import CALIBRATION_SEED

    if not file.exists():
        drawn = material.workload(CALIBRATION_SEED, material.source.requests).requests
        longest = max(LEAST, *(len(request.prompt_token_ids) for request in drawn))
        with system(serve, sets, state_dir) as running:
            write_step_times(file, running, longest, api_key=api_key, errors=Console(stderr=True))
    return f"gateway.auto.model_file={file.absolute()}"


def _before(path: Path, plan: Experiment, material: Material) -> Record | None:
    """The record to go on from. Raises `RecordError` where the file is of another experiment, or of sequences that are made
    differently now."""
    from coordinator.compare.experiment import differing, digest
    from coordinator.compare.read import RecordError, load

    if not path.exists():
        return None
    found = load(path)
    if found.experiment_digest != digest(plan.as_dict(), material.source.model_dump(mode="json"), material.file_sha256):
        what = "; ".join(differing(found.experiment, plan.as_dict())) or "its workload differs"
        raise RecordError(
            f"{path}: of another experiment ({what}); name another --record, or give the plan and workload it was made with"
        )
    for seed, sent in found.workload_digests.items():
        if sent != material.shapes(int(seed), plan.requests).digest:
            raise RecordError(
                f"{path}: seed {seed} was sent another sequence than this version makes (drawn gaps are scaled to the offered "
                "rate now); name another --record"
            )
    return found


async def _measure(
    plan: Experiment,
    material: Material,
    path: Path,
    before: Record | None,
    *,
    gateway: str,
    admin: str,
    manifest: dict[str, Any],
    api_key: str,
    budget_s: float,
    errors: Console,
) -> Record:
    from coordinator.compare.admin_rig import AdminRig
    from coordinator.compare.checks import GrpcChecks
    from coordinator.compare.clients import ClientProcesses
    from coordinator.compare.experiment import digest
    from coordinator.compare.http_client import SCHEMES
    from coordinator.compare.judged import engine_arguments
    from coordinator.compare.load import ArmTarget, RequestFailedError
    from coordinator.compare.quality.client import QualityClient
    from coordinator.compare.record import write
    from coordinator.compare.rig import Rig, StandingRig
    from coordinator.compare.run import ComparisonError
    from coordinator.compare.runner import run as measure
    from coordinator.compare.tools import Tools
    from coordinator.compare.undisturbed import prompt_client

    source = material.source.model_dump(mode="json")
    async with contextlib.AsyncExitStack() as stack:
        priority = stack.enter_context(prompt_client())
        client = await stack.enter_async_context(ClientProcesses(gateway, api_key=api_key))
        rig: Rig = await stack.enter_async_context(AdminRig(admin)) if admin else StandingRig()
        try:
            model = await client.model(5.0)
        except RequestFailedError as error:
            raise ComparisonError(f"{gateway}: {error}") from error

        def save(record: Record) -> None:
            record.manifest = record.manifest or manifest
            record.source, record.client_nice, record.client_realtime = source, priority.nice, priority.realtime
            record.notes = [note for note in record.notes if not note.startswith("client processes:")] + client.notes()
            for arm in record.arms:
                arm.engine = engine_arguments(record.manifest, arm.pools)
            write(record, path)

        targets: dict[str, ArmTarget] = {}

        def know(name: str, arm: ArmTarget) -> None:
            targets[name] = arm
            client.know(name, arm)

        checks = None
        if (plan.quality or plan.parity_requests) and not gateway.startswith(SCHEMES):
            asker = await stack.enter_async_context(QualityClient(gateway, model=model, api_key=api_key))
            checks = GrpcChecks(asker, model, targets.__getitem__)
        drawn = stack.enter_context(_drawn(errors))
        tools = Tools(client=client, know=know, rig=rig, checks=checks, say=drawn, save=save)
        return await measure(
            plan,
            material.workload,
            tools,
            target=gateway,
            model=model,
            digest=digest(plan.as_dict(), source, material.file_sha256),
            before=before,
            budget_s=budget_s,
        )


@contextlib.contextmanager
def _drawn(console: Console) -> Iterator[Any]:
    """Progress on the console, drawn at most every `REDRAW_S` while a probe runs."""
    columns = (
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TimeElapsedColumn(),
    )
    drawn_at, last = -math.inf, ""
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        whole = progress.add_task("connecting", total=1, left="")

        def say(step: Step) -> None:
            nonlocal drawn_at, last
            now = time.monotonic()
            if step.text == last and now - drawn_at < REDRAW_S:
                return
            left = "" if step.left_s is None else f"about {math.ceil(step.left_s / 60)} min left"
            progress.update(whole, description=step.text, completed=step.done, total=step.of or 1, left=left, refresh=True)
            if step.text != last and not console.is_terminal:
                # A log wants lines, not bars.
                console.print(f"{step.text} {left}".rstrip(), markup=False, highlight=False, soft_wrap=True)
            drawn_at, last = now, step.text

        yield say
