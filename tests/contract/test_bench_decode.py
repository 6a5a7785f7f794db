"""Both halves of `bench transfer --decode`, real nodes and a stand-in for vLLM: what comes in is paced, timed and scattered."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ucxx")

from coordinator.bench.transfer_decode import ALONE, BESIDE, SIZE_BYTES
from kvtransfer.bench.shape import REAL, Case
from kvtransfer.connector import decoding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEP_S = 0.002


class Engine:
    """A token a step for every stream."""

    def __init__(self) -> None:
        self.streams: list[str] = []

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        self.streams.append(name)

    def step(self) -> list[Any]:
        time.sleep(STEP_S)  # computes
        return [SimpleNamespace(finished=False) for _ in self.streams]

    def abort_request(self, names: list[str]) -> None:
        self.streams = [name for name in self.streams if name not in names]

    def has_unfinished_requests(self) -> bool:
        return bool(self.streams)


@pytest.mark.parametrize("nice", [0, 5])
def test_a_stream_is_timed_while_transfers_are_scattered(monkeypatch: pytest.MonkeyPatch, nice: int) -> None:
    monkeypatch.setattr(decoding, "make_engine", lambda model, omp_threads: (Engine(), None))
    options = {"model": "none", "rate_bytes_per_s": 100e6, "seconds": 0.5, "omp_threads": 1, "nice": nice}
    sender, receiver = decoding.sender(options), decoding.receiver(options)
    try:
        facts = {"sender": sender.setup(), "receiver": receiver.setup()}
        sender.connect(facts["receiver"])
        receiver.connect(facts["sender"])
        with ThreadPoolExecutor(1) as other:
            for case in (Case(REAL.name, SIZE_BYTES, 3, what=BESIDE), Case(REAL.name, SIZE_BYTES, 0, what=ALONE)):
                sending = other.submit(sender.run, case)
                seconds = receiver.run(case)
                sending.result(60)
                assert seconds is not None
                assert seconds >= 0.5
                taken = receiver.taken()
                assert len(taken["gaps_s"]) > 1
                assert sum(taken["gaps_s"]) == pytest.approx(seconds)
                assert min(taken["gaps_s"]) >= STEP_S
                if case.what == BESIDE:
                    receiver.verify(case)
                else:
                    assert taken["bytes_per_s"] == 0
    finally:
        receiver.close()
        sender.close()
