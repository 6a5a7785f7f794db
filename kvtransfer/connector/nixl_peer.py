"""vLLM's own NixlConnector between two processes, as a peer for measuring: its worker half on a cache of the same bytes.

What is timed is what its rank does in a decode engine: `start_load_kv` with the requests, then `get_finished` until all are in.
It reads engine blocks one-sided, without staging and without a checksum. Not timed, and not the connector's own here: its
handshake, whose metadata travels over the benchmark's pipe, and its scheduler half. No engine steps beside it, so it is polled
without a pause.
Options: `model`, a checkpoint whose config names the layers' shape.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from kvtransfer.bench.shape import LAYOUTS, REAL, Case, cache, verify

REQUEST_S = 60.0
STEP_S = 0.002
"""How often the sending rank looks, as an engine's steps would."""


class _Half:
    side = ""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.disable(logging.INFO)  # NIXL's own goes to standard output
        self._cores = os.sched_getaffinity(0)
        self._engine_id = f"bench-{self.side}"
        self._worker = _make_worker(options["model"], self._engine_id)
        self._serial = 0

    def setup(self) -> dict[Any, Any]:
        # Its constructor binds the thread to the last core, for an engine that computes on the others; here nothing computes.
        os.sched_setaffinity(0, self._cores)
        self._cache = cache(self.side)
        shape = (REAL.cache_blocks, REAL.kv_heads, REAL.block_tokens, 2 * REAL.head_dim)
        layers = {
            f"model.layers.{number}.self_attn.attn": torch.from_numpy(layer).view(torch.bfloat16).view(shape)
            for number, layer in enumerate(self._cache)
        }
        self._worker.register_kv_caches(layers)
        return {"engine_id": self._engine_id, "metadata": self._worker.xfer_handshake_metadata.agent_metadata_bytes}

    def connect(self, facts: dict[str, Any]) -> None:
        # As in serving, only the side that reads makes itself known; two agents that load each other at once wait for each other.
        if self.side == "sender":
            return
        from msgspec import msgpack
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

        self._peer = facts["engine_id"]
        metadata = msgpack.decode(facts["metadata"], type=NixlAgentMetadata)
        name = self._worker.add_remote_agent(metadata, 0, 1, 1)
        self._worker._remote_agents[self._peer] = {(0, 0): name}
        self._worker._engine_clock_offset[self._peer] = 0.0
        self._worker._track_remote_engine_replacement(self._peer, "127.0.0.1", 0)

    def verify(self, case: Case) -> None:
        verify(self._cache, case)

    def close(self) -> None:
        self._worker.shutdown()


class Sender(_Half):
    side = "sender"

    def run(self, case: Case) -> float | None:
        self._serial += 1
        names = {f"{self._serial}-{number}" for number in range(case.transfers)}
        self._worker._reqs_to_process.update(names)
        give_up_at = time.monotonic() + REQUEST_S
        while names:
            sent, _ = self._worker.get_finished()
            names -= sent
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{len(names)} requests were not reported as read")
            time.sleep(STEP_S)
        return None


class Receiver(_Half):
    side = "receiver"

    def run(self, case: Case) -> float | None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        self._serial += 1
        if LAYOUTS[case.layout] is not REAL:
            raise ValueError("its block size is the engine's")
        mine, theirs = case.block_ids("receiver"), case.block_ids("sender")
        metadata = NixlConnectorMetadata()
        names = {f"{self._serial}-{number}" for number in range(case.transfers)}
        for name in names:
            parameters = {
                "remote_block_ids": (theirs,),
                "remote_engine_id": self._peer,
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 0,
                "tp_size": 1,
            }
            metadata.add_new_req_to_recv(name, (mine,), parameters, awaiting_kvs=True)
        begun = time.perf_counter()
        self._worker.start_load_kv(metadata)
        while names:
            _, arrived = self._worker.get_finished()
            names -= arrived
            if time.perf_counter() - begun > REQUEST_S:
                raise TimeoutError(f"{len(names)} requests did not arrive")
        seconds = time.perf_counter() - begun
        failed = self._worker.get_block_ids_with_load_errors()
        if failed:
            raise RuntimeError(f"{len(failed)} blocks failed to load")
        return seconds


def _make_worker(model: str, engine_id: str) -> Any:
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu", engine_id=engine_id)
    arguments = EngineArgs(model=model, dtype="bfloat16", block_size=REAL.block_tokens, kv_transfer_config=transfer)
    config = arguments.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    spec = FullAttentionSpec(
        block_size=REAL.block_tokens, num_kv_heads=REAL.kv_heads, head_size=REAL.head_dim, dtype=torch.bfloat16
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(REAL.layers)]
    caches = KVCacheConfig(num_blocks=REAL.cache_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"tcp://127.0.0.1:{get_open_port()}", local_rank=0, backend="gloo"
        )
        ensure_model_parallel_initialized(1, 1)
        return NixlPullConnectorWorker(config, engine_id, caches)


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
