"""A vLLM engine that decodes one stream, and transfers that arrive in its process meanwhile: two halves of a benchmark.

Receiver: a rank of a decode worker. The engine's thread runs the model; the transfer node lives beside it in the same process,
under the same interpreter lock; between two steps the engine's thread scatters what has been verified, as a step's load does.
Sender: prefill's node, gathering at a steady pace, and the actors' calls (reserve, pull). Of the stream nothing but the time
between tokens is looked at, so its own KV is computed, and what arrives goes into a cache that it does not read.
Options: `model`, `rate_bytes_per_s`, `seconds` of one turn, `omp_threads`, `nice` of the receiving node's threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import numpy as np

from kvtransfer.bench.ours import REMAINING_S, TOKEN, grants, make_blocks, make_node
from kvtransfer.bench.shape import MIB, REAL, Case, cache, verify
from kvtransfer.control import RankControl
from kvtransfer.node import KvNode
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

ALONE = "alone"
BESIDE = "beside"
TRANSPORT = "ucx"
PROMPT_TOKENS = 64
WARM_TOKENS = 8
MAX_MODEL_LEN = 4096
SETTLE_S = 60.0


def make_engine(model: str, omp_threads: int) -> tuple[Any, Any]:
    """An engine in this process, stepped by its caller, and what its one stream is sampled with."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS=str(omp_threads),
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=2,
            enforce_eager=True,
            seed=0,
            kv_cache_memory_bytes=256 * MIB,
            enable_prefix_caching=False,
        )
    )
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS)
    return engine, sampling


class _Half:
    side = ""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._serial = 0
        self._node: KvNode | None = None

    def setup(self) -> dict[Any, Any]:
        self._cache = cache(self.side)
        self._blocks = make_blocks(self._cache, REAL)
        self._node = make_node(self.side, TRANSPORT, REAL, check=True, options={})
        return {"endpoint": self._start(self._node).SerializeToString()}

    def connect(self, facts: dict[Any, Any]) -> None:
        self._theirs = pb.RankEndpoint.FromString(facts["endpoint"])

    def verify(self, case: Case) -> None:
        verify(self._cache, case)

    def close(self) -> None:
        if self._node is not None:
            self._node.stop()

    def _start(self, node: KvNode) -> pb.RankEndpoint:
        return node.start()


class Sender(_Half):
    side = "sender"

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._runner = asyncio.Runner()
        self._controls: list[RankControl] = []

    def run(self, case: Case) -> float | None:
        self._serial += 1
        if case.what == BESIDE:
            self._runner.run(self._paced(case))
        return None

    async def _paced(self, case: Case) -> None:
        assert self._node is not None
        if not self._controls:
            self._controls = [RankControl([endpoint], TOKEN) for endpoint in (self._node.endpoint, self._theirs)]
        each_bytes = case.num_blocks * REAL.block_bytes
        begun = time.monotonic()
        async with asyncio.TaskGroup() as pulls:
            for number, grant in enumerate(grants(case, self._serial)):
                due = begun + number * each_bytes / self._options["rate_bytes_per_s"]
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._send(grant, case)
                pulls.create_task(self._pull(grant, case))

    async def _send(self, grant: pb.TransferGrant, case: Case) -> None:
        assert self._node is not None
        await self._controls[0].reserve(
            grant,
            prompt_tokens=case.num_blocks * REAL.block_tokens,
            token_hash=grant.transfer_id * 2,
            remaining_s=REMAINING_S,
        )
        ids = case.block_ids("sender")
        rows = self._node.send_view(grant.transfer_id, 0, len(ids))
        if rows is None:
            raise RuntimeError("the transfer ended while it was gathered")
        crcs = self._blocks.gather(ids, np.asarray(rows), check=True)
        self._node.commit_chunk(grant.transfer_id, 0, len(ids), last=True, crcs=crcs)

    async def _pull(self, grant: pb.TransferGrant, case: Case) -> None:
        assert self._node is not None
        await self._controls[1].pull(
            grant,
            attempt_id="bench",
            senders=[self._node.endpoint],
            prompt_tokens=case.num_blocks * REAL.block_tokens,
            token_hash=grant.transfer_id * 2,
            transport=TRANSPORT,
            remaining_s=REMAINING_S,
        )

    def close(self) -> None:
        async def hang_up() -> None:
            for control in self._controls:
                await control.close()

        self._runner.run(hang_up())
        self._runner.close()
        super().close()


class Receiver(_Half):
    side = "receiver"

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engine, self._sampling = make_engine(options["model"], options["omp_threads"])
        self._gaps_s: list[float] = []
        self._rate = 0.0

    def run(self, case: Case) -> float | None:
        """Decode for one turn; seconds of it. What was announced for the turn has all been scattered when this returns."""
        self._serial += 1
        due = [grant.transfer_id for grant in grants(case, self._serial)] if case.what == BESIDE else []
        expected = len(due)
        name = f"stream-{self._serial}"
        # "type" marks a prompt as processed already; releases that know no such mark ignore it.
        prompt: Any = {"type": "token", "prompt_token_ids": list(range(100, 100 + PROMPT_TOKENS))}
        self._engine.add_request(name, prompt, self._sampling)
        for _ in range(1 + WARM_TOKENS):
            self._scatter(due, case)
            self._step()
        self._scatter(due, case)  # what came before the turn is not of its rate
        begun = last = time.perf_counter()
        end = begun + self._options["seconds"]
        left_before = len(due)
        gaps = []
        while last < end:
            self._scatter(due, case)
            self._step()
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        self._rate = (left_before - len(due)) * case.num_blocks * REAL.block_bytes / (last - begun)
        self._gaps_s = gaps
        self._engine.abort_request([name])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        give_up_at = time.monotonic() + SETTLE_S
        while due:
            self._scatter(due, case)
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"{len(due)} of {expected} transfers did not come")
            time.sleep(0.001)
        return last - begun

    def taken(self) -> dict[str, Any]:
        """Of the last turn: seconds between tokens, and bytes scattered per second."""
        return {"gaps_s": self._gaps_s, "bytes_per_s": self._rate}

    def _step(self) -> None:
        """Until the stream's next token is out."""
        outputs: list[Any] = []
        while not outputs and self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        if not outputs or outputs[0].finished:
            raise RuntimeError("the stream has ended: a turn is longer than the model's context")

    def _scatter(self, due: list[bytes], case: Case) -> None:
        """Everything that is verified, in order."""
        assert self._node is not None
        while due and self._node.staged(due[0]):
            rows = self._node.receive_view(due[0])
            if rows is not None:
                self._blocks.scatter(np.asarray(rows), case.block_ids(self.side))
                self._node.scattered(due[0])
            due.pop(0)

    def _start(self, node: KvNode) -> pb.RankEndpoint:
        """Threads inherit the niceness of the one that starts them, so the node is started by one that has it."""
        found: list[pb.RankEndpoint] = []

        def start() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._options["nice"])
            found.append(node.start())

        starter = threading.Thread(target=start, name="starter")
        starter.start()
        starter.join()
        if not found:
            raise RuntimeError("the transfer node did not start")
        return found[0]


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
