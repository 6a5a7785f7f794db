"""A real vLLM engine in this process, stepped by hand: prefill and decode side at once, its transfer node pulls from itself.

One per process. The node, its gRPC services and `RankControl` are the real ones; only the worker's actor is missing, whose
part (reserve, pull, release) the test plays.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc

from engine import handover
from engine.protocol import EngineOutput, EngineRequest, KvReceive, KvSend, Logprob
from engine.sampling import SamplingParams
from engine.vllm_convert import engine_output, sampling_arguments
from kvtransfer import connector
from kvtransfer.config import MIB, KvTransferSettings
from kvtransfer.connector.worker import RankSettings, WorkerHalf
from kvtransfer.control import RankControl
from kvtransfer.node import KvNode
from protos.ids import TransferId, new_capability, new_incarnation, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

T = TypeVar("T")

TOKEN = "stepped-engine-token"
BUDGET_TOKENS = 256
BLOCK_TOKENS = 128
USABLE_BLOCKS = 16
MAX_MODEL_LEN = 2048
WAIT_S = 20.0
IDLE_WITHIN_S = 2.0

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def environment(wanted: dict[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class LoopThread:
    """An event loop on its own thread, for what a worker's actor does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="actor", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result(WAIT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Registrar(worker_pb2_grpc.WorkerServiceServicer):
    """The actor's side of `RegisterRank`."""

    def __init__(self) -> None:
        self.requests: list[worker_pb2.RegisterRankRequest] = []
        self.tokens: list[str] = []
        self._server: grpc.aio.Server | None = None

    async def RegisterRank(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.tokens.extend(value for key, value in context.invocation_metadata() if key == "x-splitpoint-control-token")
        return worker_pb2.RegisterRankResponse()

    async def start(self) -> str:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.1)


@dataclass
class Run:
    """One engine request's outputs, put together."""

    token_ids: list[int] = field(default_factory=list)
    called_s: float = field(default_factory=time.monotonic)
    logprobs: list[list[Logprob]] = field(default_factory=list)
    prompt_logprobs: list[list[Logprob]] | None = None
    finish_reason: str | None = None
    matched_token_id: int | None = None
    cached_tokens: int = 0
    steps: int = 0

    def add(self, output: EngineOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason
        self.matched_token_id = output.matched_token_id


@dataclass
class Split:
    """Both legs of a request and what the client would have got."""

    prefill: Run
    decode: Run | None
    forwarded: bool
    transfer_id: TransferId

    @property
    def result(self) -> Run:
        if self.decode is None:
            return self.prefill
        if not self.forwarded:
            return self.decode
        return replace(
            self.decode,
            token_ids=self.prefill.token_ids + self.decode.token_ids,
            logprobs=self.prefill.logprobs + self.decode.logprobs,
        )


@dataclass(frozen=True)
class Probed:
    event: str
    transfer_id: TransferId
    first_block: int
    digests: list[str]


class SteppedEngine:
    """See the module. All methods belong to the thread that made it."""

    def __init__(self, checkpoint: Path) -> None:
        from vllm import EngineArgs
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.engine.llm_engine import LLMEngine

        self.actor = LoopThread()
        self.registrar = Registrar()
        ranks = RankSettings(
            settings=KvTransferSettings(transports=("grpc",), default_transport="grpc", send_staging_bytes=96 * MIB),
            incarnation=new_incarnation(),
            control_token=TOKEN,
            register_address=self.actor.call(self.registrar.start()),
            model="smollm2",
            model_hash="m",
            tokenizer_hash="t",
        )
        with environment(ENVIRONMENT):
            self.llm = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(checkpoint),
                    dtype="bfloat16",
                    max_model_len=MAX_MODEL_LEN,
                    max_num_batched_tokens=BUDGET_TOKENS,
                    max_num_seqs=4,
                    enforce_eager=True,
                    seed=0,
                    kv_cache_memory_bytes=96 * MIB,
                    num_gpu_blocks_override=USABLE_BLOCKS + 1,  # block 0 is vLLM's own
                    kv_transfer_config=KVTransferConfig(
                        kv_connector=connector.CLASS_NAME,
                        kv_connector_module_path=connector.MODULE_PATH,
                        kv_role="kv_both",
                        kv_connector_extra_config=ranks.to_extra_config(),
                        kv_load_failure_policy="fail",
                    ),
                )
            )
        self.scheduler = self.llm.engine_core.engine_core.scheduler
        self.scheduler_half = self.scheduler.connector.scheduler_half
        self.worker_half: WorkerHalf = get_kv_transfer_group().worker_half
        node = self.worker_half._node
        assert isinstance(node, KvNode)
        self.node = node
        self.control = self.actor.call(self._control([r.endpoint for r in self.registrar.requests]))
        self.runs: dict[str, Run] = {}
        self.probed: list[Probed] = []
        self.worker_half._probe = lambda *event: self.probed.append(Probed(*event))
        self._serial = 0

    async def _control(self, endpoints: Sequence[pb.RankEndpoint]) -> RankControl:
        return RankControl(endpoints, TOKEN)

    def close(self) -> None:
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self.actor.call(self.control.close())
        self.llm.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        self.actor.call(self.registrar.stop())
        self.actor.stop()

    # The engine

    def tokenize(self, text: str) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return list(tokenizer.encode(text))

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, kv: KvSend | KvReceive | None = None) -> str:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self._serial += 1
        request = EngineRequest(request_id=f"r{self._serial}", prompt_token_ids=list(prompt), sampling=sampling, kv=kv)
        arguments = sampling_arguments(request)
        if "structured_outputs" in arguments:
            arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
        params = VllmParams(**arguments, output_kind=RequestOutputKind.DELTA)
        prompt_input: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids}
        self.llm.add_request(request.request_id, prompt_input, params)
        self.runs[str(request.request_id)] = Run()
        return str(request.request_id)

    def step(self) -> None:
        for output in self.llm.step():
            run = self.runs[output.request_id]
            run.add(engine_output(output, first=not run.token_ids, called_s=run.called_s, read_s=time.monotonic()))
        for run in self.runs.values():
            if run.finish_reason is None:
                run.steps += 1

    def finish(self, *request_ids: str) -> list[Run]:
        for _ in range(4000):
            if all(self.runs[r].finish_reason is not None for r in request_ids):
                return [self.runs[r] for r in request_ids]
            self.step()
        raise AssertionError(f"{request_ids} did not finish")

    def run(self, prompt: Sequence[int], sampling: SamplingParams, kv: KvSend | KvReceive | None = None) -> Run:
        return self.finish(self.submit(prompt, sampling, kv))[0]

    def abort(self, request_id: str) -> None:
        self.llm.abort_request([request_id])

    def forget_prefixes(self) -> None:
        self.settle()
        assert self.llm.reset_prefix_cache()

    def settle(self) -> None:
        """Step until vLLM has nothing to tell its workers any more."""
        for _ in range(4000):
            if not self.scheduler.has_requests():
                return
            self.llm.step()
        raise AssertionError("the engine does not become idle")

    # The actor's part

    def grant(self) -> pb.TransferGrant:
        return pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())

    def reserve(self, grant: pb.TransferGrant, prompt: Sequence[int]) -> None:
        hashed = token_hash(list(prompt))
        self.actor.call(self.control.reserve(grant, prompt_tokens=len(prompt), token_hash=hashed, remaining_s=WAIT_S))

    def pull(self, grant: pb.TransferGrant, prompt: Sequence[int], transport: str = "grpc") -> Future[list[pb.PullResponse]]:
        return self.actor.submit(
            self.control.pull(
                grant,
                attempt_id=f"att-{self._serial}",
                senders=self.control.endpoints,
                prompt_tokens=len(prompt),
                token_hash=token_hash(list(prompt)),
                transport=transport,
                remaining_s=WAIT_S,
            )
        )

    def release(self, grant: pb.TransferGrant, reason: str = "test") -> None:
        self.actor.call(self.control.release(grant.transfer_id, reason))

    def stage(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[Run, pb.TransferGrant]:
        """The prefill leg, and the pull beside it: on return the KV lies verified in receive staging."""
        grant = self.grant()
        self.reserve(grant, prompt)
        pull = self.pull(grant, prompt)
        run = self.run(prompt, handover.prefill_params(sampling), KvSend(TransferId(grant.transfer_id)))
        answers = pull.result(WAIT_S)
        assert answers[0].seal.prompt_tokens == len(prompt)
        return run, grant

    def split(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        before_decode: Callable[[], None] | None = None,
        forward: bool | None = None,
    ) -> Split:
        """Both legs, one after the other, as the gateway would divide them. `forward` overrides its rule."""
        prefill, grant = self.stage(prompt, sampling)
        transfer_id = TransferId(grant.transfer_id)
        forward = handover.forwarding_refusal(sampling) is None if forward is None else forward
        if prefill.finish_reason == "stop" or sampling.max_tokens == 1:
            self.release(grant, "no decode to follow")
            return Split(prefill, None, True, transfer_id)
        if before_decode is not None:
            before_decode()
        forwarded = prefill.token_ids if forward else []
        decode = self.run(
            [*prompt, *forwarded],
            handover.decode_params(sampling, forwarded_tokens=len(forwarded)),
            KvReceive(transfer_id, len(prompt)),
        )
        return Split(prefill, decode, forward, transfer_id)

    # What must be zero

    def leftovers(self) -> dict[str, int]:
        """Whatever is still held, by name; empty when idle. Cached blocks that nobody refers to count as free."""
        self.settle()
        status = self.node.status()
        held = {
            "blocks": USABLE_BLOCKS - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(self.scheduler.requests),
            "live transfers": self.scheduler_half.live_transfers,
            "leases": status.leases,
            "sessions": status.sessions,
            "send used": status.send.used_bytes,
            "send quarantined": status.send.quarantined_bytes,
            "receive used": status.receive.used_bytes,
            "receive quarantined": status.receive.quarantined_bytes,
        }
        return {name: count for name, count in held.items() if count}

    def leftovers_become(self, wanted: set[str]) -> set[str]:
        """What is held once it is `wanted`, or what still is after the time that the node's thread is allowed."""
        pause = threading.Event()
        for _ in range(int(IDLE_WITHIN_S / 0.01)):
            if self.leftovers().keys() == wanted:
                break
            pause.wait(0.01)
        return set(self.leftovers())

    def check_idle(self) -> None:
        """Asserts that nothing is held, giving the node's thread the time that is allowed."""
        self.leftovers_become(set())
        assert self.leftovers() == {}
