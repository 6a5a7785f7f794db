"""`splitpoint compare calibrate`: the file that path `auto` predicts from, measured on a system that stands or is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.compare.serving import system

if TYPE_CHECKING:
    from coordinator.routing.auto import StepTimes

LONGEST_PROMPT = 384
LEAST, MOST = 32, 1_000_000


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="For gateway.auto.model_file.")],
    serve: Annotated[Path | None, typer.Option("--serve", metavar="CONFIG", help="Serve this configuration meanwhile.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Of CONFIG; repeatable.")] = None,
    admin: Annotated[
        str, typer.Option(envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="Admin address of a system that stands.")
    ] = "",
    longest_prompt: Annotated[
        int, typer.Option(min=LEAST, max=MOST, help="Tokens of the longest prompts sent; the others are 1/2, 1/4 and 1/8 of it.")
    ] = LONGEST_PROMPT,
    state_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Of a system that is served meanwhile.")] = Path(
        "runs/calibrate"
    ),
    api_key: Annotated[str, typer.Option(envvar="SPLITPOINT_API_KEY", help="Bearer key, where the gateway asks for one.")] = "",
) -> None:
    """Measure what prompts, decode steps and hand-overs take on both paths; path `auto` predicts from it. About a minute."""
    from coordinator.compare.cli import DEFAULT_ADMIN
    from coordinator.compare.step_times import CalibrationError
    from coordinator.served import ServeError

    if serve is not None and admin:
        raise typer.BadParameter("brings a system of its own: no --admin beside it", param_hint="--serve")
    if sets and serve is None:
        raise typer.BadParameter("changes the configuration that --serve names", param_hint="--set")
    errors = Console(stderr=True)
    try:
        with system(serve, sets or [], state_dir) as running:
            found = write_step_times(out, running or admin or DEFAULT_ADMIN, longest_prompt, api_key=api_key, errors=errors)
    except (CalibrationError, ServeError, OSError) as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console = Console()
    for path, times in found.items():
        console.print(in_words(path, times), markup=False, highlight=False, soft_wrap=True)
    console.print(f"step times: {out}", markup=False, highlight=False, soft_wrap=True)


def write_step_times(file: Path, admin: str, longest_prompt: int, *, api_key: str, errors: Console) -> Mapping[str, StepTimes]:
    """Measure the system behind the admin address and write the file.

    Raises:
        CalibrationError: there is no gateway, a request failed, or what was measured gives no step times.
        OSError: the file cannot be written.
    """
    from coordinator.compare.cli import ask_admin
    from coordinator.compare.record import write_text
    from coordinator.compare.step_times import CalibrationError, fit
    from coordinator.path_model import to_json

    gateway, manifest = ask_admin(admin, "")
    if not gateway:
        raise CalibrationError(f"no gateway: {admin} does not answer or knows none")

    def say(text: str) -> None:
        errors.print(f"calibrating: {text}", markup=False, highlight=False, soft_wrap=True)

    observed = asyncio.run(_measure(gateway, api_key, longest_prompt, say))
    found = fit(observed, chunk_tokens(manifest))
    write_text(to_json(found), file)
    return found


def chunk_tokens(manifest: Mapping[str, Any]) -> int:
    """Prompt tokens of one engine step, of the pool with the fewest; 0 where the manifest does not tell."""
    settings = manifest.get("settings", {})
    common = settings.get("engine", {}).get("max_num_batched_tokens", 0)
    pools = settings.get("pools", {}).values()
    return min((int(pool.get("engine", {}).get("max_num_batched_tokens", common)) for pool in pools), default=int(common))


def in_words(path: str, times: StepTimes) -> str:
    """One line, in milliseconds."""
    moved = f"{times.handover_s * 1e3:.2f} + {times.handover_token_s * 1e3:.4f} a token"
    handover = f"; hand-over {moved}" if times.handover_s or times.handover_token_s else ""
    return (
        f"{path}, ms: prompt {times.first_token_s * 1e3:.2f} + {times.prompt_token_s * 1e3:.4f} a token; "
        f"step {times.step_s * 1e3:.2f} + {times.running_s * 1e3:.3f} a further sequence{handover}"
    )


async def _measure(gateway: str, api_key: str, longest_prompt: int, say: Callable[[str], None]) -> dict[str, Any]:
    from coordinator.compare.load import RequestFailedError
    from coordinator.compare.step_times import CalibrationError, measure
    from coordinator.compare.target import connect
    from coordinator.compare.undisturbed import prompt_client

    with prompt_client():
        async with connect(gateway, api_key=api_key) as client:
            try:
                await client.model(5.0)
            except RequestFailedError as error:
                raise CalibrationError(f"{gateway}: {error}") from error
            return dict(await measure(client, longest_prompt, f"{time.time_ns():x}", say=say))
