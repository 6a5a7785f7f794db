"""vLLM in its own processes, with the connector: registration, both transports, bytes across processes, death.

What every engine must do is in tests/contract/test_engines.py. One engine serves the module: its rank pulls from itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine import handover
from engine.config import EngineSettings, KvEngineConfig
from engine.protocol import Engine, EngineDeadError, EngineInfo, EngineOutput, EngineRequest, KvReceive, KvSend
from engine.sampling import SamplingParams
from kvtransfer.config import MIB, KvTransferSettings
from kvtransfer.connector.worker import PROBE_VARIABLE
from kvtransfer.control import RankControl
from protos.ids import TransferId, new_attempt_id, new_capability, new_incarnation, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.engine.test_parity import prompt_of
from tests.support.stepped_engine import Registrar, Run, environment

TOKEN = "a-control-token-that-no-log-may-show"
WAIT_S = 30.0
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@dataclass
class Worker:
    engine: Engine
    info: EngineInfo
    control: RankControl
    registrar: Registrar
    probe: Path
    pids: list[int]
    serial: int = 0

    async def run(self, prompt: list[int], sampling: SamplingParams, kv: KvSend | KvReceive | None = None) -> Run:
        run = Run()
        async for output in self.generate(prompt, sampling, kv):
            run.add(output)
        return run

    def generate(
        self, prompt: list[int], sampling: SamplingParams, kv: KvSend | KvReceive | None = None
    ) -> AsyncIterator[EngineOutput]:
        self.serial += 1
        return self.engine.generate(
            EngineRequest(request_id=f"r{self.serial}", prompt_token_ids=prompt, sampling=sampling, kv=kv)
        )

    async def held(self) -> dict[str, int]:
        (status,) = await self.control.status()
        load = self.engine.load()
        return {
            "leases": status.leases,
            "sessions": status.sessions,
            "send": status.send.used_bytes + status.send.quarantined_bytes,
            "receive": status.receive.used_bytes + status.receive.quarantined_bytes,
            "running": load.running,
            "waiting": load.waiting,
        }

    async def becomes_idle(self) -> None:
        async with asyncio.timeout(5.0):
            while any((await self.held()).values()):  # noqa: ASYNC110 - another process's state has no event here
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    from engine.vllm import VllmEngine

    registrar = Registrar()
    probe = tmp_path_factory.mktemp("probe") / "blocks.jsonl"
    kv = KvEngineConfig(
        settings=KvTransferSettings(send_staging_bytes=64 * MIB, receive_staging_bytes=64 * MIB),
        incarnation=new_incarnation(),
        control_token=TOKEN,
        register_address=await registrar.start(),
        model_hash="model",
        tokenizer_hash="tokenizer",
    )
    settings = EngineSettings(model_path=checkpoint, max_model_len=1024, max_num_seqs=4, kv_cache_bytes=128 * MIB)
    engine = VllmEngine(settings, kv)
    with environment({PROBE_VARIABLE: str(probe)}):
        info = await engine.start()
    control = RankControl([r.endpoint for r in registrar.requests], TOKEN)
    pids = [child.pid for child in engine._children]
    yield Worker(engine, info, control, registrar, probe, pids)
    await control.close()
    await engine.stop()
    await engine.stop()
    await registrar.stop()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


async def test_start_returns_when_the_rank_has_registered(worker: Worker) -> None:
    (request,) = worker.registrar.requests
    assert worker.registrar.tokens == [TOKEN]
    assert (request.world_size, worker.info.world_size) == (1, 1)
    facts = request.compatibility
    assert facts.block_tokens == worker.info.block_tokens == 128
    assert request.bytes_per_block == facts.block_bytes_per_layer * facts.num_layers
    assert facts.layout.startswith("cpu_attn:")
    assert (facts.model, facts.model_revision) == ("smollm2-135m-instruct", "model")
    assert set(request.transports) == {"ucx", "grpc"}
    assert TOKEN not in json.dumps(worker.info.start_arguments)
    for pid in worker.pids:
        assert TOKEN not in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.parametrize("transport", ["ucx", "grpc"])
async def test_split_equals_colocated_over(worker: Worker, transport: str) -> None:
    for length in (1, 129, 700):
        prompt = prompt_of(length, seed=40)
        whole = await worker.run(prompt, GREEDY)
        assert await worker.engine.reset_prefix_cache()
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        transfer_id, hashed = TransferId(grant.transfer_id), token_hash(prompt)
        await worker.control.reserve(grant, prompt_tokens=length, token_hash=hashed, remaining_s=WAIT_S)
        pull = asyncio.create_task(
            worker.control.pull(
                grant,
                attempt_id=new_attempt_id(),
                senders=worker.control.endpoints,
                prompt_tokens=length,
                token_hash=hashed,
                transport=transport,
                remaining_s=WAIT_S,
            )
        )
        prefill = await worker.run(prompt, handover.prefill_params(GREEDY), KvSend(transfer_id))
        (answer,) = await pull
        assert answer.transport == transport
        assert await worker.engine.reset_prefix_cache()
        decode = await worker.run(
            [*prompt, *prefill.token_ids],
            handover.decode_params(GREEDY, forwarded_tokens=1),
            KvReceive(transfer_id, length),
        )
        assert prefill.token_ids + decode.token_ids == whole.token_ids
        assert decode.cached_tokens == length
        assert await worker.engine.reset_prefix_cache()
        events = [json.loads(line) for line in worker.probe.read_text().splitlines()]
        mine = [event for event in events if event["transfer"] == transfer_id.hex()]
        gathered = [digest for event in mine if event["event"] == "gather" for digest in event["digests"]]
        scattered = [digest for event in mine if event["event"] == "scatter" for digest in event["digests"]]
        assert gathered == scattered
        assert len(gathered) == -(-length // 128)
    await worker.becomes_idle()


async def test_a_consumer_cancelled_at_any_point_of_submission_leaves_nothing(worker: Worker) -> None:
    """Also between vLLM's own bookkeeping and the engine core's: its generator does not abort there."""
    for turns in range(12):
        task = asyncio.create_task(worker.run(prompt_of(20), SamplingParams(max_tokens=400, ignore_eos=True)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await worker.becomes_idle()
    # The next request's first step reports an engine that runs it alone.
    stream = worker.generate(prompt_of(20), SamplingParams(max_tokens=50, ignore_eos=True))
    await anext(stream)
    assert worker.engine.load().running == 1
    await stream.aclose()
    await worker.becomes_idle()


async def test_a_lone_request_whose_slot_is_gone_ends_without_another_to_wake_the_engine(worker: Worker) -> None:
    await worker.becomes_idle()
    prompt = prompt_of(200, seed=41)
    async with asyncio.timeout(WAIT_S):
        run = await worker.run([*prompt, 7], GREEDY, KvReceive(new_transfer_id(), len(prompt)))
    assert (run.finish_reason, run.token_ids) == ("error", [])
    await worker.becomes_idle()


async def test_a_dead_engine_core_ends_every_request_and_stop_clears_up(worker: Worker) -> None:
    """Last in the module: nothing lives afterwards."""
    streams = [worker.generate(prompt_of(20, seed=n), SamplingParams(max_tokens=500, ignore_eos=True)) for n in range(2)]
    for stream in streams:
        await anext(stream)
    core = next(pid for pid in worker.pids if "EngineCore" in " ".join(psutil.Process(pid).cmdline()))
    os.kill(core, 9)

    async def drain(stream: AsyncIterator[EngineOutput]) -> None:
        async for _ in stream:
            pass

    async with asyncio.timeout(10.0):
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await drain(stream)
    with pytest.raises(EngineDeadError):
        await worker.engine.check_health()
    with pytest.raises(EngineDeadError):
        await worker.run([1, 2], GREEDY)
    assert worker.engine.load().running == 0
