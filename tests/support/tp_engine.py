"""A real vLLM engine whose ranks are processes of their own (vLLM's multi-process tensor parallelism on a CPU), stepped by hand.

Scheduler and connector's scheduler half run here; each rank's process has its transfer node. The test plays the worker's actor.
Several engines may live side by side: nothing of a rank is in this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from engine.protocol import EngineRequest, KvReceive, KvSend
from engine.sampling import SamplingParams
from engine.vllm_convert import engine_output, sampling_arguments
from kvtransfer import connector
from kvtransfer.config import MIB, KvTransferSettings
from kvtransfer.connector.worker import RankSettings
from kvtransfer.control import RankControl
from protos.ids import new_incarnation, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.stepped_engine import ENVIRONMENT, TOKEN, LoopThread, Registrar, Run, environment

VOCABULARY = 512
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 512
BUDGET_TOKENS = 64
WAIT_S = 60.0


def random_llama(path: Path) -> None:
    """Write a small Llama of 8 query and 4 KV heads with random weights, sharp enough that no two tokens nearly tie."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)


def _tracker_pid(tracker: Any = resource_tracker._resource_tracker) -> int | None:
    return getattr(tracker, "_pid", None)


class TpEngine:
    """One engine of `tp` ranks. All methods belong to the thread that made it."""

    def __init__(self, checkpoint: Path, tp: int) -> None:
        from vllm import EngineArgs
        from vllm.config import KVTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        before = set(psutil.Process().children(recursive=True))
        self.actor = LoopThread()
        registrar = Registrar()
        ranks = RankSettings(
            settings=KvTransferSettings(
                transports=("grpc",), default_transport="grpc", send_staging_bytes=16 * MIB, receive_staging_bytes=16 * MIB
            ),
            incarnation=new_incarnation(),
            control_token=TOKEN,
            register_address=self.actor.call(registrar.start()),
            model="llama",
            model_hash="m",
            tokenizer_hash="t",
        )
        with environment({**ENVIRONMENT, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TORCHDYNAMO_DISABLE": "1"}):
            self.llm = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(checkpoint),
                    skip_tokenizer_init=True,
                    dtype="float32",
                    tensor_parallel_size=tp,
                    distributed_executor_backend="mp",
                    max_model_len=MAX_MODEL_LEN,
                    max_num_batched_tokens=BUDGET_TOKENS,
                    max_num_seqs=2,
                    block_size=BLOCK_TOKENS,
                    enforce_eager=True,
                    kv_cache_memory_bytes=16 * MIB,
                    num_gpu_blocks_override=33,
                    kv_transfer_config=KVTransferConfig(
                        kv_connector=connector.CLASS_NAME,
                        kv_connector_module_path=connector.MODULE_PATH,
                        kv_role="kv_both",
                        kv_connector_extra_config=ranks.to_extra_config(),
                        kv_load_failure_policy="fail",
                    ),
                )
            )
        # The resource tracker serves all of this process's children and ends with it.
        before |= {child for child in psutil.Process().children() if child.pid == _tracker_pid()}
        self._ranks = [child for child in psutil.Process().children(recursive=True) if child not in before]
        mapped: list[str] = []
        for rank in self._ranks:
            with contextlib.suppress(psutil.Error):  # a short-lived child of vLLM's that has ended meanwhile
                mapped += [area.path for area in rank.memory_maps()]
        self._segments = {Path(path) for path in mapped if path.startswith("/dev/shm/vllm_dist_")}
        self.registered = sorted(registrar.requests, key=lambda request: request.endpoint.rank)
        self.actor.call(registrar.stop())
        self.control = self.actor.call(self._control())
        self._serial = 0

    async def _control(self) -> RankControl:
        return RankControl([request.endpoint for request in self.registered], TOKEN)

    def close(self) -> None:
        """Returns when the ranks' processes are gone; fails when they stay."""
        self.actor.call(self.control.close())
        with environment({"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"}):  # then they are told by a signal
            self.llm.engine_core.shutdown()
        self.actor.stop()
        _, alive = psutil.wait_procs(self._ranks, timeout=WAIT_S)
        assert not alive, f"ranks outlive their engine: {alive}"
        # vLLM's shared memory between the ranks of a CPU engine, which nobody removes.
        for segment in self._segments:
            segment.unlink(missing_ok=True)

    def run(self, prompt: Sequence[int], sampling: SamplingParams, kv: KvSend | KvReceive | None = None) -> Run:
        """One request, alone in the engine, to its end."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        self._serial += 1
        request = EngineRequest(request_id=f"r{self._serial}", prompt_token_ids=list(prompt), sampling=sampling, kv=kv)
        params = VllmParams(**sampling_arguments(request), output_kind=RequestOutputKind.DELTA)
        given: Any = {"type": "token", "prompt_token_ids": list(prompt)}
        self.llm.add_request(str(request.request_id), given, params)
        run = Run()
        for _ in range(4000):
            for output in self.llm.step():
                run.add(engine_output(output, first=not run.token_ids, called_s=run.called_s, read_s=run.called_s))
            if run.finish_reason is not None:
                return run
        raise AssertionError(f"{request.request_id} did not finish")

    def forget_prefixes(self) -> None:
        for _ in range(4000):
            if not self.llm.has_unfinished_requests():
                break
            self.llm.step()
        assert self.llm.reset_prefix_cache()

    def reserve(self, grant: pb.TransferGrant, prompt: Sequence[int]) -> None:
        hashed = token_hash(list(prompt))
        work = self.control.reserve(grant, prompt_tokens=len(prompt), token_hash=hashed, remaining_s=WAIT_S)
        self.actor.submit(work).result(WAIT_S)

    def pull(self, grant: pb.TransferGrant, prompt: Sequence[int], sender: TpEngine) -> Future[list[pb.PullResponse]]:
        return self.actor.submit(
            self.control.pull(
                grant,
                attempt_id="att-tp",
                senders=sender.control.endpoints,
                prompt_tokens=len(prompt),
                token_hash=token_hash(list(prompt)),
                transport="grpc",
                remaining_s=WAIT_S,
            )
        )

    def held(self) -> list[int]:
        """Bytes and transfers that each rank holds."""
        return [
            status.leases
            + status.sessions
            + sum(p.used_bytes + p.quarantined_bytes for p in (status.send, status.receive, status.pack))
            for status in self.actor.submit(self.control.status()).result(WAIT_S)
        ]
