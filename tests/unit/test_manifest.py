"""The run manifest: what it holds and that it is written whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator import manifest
from coordinator.config import load


@dataclass
class Facts:
    worker_id: str
    start_arguments: dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "inner"}))
    (folder / "notes.txt").write_text("not part of the model")
    return folder


def test_every_file_that_fixes_what_the_model_says_is_hashed(model: Path) -> None:
    hashes = manifest.model_hashes(model)
    assert set(hashes) == {"config.json", "tokenizer_config.json", "chat_template"}
    # SHA-256 of "{}".
    assert hashes["config.json"] == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_a_template_file_beats_the_one_inside_the_tokenizer_configuration(model: Path) -> None:
    assert manifest.chat_template(model) == "inner"
    (model / "chat_template.jinja").write_text("own")
    assert manifest.chat_template(model) == "own"


def test_no_checkpoint_no_hashes(tmp_path: Path) -> None:
    assert manifest.model_hashes(tmp_path / "nowhere") == {}
    assert manifest.chat_template(tmp_path) is None


def test_a_run_is_told_whole(model: Path, tmp_path: Path) -> None:
    settings = load(sets=[f"engine.model_path={model}", "kvtransfer.send_staging_bytes=1MiB"], environment={})
    run = manifest.collect(settings).with_workers([Facts("decode-1", {"max_num_seqs": 16})])
    path = run.write(tmp_path / "state")
    assert path == tmp_path / "state" / run.run_id / "manifest.json"
    read = json.loads(path.read_text())
    assert read["format"] == manifest.FORMAT
    assert read["settings"]["kvtransfer"]["send_staging_bytes"] == 1 << 20
    assert read["workers"] == [{"worker_id": "decode-1", "start_arguments": {"max_num_seqs": 16}}]
    assert read["hardware"]["memory_bytes"] > 0
    assert {"python", "kernel", "splitpoint", "ray"} <= set(read["versions"])
    assert [p.name for p in path.parent.iterdir()] == ["manifest.json"]


def test_run_ids_differ(model: Path) -> None:
    settings = load(sets=[f"engine.model_path={model}"], environment={})
    assert manifest.collect(settings).run_id != manifest.collect(settings).run_id
