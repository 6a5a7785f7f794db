"""One rank's side of a step, with a node that only remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from awscrt.checksums import crc32c

from kvtransfer.config import KvTransferSettings
from kvtransfer.connector.blocks import EngineBlocks
from kvtransfer.connector.scheduler import Gather, Scatter, StepPlan
from kvtransfer.connector.worker import PROBE_VARIABLE, RankSettings, WorkerHalf
from protos.ids import Incarnation, TransferId

T = TransferId(b"t" * 16)
U = TransferId(b"u" * 16)
SETTINGS = RankSettings(
    settings=KvTransferSettings(send_staging_bytes=4096, transports=("grpc",), default_transport="grpc"),
    incarnation=Incarnation("i"),
    control_token="c",
    register_address="127.0.0.1:1",
    model="m",
    model_hash="h",
    tokenizer_hash="t",
)


class RememberingNode:
    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.send: dict[bytes, np.ndarray] = {}
        self.receive: dict[bytes, np.ndarray] = {}
        self.committed: list[tuple[bytes, int, int, bool]] = []
        self.given_back: list[bytes] = []
        self.stops = 0
        self.intact = True

    def send_view(self, transfer_id: bytes, first_block: int, num_blocks: int) -> np.ndarray | None:
        slot = self.send.get(transfer_id)
        return None if slot is None else slot[first_block : first_block + num_blocks]

    def commit_chunk(
        self,
        transfer_id: bytes,
        first_block: int,
        num_blocks: int,
        *,
        last: bool,
        ready: Callable[[], bool] | None = None,
        crcs: object = None,
    ) -> None:
        assert ready is None, "host copies are done when they return"
        assert [crc32c(row) for row in self.send[transfer_id][first_block : first_block + num_blocks]] == list(crcs)  # type: ignore[call-overload]
        self.committed.append((transfer_id, first_block, num_blocks, last))

    def receive_view(self, transfer_id: bytes) -> np.ndarray | None:
        return self.receive.get(transfer_id)

    def scattered(self, transfer_id: bytes, *, ready: Callable[[], bool] | None = None) -> bool:
        assert ready is None, "host copies are done when they return"
        self.given_back.append(transfer_id)
        return self.intact

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.arange(6 * 8, dtype=torch.int16).view(6, 8).clone()


@pytest.fixture
def rank(cache: torch.Tensor) -> tuple[WorkerHalf, RememberingNode]:
    blocks = EngineBlocks({"layer": cache}, 6)
    half, node = WorkerHalf(SETTINGS), RememberingNode(blocks.block_bytes)
    half.attach(blocks, node)
    return half, node


def test_a_gather_fills_its_place_and_commits(cache: torch.Tensor, rank: tuple[WorkerHalf, RememberingNode]) -> None:
    half, node = rank
    node.send[T] = np.zeros((3, 16), dtype=np.uint8)
    half.save(StepPlan(gathers=(Gather(T, 1, (4, 2), True),)))
    assert node.send[T].view(np.int16).tolist() == [[0] * 8, cache[4].tolist(), cache[2].tolist()]
    assert node.committed == [(T, 1, 2, True)]


def test_a_prompts_gather_knows_a_mark_before_its_last_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {f"layer{index}": torch.zeros((6, 8), dtype=torch.int16) for index in range(5)}
    blocks = EngineBlocks(layers, 6)
    half, node = WorkerHalf(SETTINGS), RememberingNode(blocks.block_bytes)
    half.attach(blocks, node)
    node.send[T] = np.zeros((2, blocks.block_bytes), dtype=np.uint8)
    computed: list[str] = []
    marks: list[Any] = []
    monkeypatch.setattr(blocks, "mark", lambda: f"after {computed[-1]}")
    gather_checked = blocks.gather_checked

    def remembering(ids: list[int], rows: Any, nearly: Any) -> Any:
        marks.append(nearly)
        return gather_checked(ids, rows)

    monkeypatch.setattr(blocks, "gather_checked", remembering)
    # A chunk that is not the prompt's last; the last one; the last one of a step that runs as one graph.
    for last, told in ((False, True), (True, True), (True, False)):
        plan = StepPlan(gathers=(Gather(T, 0, (1, 2), last),))
        half.load(plan)
        for name in layers if told else ():
            computed.append(name)
            half.computed(name)
        half.save(plan)
    assert marks == [None, "after layer2", None]


def test_a_gather_without_a_slot_commits_nothing(rank: tuple[WorkerHalf, RememberingNode]) -> None:
    half, node = rank
    half.save(StepPlan(gathers=(Gather(T, 0, (1,), False),)))
    assert node.committed == []


def test_a_scatter_skips_what_is_cached_and_gives_the_slot_back(
    cache: torch.Tensor, rank: tuple[WorkerHalf, RememberingNode]
) -> None:
    half, node = rank
    slot = np.arange(3 * 8, dtype=np.int16).reshape(3, 8) + 500
    node.receive[T] = slot.view(np.uint8)
    before = cache.clone()
    half.load(StepPlan(scatters=(Scatter(T, "r", 1, (5, 0)),), releases=(U,)))
    assert cache[5].tolist() == slot[1].tolist()
    assert cache[0].tolist() == slot[2].tolist()
    assert torch.equal(cache[1:5], before[1:5])
    assert node.given_back == [T, U]
    assert half.take_failed_blocks() == set()


def test_bytes_that_their_sender_wrote_again_fail_their_blocks_once(rank: tuple[WorkerHalf, RememberingNode]) -> None:
    half, node = rank
    node.receive[T] = np.zeros((3, 16), dtype=np.uint8)
    node.intact = False
    half.load(StepPlan(scatters=(Scatter(T, "r", 1, (5, 0)),)))
    assert node.given_back == [T]
    assert half.take_failed_blocks() == {0, 5}
    assert half.take_failed_blocks() == set()


@pytest.mark.parametrize("rows", [None, 1])
def test_a_slot_that_is_gone_or_short_fails_its_blocks_once(
    cache: torch.Tensor, rank: tuple[WorkerHalf, RememberingNode], rows: int | None
) -> None:
    half, node = rank
    if rows is not None:
        node.receive[T] = np.zeros((rows, 16), dtype=np.uint8)
    before = cache.clone()
    half.load(StepPlan(scatters=(Scatter(T, "r", 0, (5, 0)),)))
    assert torch.equal(cache, before)
    assert half.take_failed_blocks() == {0, 5}
    assert half.take_failed_blocks() == set()
    assert node.given_back == ([] if rows is None else [T])


def test_the_probe_file_gets_one_line_per_copy(cache: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "probe.jsonl"
    monkeypatch.setenv(PROBE_VARIABLE, str(path))
    blocks = EngineBlocks({"layer": cache}, 6)
    half, node = WorkerHalf(SETTINGS), RememberingNode(blocks.block_bytes)
    half.attach(blocks, node)
    node.send[T] = np.zeros((1, 16), dtype=np.uint8)
    half.save(StepPlan(gathers=(Gather(T, 0, (3,), True),)))
    node.receive[T] = node.send[T]
    half.load(StepPlan(scatters=(Scatter(T, "r", 0, (1,)),)))
    gather, scatter = (json.loads(line) for line in path.read_text().splitlines())
    assert (gather["event"], scatter["event"]) == ("gather", "scatter")
    assert gather["digests"] == scatter["digests"]
    assert gather["transfer"] == T.hex()


def test_shutdown_stops_the_node_once_and_a_step_after_it_is_a_fault(rank: tuple[WorkerHalf, RememberingNode]) -> None:
    half, node = rank
    half.shutdown()
    half.shutdown()
    assert node.stops == 1
    with pytest.raises(RuntimeError, match="not running"):
        half.load(StepPlan(releases=(T,)))


def test_settings_travel_as_plain_values() -> None:
    extra = json.loads(json.dumps(SETTINGS.to_extra_config()))
    assert RankSettings.from_extra_config(extra) == SETTINGS
    with pytest.raises(KeyError):
        RankSettings.from_extra_config({})


def test_the_control_token_is_not_shown() -> None:
    secret = RankSettings(**{**{name: getattr(SETTINGS, name) for name in SETTINGS.__slots__}, "control_token": "t0k3n"})
    assert "t0k3n" not in repr(secret)
    assert secret.to_extra_config()["splitpoint"]["control_token"] == "t0k3n"
    assert RankSettings.from_extra_config(secret.to_extra_config()) == secret
