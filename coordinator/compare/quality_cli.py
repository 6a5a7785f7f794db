"""`splitpoint compare quality`: do the arms answer equally well?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.compare.quality.limits import QualityGate, QualityVerdict

if TYPE_CHECKING:
    from coordinator.compare.quality.client import Arm
    from coordinator.compare.quality.measure import Prepare
    from coordinator.compare.quality.report import QualityReport

MODEL_TIMEOUT_S = 10.0
UNDECIDED_STATUS = 3
ARM = "NAME=PATH[@TRANSPORT][:POOL,...]"

_LIMITS = QualityGate()


def quality(
    target: Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address of a gateway.")],
    arms: Annotated[list[str], typer.Option("--arm", metavar=ARM, help="Two or more; the first is the baseline.")],
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report here.")] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Questions of each kind at most; few of them decide nothing.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 4,
    max_score_drop: Annotated[float, typer.Option(help="Share of the questions.")] = _LIMITS.max_score_drop,
    max_mean_divergence: Annotated[
        float, typer.Option(help="Nats per token, above the baseline's own.")
    ] = _LIMITS.max_mean_divergence,
    max_p99_divergence: Annotated[float, typer.Option(help="Nats.")] = _LIMITS.max_p99_divergence,
    min_top1_agreement: Annotated[float, typer.Option(help="Share of the tokens.")] = _LIMITS.min_top1_agreement,
    admin: Annotated[
        str, typer.Option(envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="Resets the prefix caches before each pass.")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="SPLITPOINT_API_KEY", help="Bearer key, where the gateway asks for one.")] = "",
) -> None:
    """Ask a fixed question set through every arm, and judge whether each answers as well as the first.

    Exit status 1 when an arm fails, 3 when one is undecided.
    """
    from coordinator.compare.load import RequestFailedError
    from coordinator.compare.quality.client import QualityClient
    from coordinator.compare.quality.measure import QualityError, measure
    from coordinator.compare.quality.questions import load
    from coordinator.compare.quality.table import show
    from coordinator.compare.record import write_text

    named = [_arm(text) for text in arms]
    try:
        gate = QualityGate(
            max_score_drop=max_score_drop,
            max_mean_divergence=max_mean_divergence,
            max_p99_divergence=max_p99_divergence,
            min_top1_agreement=min_top1_agreement,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=errors, transient=True) as progress:
            task = progress.add_task("connecting", total=1.0)

            async def run() -> QualityReport:
                async with QualityClient(target, api_key=api_key) as client:
                    return await measure(
                        client,
                        named,
                        gate=gate,
                        questions=load().first(per_kind),
                        concurrency=concurrency,
                        model=await client.model(MODEL_TIMEOUT_S),
                        prepare=_resetting(admin) if admin else None,
                        say=lambda text, share: progress.update(task, description=text, completed=share),
                    )

            report = asyncio.run(run())
        if json_path is not None:
            write_text(json.dumps(report.as_dict(), indent=1) + "\n", json_path)
    except (QualityError, RequestFailedError, OSError) as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console = Console()
    show(report, console)
    if json_path is not None:
        console.print(f"report: {json_path}", markup=False, highlight=False, soft_wrap=True)
    if report.verdict is not QualityVerdict.PASS:
        raise typer.Exit(1 if report.verdict is QualityVerdict.FAIL else UNDECIDED_STATUS)


def _arm(text: str) -> Arm:
    from coordinator.compare.load import PATHS, ArmTarget
    from coordinator.compare.quality.client import Arm

    name, _, where = text.partition("=")
    way, _, pools = where.partition(":")
    path, _, transport = way.partition("@")
    if not name or path not in PATHS:
        raise typer.BadParameter(f"{text!r}: write {ARM}, PATH one of {', '.join(PATHS)}", param_hint="--arm")
    return Arm(name, ArmTarget(path, tuple(pool for pool in pools.split(",") if pool), transport))


def _resetting(admin: str) -> Prepare:
    """Empties every prefix cache; waits where a worker still holds blocks of what has just ended."""
    from coordinator.compare.admin_rig import AdminRig
    from coordinator.compare.quality.measure import QualityError
    from coordinator.compare.rig import RigError

    async def prepare(_: Arm) -> None:
        async with AdminRig(admin) as rig:
            try:
                await rig.reset_caches()
            except RigError as error:
                raise QualityError(f"{admin}: {error}") from error

    return prepare
