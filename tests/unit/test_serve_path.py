"""`splitpoint bench serve-path`: what is sent in which order, and what is made of the answers. The service answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.bench import serve_path
from coordinator.bench.serve_path import ServePathSpec, measure, table
from coordinator.compare.load import Piece, RequestFailedError
from coordinator.compare.workload import PlannedRequest

SPEC = ServePathSpec(
    unloaded_prompt_tokens=32,
    unloaded_pairs=3,
    busy_output_tokens=2,
    loaded_tokens=(16, 3),
    loaded_rate_per_s=400.0,
    seconds_per_load=0.02,
    warm_up=1,
)


class Service:
    """Answers at once; splits nothing. `asked` is every request in order."""

    def __init__(self, target: str) -> None:
        self.asked: list[tuple[str, PlannedRequest]] = []
        self.failing = ""

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def model(self, timeout_s: float) -> str:
        return "m"

    async def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        self.asked.append((path, request))
        if path == self.failing:
            raise RequestFailedError("UNAVAILABLE: no")
        for _ in range(request.output_tokens):
            await asyncio.sleep(0)
            yield Piece(1, ledger={"prefill_s": 0.5, "path": path})


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    found = Service("")
    monkeypatch.setattr(serve_path, "GrpcClient", lambda target: found)
    return found


async def test_paths_alternate_and_no_prompt_is_sent_twice(service: Service) -> None:
    record = await measure("host:1", SPEC)
    unloaded = [path for path, request in service.asked if len(request.prompt_token_ids) == 32 and request.output_tokens == 16]
    assert unloaded == ["split", "colocated", "split", "colocated", "colocated", "split", "split", "colocated"]
    loaded = [path for path, request in service.asked if request.output_tokens == 3]
    assert loaded == ["split"] * 8 + ["colocated"] * 16 + ["split"] * 8, "A B B A"
    prompts = [request.prompt_token_ids for _, request in service.asked]
    assert len(set(prompts)) == len(prompts), "a prefix cache would answer for the engine"
    assert record["loaded"]["split"]["requests"] == record["loaded"]["colocated"]["requests"] == 16
    assert record["unloaded"]["split"]["stages_p50"] == {"prefill_s": 0.5}


async def test_the_busy_rate_follows_from_the_unloaded_time(service: Service) -> None:
    record = await measure("host:1", SPEC)
    assert record["busy"]["rate_per_s"] == pytest.approx(SPEC.busy_share / record["unloaded"]["split"]["ttft_p50_s"])


async def test_both_paths_get_the_same_loads(service: Service) -> None:
    await measure("host:1", SPEC)
    gaps: dict[str, list[Any]] = {"split": [], "colocated": []}
    for path, request in service.asked:
        if request.output_tokens == 3:
            gaps[path].append((request.gap, len(request.prompt_token_ids)))
    assert gaps["split"] == gaps["colocated"]


async def test_a_path_that_answers_nothing_is_said(service: Service) -> None:
    service.failing = "colocated"
    with pytest.raises(RequestFailedError, match="no unloaded request was answered on the colocated path: UNAVAILABLE: no"):
        await measure("host:1", SPEC)


async def test_the_table_has_a_row_for_each_path_and_load(service: Service) -> None:
    text = table(await measure("host:1", SPEC))
    assert len(text.splitlines()) == 2 + 3 * 2 + 1
    assert "split minus colocated" in text
