"""Joining Ray: a private cluster of this process, or an existing one by address.

The embedded cluster is kept slim and private: no dashboard, no monitor, no log monitor, token authentication with a token
that only this process and its children know, everything on `node_ip`, and a temporary directory that is removed here
(Ray removes none). Its processes die with this one, also when this one is killed.

Ray reads its authentication mode when it is first imported, so this module imports it only after the environment is set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from coordinator.pools.guardian import guarded

log = logging.getLogger(__name__)

NAMESPACE = "splitpoint"
HEAD = "node:__internal_head__"
"""The resource that Ray gives its head, also to a head that was started anew."""
_WORKER_NICENESS = "RAY_worker_niceness"
_TEMP_PREFIX = "sp-ray-"
# Ray's sockets live below the temporary directory, and a socket's path holds 107 characters.
_TEMP_ROOT = Path("/tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What was joined. `temp_dir` is None on an existing cluster. `nodes` are those that live, `on_head`: this process is on the
    head. `gcs_storage` is where the GCS keeps its state, in Ray's words ("memory", "redis", "rocksdb"), or ""."""

    address: str
    temp_dir: Path | None
    num_gpus: int
    nodes: int = 1
    on_head: bool = True
    gcs_storage: str = ""


@contextlib.contextmanager
def joined(address: str, node_ip: str) -> Iterator[Cluster]:
    """Join Ray for the length of the block; an embedded cluster is started before and ended after it.

    `address` is "embedded", "auto" or a Ray address. Leaving the block ends every process of an embedded cluster, its actors
    included, and removes its files; on an existing cluster only this driver's connection ends.
    """
    if address != "embedded":
        import ray

        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        try:
            yield _existing()
        finally:
            ray.shutdown()
        return
    remove_stale_directories()
    temp_dir = Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{os.getpid()}-", dir=_TEMP_ROOT))
    try:
        with _embedded_environment(), guarded(temp_dir) as guardian_pid:
            import ray

            with _slim_node():
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    # The object store carries control messages alone.
                    object_store_memory=100 * 1024 * 1024,
                    _temp_dir=str(temp_dir),
                    _node_ip_address=node_ip,
                )
            processes = _children()
            try:
                with _quiet_driver():
                    yield Cluster(address=_address(), temp_dir=temp_dir, num_gpus=_gpus())
            finally:
                processes += _children()
                ray.shutdown()
                _end([p for p in processes if p.pid != guardian_pid])
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def remove_stale_directories() -> None:
    """Remove the directories of embedded clusters whose launcher was killed before it could."""
    for path in _TEMP_ROOT.glob(f"{_TEMP_PREFIX}*"):
        match = re.match(rf"{_TEMP_PREFIX}(\d+)-", path.name)
        if match and not psutil.pid_exists(int(match[1])) and path.stat().st_uid == os.getuid():
            log.info("removing %s: its launcher is gone", path)
            shutil.rmtree(path, ignore_errors=True)


def _existing() -> Cluster:
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    on_head = any(HEAD in node["Resources"] for node in alive if node["NodeID"] == here)
    return Cluster(
        address=_address(), temp_dir=None, num_gpus=_gpus(), nodes=len(alive), on_head=on_head, gcs_storage=_gcs_storage()
    )


def _gcs_storage() -> str:
    """The GCS writes it into its own key-value store, for Ray's usage report, whether or not that is on."""
    from ray.experimental import internal_kv

    value = internal_kv._internal_kv_get(b"extra_usage_tag_gcs_storage", namespace=b"usage_stats")
    if not value:
        log.warning(json.dumps({"event": "gcs_storage_unknown"}))
    return value.decode() if value else ""


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


@contextlib.contextmanager
def _embedded_environment() -> Iterator[None]:
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise RuntimeError("ray was imported before its authentication mode was set: join the cluster first")
    # Left alone, Ray switches authentication on by itself and writes the token where every user can read it.
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # By default Ray runs all our processes at 15, where anything else on the host starves them. `engine.nice` is finer.
        _WORKER_NICENESS: os.environ.get(_WORKER_NICENESS, "0"),
    }
    with mock.patch.dict(os.environ, ours):
        os.environ.pop("RAY_ADDRESS", None)
        yield


@contextlib.contextmanager
def _quiet_driver() -> Iterator[None]:
    """Ray prints a paragraph on the driver's terminal whenever a worker process ends, ours included. The coordinator's log
    and `status` say why a worker ended; the paragraph goes to the launcher's debug log."""
    from ray._private import worker as ray_worker

    if not hasattr(ray_worker, "print_to_stdstream"):
        yield
        return
    with mock.patch.object(ray_worker, "print_to_stdstream", _log_message):
        yield


def _log_message(data: dict[str, Any], **_: Any) -> None:
    for line in data.get("lines", ()):
        log.debug("ray: %s", line)


@contextlib.contextmanager
def _slim_node() -> Iterator[None]:
    """Start Ray without autoscaler monitor, log monitor and API server: nothing here uses them, and they cost 270 MiB and
    two ports on every interface. The switch is Ray's own class, so a Ray that renames them just starts them again."""
    from ray._private import node as ray_node

    with contextlib.ExitStack() as stack:
        for name in ("start_monitor", "start_log_monitor", "start_api_server"):
            if hasattr(ray_node.Node, name):
                stack.enter_context(mock.patch.object(ray_node.Node, name, _start_nothing))
            else:
                log.warning(json.dumps({"event": "ray_not_slim", "missing": name}))
        yield


def _start_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes of the ended cluster; kill what stays. psutil keeps start times, so a reused pid is left alone."""
    mine = [p for p in processes if _is_ray(p)]
    _, alive = psutil.wait_procs(mine, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            log.warning("killing pid %d (%s), left over from Ray", process.pid, process.name())
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def _is_ray(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return "ray" in line.lower()
