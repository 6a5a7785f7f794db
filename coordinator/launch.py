"""`splitpoint serve`: join Ray, start the coordinator (which starts workers and gateways), wait, end everything in order.

Ray may be imported only after the cluster has been joined (`ray_cluster`), so the actors' modules are imported late.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from coordinator import manifest
from coordinator.config import AUTO_HOST, GATEWAY_PORTS, Settings, gateway_port
from coordinator.pools.config import DurableGcs
from coordinator.pools.ray_cluster import HEAD, NAMESPACE, Cluster, joined
from coordinator.pools.reach import interfaces, loopback_settings
from coordinator.pools.store import StoreVersionError, check_version
from coordinator.routing.views import WorkerState
from kvtransfer.addresses import is_loopback
from kvtransfer.tls import IN_TLS
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)

DURABLE_GCS = get_args(DurableGcs)
_POLL_S = 0.2
_MAX_FAILURES = 3
_CALL_TIMEOUT_S = 5.0


class LaunchError(RuntimeError):
    """The system could not be started; the text says why and what to do."""


def serve(settings: Settings, console: Console, *, ready_file: Path | None = None) -> None:
    """Start, say where it listens, stay until SIGINT or SIGTERM, then drain and end everything. Main thread only.

    `ready_file` gets the addresses as JSON once requests are served, for programs that start this one.

    Raises:
        LaunchError: nothing is left running.
    """
    _check_model(settings)
    _check_certificates(settings)
    _check_state(settings)
    if settings.coordinator.ray_address == "embedded":
        _check_ports(settings)
    with _exclusive(settings.coordinator.state_dir), _signals() as stop:
        record = manifest.collect(settings)
        path = record.write(settings.coordinator.state_dir)
        console.print(f"run {record.run_id}, manifest {path}")
        if doors := plaintext_doors(settings):
            console.print(f"[yellow]other machines can reach, unencrypted and without a key: {', '.join(doors)}[/yellow]")
        where = settings.coordinator.ray_address
        console.print("starting a private Ray" if where == "embedded" else f"joining Ray at {where}")
        with _cluster(where, settings.coordinator.node_ip) as cluster:
            # Ray's init takes SIGTERM for itself.
            stop.install()
            _check_cluster(settings, cluster, console)
            handle = _start_coordinator(settings, record, cluster, console)
            try:
                status = _wait_ready(handle, settings, console, stop)
                if status is not None:
                    _announce(status, console, ready_file)
                    stop.wait()
            finally:
                _end(handle, settings, console, stop)
                if ready_file is not None:
                    ready_file.unlink(missing_ok=True)
    console.print("everything has ended")


@contextlib.contextmanager
def _cluster(address: str, node_ip: str) -> Iterator[Cluster]:
    """`joined`, whose failure to begin is a `LaunchError`."""
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(joined(address, node_ip))
        except Exception as exc:
            # Ray has no class of its own for this, and what it waits for is fixed (30 s for its own processes).
            log.info("joining Ray failed", exc_info=exc)
            hint = "the machine may be too busy: try again" if address == "embedded" else "is a cluster running there?"
            raise LaunchError(f"Ray did not start: {exc} ({hint})") from exc
        yield cluster


def _check_cluster(settings: Settings, cluster: Cluster, console: Console) -> None:
    """What only the cluster itself can tell. A private one is on this node alone, and ends with this process."""
    if cluster.temp_dir is not None:
        return
    if not cluster.on_head:
        raise LaunchError("run `serve` on the head node of the Ray cluster: its coordinator keeps its state there")
    if cluster.nodes > 1:
        hosts = {f"{name}.advertise_host": getattr(settings, name).advertise_host for name in ("worker", "kvtransfer")}
        if faults := loopback_settings(hosts):
            raise LaunchError(f"the cluster has {cluster.nodes} nodes: " + "; ".join(faults))
    storage = cluster.gcs_storage or settings.coordinator.gcs_storage or ""
    if storage in DURABLE_GCS:
        return
    if storage == "memory":
        fault = "Ray's GCS keeps its state in memory: when its head is started again, every engine ends"
        remedy = "start the head with RAY_gcs_storage=rocksdb and RAY_gcs_storage_path, or with Redis"
    else:
        fault = "it is not known where Ray's GCS keeps its state" + (f" ({storage!r})" if storage else "")
        fault += ": when its head is started again, every engine may end"
        remedy = f"say where, if you know it: coordinator.gcs_storage, one of {', '.join(DURABLE_GCS)}"
    if settings.coordinator.require_durable_gcs:
        raise LaunchError(f"{fault} ({remedy}; coordinator.require_durable_gcs asks for it)")
    console.print(f"[yellow]{fault}; {remedy}[/yellow]")


def plaintext_doors(settings: Settings) -> list[str]:
    """The settings by which a server listens, or UCX moves KV, beyond this machine without encryption and without a key."""
    gateway, coordinator = settings.gateway, settings.coordinator
    ports = [name for name in GATEWAY_PORTS if getattr(gateway, f"{name}_port") is not None]
    places = {f"gateway.{name}_host": getattr(gateway, f"{name}_host") for name in ports}
    security = settings.security
    inside: dict[str, Any] = {"worker": settings.worker, "kvtransfer": settings.kvtransfer}
    if security is not None:
        # What is left is KV that goes beside TLS, where that was allowed by name.
        inside = {"kvtransfer": settings.kvtransfer} if set(settings.kvtransfer.transports) - IN_TLS else {}
    for name, server in inside.items():
        places[f"{name}.bind_host"] = "auto" if server.advertise_host == "auto" else server.bind_host
    node = coordinator.node_ip if coordinator.ray_address == "embedded" else "the node's address"
    return [f"{name} {host}" for name, host in places.items() if not is_loopback(node if host == "auto" else host)]


class _Stop:
    """SIGINT or SIGTERM: the first asks for an orderly end, the second cuts the drain short."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.count += 1
        self._event.set()

    def wait(self) -> None:
        # Waiting without a limit would keep Python from running the signal handler.
        while not self._event.wait(0.5):
            pass


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = _Stop()
    stop.install()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _exclusive(state_dir: Path) -> Iterator[None]:
    """One launcher per state directory; the lock ends with the process."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            message = f"{state_dir} is in use by pid {owner}: stop it, or set coordinator.state_dir to another directory"
            raise LaunchError(message) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _check_model(settings: Settings) -> None:
    path = settings.engine.model_path
    needed = "config.json" if settings.engine.kind == "vllm" else "tokenizer.json"
    if not (path / needed).is_file():
        raise LaunchError(f"no {needed} at {path}: run `splitpoint models fetch smollm2` or set engine.model_path")


def _check_certificates(settings: Settings) -> None:
    """Say at once what every worker would say later. Other nodes have files of their own."""
    if settings.security is not None:
        try:
            settings.security.check()
        except ValueError as error:
            raise LaunchError(f"security.{error}") from error


def _check_state(settings: Settings) -> None:
    """Say at once that the desired state is a newer version's, before anything of it is touched."""
    try:
        check_version(settings.coordinator.state_dir / "state.sqlite3")
    except StoreVersionError as error:
        raise LaunchError(str(error)) from None


def _check_ports(settings: Settings) -> None:
    """Say at once that a port is taken, not after the engines have been started."""
    gateway, coordinator = settings.gateway, settings.coordinator
    doors = [
        (f"gateway.{name}_port", getattr(gateway, f"{name}_host"), gateway_port(getattr(gateway, f"{name}_port"), index))
        for index in range(coordinator.gateways)
        for name in GATEWAY_PORTS
    ]
    doors.append(("coordinator.metrics_port", coordinator.metrics_host, coordinator.metrics_port or 0))
    for field, configured, port in doors:
        if not port:
            continue
        host = coordinator.node_ip if configured == AUTO_HOST else configured
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                message = f"{field}: {host}:{port} cannot be used ({error.strerror}); 0 takes any free one"
                raise LaunchError(message) from error


def _start_coordinator(settings: Settings, record: manifest.RunManifest, cluster: Cluster, console: Console) -> Any:
    import ray

    from coordinator.pools.ray_coordinator import CoordinatorActor
    from coordinator.pools.ray_find import COORDINATOR_NAME
    from coordinator.pools.reports import CoordinatorSpec

    spec = CoordinatorSpec(run_id=record.run_id, settings=settings, num_gpus=cluster.num_gpus, manifest=record)
    options = {
        "name": COORDINATOR_NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "resources": {HEAD: 0.001},  # its state is there
    }
    try:
        return ray.remote(CoordinatorActor).options(**options).remote(spec)
    except ValueError:  # the name is taken
        return _taken_up(ray.get_actor(COORDINATOR_NAME, namespace=NAMESPACE), settings, console)


def _taken_up(handle: Any, settings: Settings, console: Console) -> Any:
    """A system that outlived its launcher, on a cluster that was only joined: this launcher's from now on, if it is the same one.

    Raises:
        LaunchError: it runs with another configuration, or does not answer.
    """
    import ray
    from ray.exceptions import RayError

    try:
        theirs: Settings = ray.get(handle.settings.remote(), timeout=_CALL_TIMEOUT_S)
    except RayError as error:
        raise LaunchError(f"a coordinator runs already in this Ray cluster and does not answer: {error}") from error
    if theirs != settings:
        changed = ", ".join(name for name in type(settings).model_fields if getattr(theirs, name) != getattr(settings, name))
        raise LaunchError(f"a system runs already in this Ray cluster, with another configuration ({changed})")
    console.print("taking up the system that runs already")
    return handle


def _wait_ready(handle: Any, settings: Settings, console: Console, stop: _Stop) -> admin_pb2.GetStatusResponse | None:
    """None when a signal came first."""
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

    until_s = time.monotonic() + settings.coordinator.start_timeout_s
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    told: set[str] = set()
    unready = ""
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting the coordinator", total=None)
        while not stop.count:
            try:
                asked = [handle.status.remote(), handle.faults.remote()]
                status, faults = ray.get(asked, timeout=_CALL_TIMEOUT_S)
            except (GetTimeoutError, ActorUnavailableError):
                status, faults = None, []
            except RayError as error:
                raise LaunchError(f"the coordinator died while starting: {error}") from error
            if status is not None:
                progress.update(task, description=_describe(status))
                _tell(status, told, progress.console.print)
                if _is_ready(status, settings):
                    unready = _unready(status.gateways)
                    if not unready:
                        return status
                    progress.update(task, description=f"waiting for the gateways: {unready}")
                if failure := _failure(status) or "; ".join(faults):
                    raise LaunchError(failure)
            if time.monotonic() > until_s:
                limit = f"coordinator.start_timeout_s = {settings.coordinator.start_timeout_s:g} s"
                raise LaunchError(f"not ready after {limit}" + (f": {unready}" if unready else ""))
            time.sleep(_POLL_S)
    return None


def _describe(status: admin_pb2.GetStatusResponse) -> str:
    pools = ", ".join(f"{p.name} {p.ready}/{p.target}" for p in status.pools)
    return f"starting engines ({pools}) and {len(status.gateways)} gateway(s)"


def _tell(status: admin_pb2.GetStatusResponse, told: set[str], say: Callable[[str], None]) -> None:
    for worker in status.workers:
        text = f"{worker.worker_id} is {worker.state}" + (f" at {worker.address}" if worker.state == "ready" else "")
        text += f": {worker.detail}" if worker.detail and worker.state != WorkerState.READY else ""
        if text not in told:
            told.add(text)
            say(f"  {text}")


def _failure(status: admin_pb2.GetStatusResponse) -> str:
    """Engines that die start after start will go on so: say why instead of trying until the time is up."""
    broken = [
        f"pool {p.name}: {p.failures} starts failed, the last: {p.detail}" for p in status.pools if p.failures >= _MAX_FAILURES
    ]
    return "; ".join(broken)


def _is_ready(status: admin_pb2.GetStatusResponse, settings: Settings) -> bool:
    full = all(p.ready >= p.target for p in status.pools)
    # A gateway is ready as soon as one path can serve; the first request is to find both.
    return full and len(status.gateways) >= settings.coordinator.gateways and not status.unsettled


def _unready(gateways: Iterable[admin_pb2.GatewayStatus]) -> str:
    """Why requests would not be served yet, or "": each gateway is dialled at all that it advertises, and asked how it is."""
    for gateway in gateways:
        for name in GATEWAY_PORTS:
            address = getattr(gateway, f"{name}_address")
            if not address:  # a door that is not configured
                continue
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            except OSError as error:
                interface = interfaces([address])[address] or "none of this node's"
                return f"{gateway.gateway_id} advertises {address} as {name}_address (interface {interface}): {error}"
        if not _healthy(gateway.http_address):
            return f"{gateway.gateway_id} does not reach the workers yet"
    return ""


def _healthy(address: str) -> bool:
    """The gateway answers at the address it is said to have, and reaches workers."""
    try:
        return httpx.get(f"http://{address}/health", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _announce(status: admin_pb2.GetStatusResponse, console: Console, ready_file: Path | None) -> None:
    from coordinator.pools.admin_http import SCALE_PATH

    gateways = [
        {
            "http": g.http_address,
            "grpc": g.grpc_address,
            "admin": g.admin_address,
            "admin_http": g.admin_http_address,
            "id": g.gateway_id,
        }
        for g in status.gateways
    ]
    for g in gateways:
        console.print(f"[bold]serving {status.model}[/bold]")
        console.print(f"  OpenAI HTTP  http://{g['http']}/v1")
        console.print(f"  gRPC         {g['grpc']}")
        console.print(f"  admin        {g['admin']}   (splitpoint status --admin {g['admin']})")
        if g["admin_http"]:
            console.print(f"  admin HTTP   http://{g['admin_http']}{SCALE_PATH}", highlight=False)
    for transports in sorted({", ".join(w.transports) for w in status.workers if w.transports}):
        console.print(f"  KV travels by {transports}")
    console.print("Ctrl-C drains and ends everything")
    if ready_file is not None:
        partial = ready_file.with_suffix(".partial")
        partial.write_text(json.dumps({"model": status.model, "pid": os.getpid(), "gateways": gateways}))
        partial.replace(ready_file)


def _end(handle: Any, settings: Settings, console: Console, stop: _Stop) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from coordinator.pools.ray_fleet import end_workers
    from coordinator.pools.ray_gateway import end_gateways

    timeout_s = settings.coordinator.drain_timeout_s
    console.print(f"draining (up to {timeout_s:g} s; a second signal cuts it short)")
    signals = stop.count
    pending = handle.shutdown.remote(timeout_s)
    until_s = time.monotonic() + timeout_s + 30.0
    while time.monotonic() < until_s and stop.count == signals:
        try:
            ray.get(pending, timeout=0.5)
            break
        except GetTimeoutError:
            continue
        except RayError as error:
            console.print(f"the coordinator did not end the workers: {type(error).__name__}; ending them with Ray")
            break
    with contextlib.suppress(RayError, ValueError):
        end_gateways()
    ray.kill(handle, no_restart=True)
    # On a cluster that was only joined, what is still there would stay.
    with contextlib.suppress(RayError, ValueError):
        if left := end_workers():
            console.print(f"killed what had not ended: {', '.join(left)}")
