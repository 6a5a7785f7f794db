"""NIXL alone: READ from the sender's cache into the receiver's, one descriptor for each block of each layer, no staging, nothing
checked. `depth` transfers are posted at once."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from kvtransfer.bench.shape import LAYOUTS, Case, cache, verify


class Half:
    side = ""

    def __init__(self, options: dict[str, Any]) -> None:
        from kvtransfer.transports.nixl_library import api

        self._agent = api.nixl_agent(f"bench-{self.side}", api.nixl_agent_config(backends=["UCX"]))

    def setup(self) -> dict[Any, Any]:
        self._cache = cache(self.side)
        self._memory = self._agent.register_memory([(layer.ctypes.data, len(layer), 0, "") for layer in self._cache], "DRAM")
        return {
            "metadata": self._agent.get_agent_metadata(),
            "addresses": [layer.ctypes.data for layer in self._cache],
        }

    def connect(self, facts: dict[str, Any]) -> None:
        if self.side == "sender":
            return  # two agents that load each other at once wait for each other
        name = self._agent.add_remote_agent(facts["metadata"])
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._theirs = facts["addresses"]

    def verify(self, case: Case) -> None:
        verify(self._cache, case)

    def close(self) -> None:
        return


class Sender(Half):
    side = "sender"

    def run(self, case: Case) -> float | None:
        return None


class Receiver(Half):
    side = "receiver"

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._lists: dict[str, tuple[Any, Any]] = {}

    def run(self, case: Case) -> float | None:
        agent, layout = self._agent, LAYOUTS[case.layout]
        if case.layout not in self._lists:
            self._lists[case.layout] = (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._pieces(case, [a.ctypes.data for a in self._cache]), "DRAM"),
                agent.prep_xfer_dlist(self._peer, self._pieces(case, self._theirs), "DRAM"),
            )
        mine, theirs = self._lists[case.layout]
        local, remote = (
            [layer * layout.cache_blocks + block for layer in range(layout.layers) for block in case.block_ids(side)]
            for side in ("receiver", "sender")
        )
        begun = time.perf_counter()
        under_way: deque[Any] = deque()
        for _ in range(case.transfers):
            if len(under_way) == case.depth:
                self._finish(under_way.popleft())
            handle = agent.make_prepped_xfer("READ", mine, local, theirs, remote)
            agent.transfer(handle)
            under_way.append(handle)
        while under_way:
            self._finish(under_way.popleft())
        return time.perf_counter() - begun

    def _finish(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL reports a failed transfer")
        self._agent.release_xfer_handle(handle)

    @staticmethod
    def _pieces(case: Case, addresses: list[int]) -> Any:
        layout = LAYOUTS[case.layout]
        offsets = np.arange(layout.cache_blocks, dtype=np.uint64) * np.uint64(layout.piece_bytes)
        places = (np.array(addresses, np.uint64)[:, None] + offsets[None, :]).reshape(-1)
        sizes = np.full_like(places, layout.piece_bytes)
        return np.stack([places, sizes, np.zeros_like(places)], axis=1)


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
