"""vLLM behind the engine protocol, CPU and GPU builds, 0.26 to 0.32. Import it only where an engine is started."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from multiprocessing import resource_tracker
from typing import Any

import psutil
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import exceptions as vllm_exceptions
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase

from engine.config import EngineSettings, KvEngineConfig
from engine.niceness import make_nice
from engine.protocol import EngineDeadError, EngineInfo, EngineLoad, EngineOutput, EngineRequest
from engine.sampling import SamplingParams as RequestParams
from engine.vllm_convert import check_prompt, engine_output, plain_arguments, sampling_arguments
from kvtransfer import connector
from kvtransfer.connector.shim import vllm_version
from kvtransfer.connector.worker import RankSettings

logger = logging.getLogger(__name__)

GIB = 1024**3
CPU_KV_CACHE_BYTES = 1 * GIB
"""On a CPU vLLM's own measure would take nearly all of the host's memory, so the default is a size."""

_environment_lock = threading.Lock()


class _LoadLogger(StatLoggerBase):
    """Keeps the scheduler's last numbers; vLLM calls it once per engine step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is None:
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
        self.kv_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None: ...


class VllmEngine:
    """One `AsyncLLM` with the connector loaded (unless `kv` is None). See `engine.protocol.Engine` for the contract.

    vLLM runs in child processes, always spawned: the parent may hold gRPC and UCX threads, which do not survive a fork.
    """

    def __init__(self, settings: EngineSettings, kv: KvEngineConfig | None) -> None:
        self._settings = settings
        self._kv = kv
        self._llm: AsyncLLM | None = None
        self._load = _LoadLogger(None)
        self._live = 0
        self._children: list[psutil.Process] = []

    async def start(self) -> EngineInfo:
        """Spawn, load, register every rank's node, and run two tokens through.

        Raises:
            TimeoutError: not ready within `start_timeout_s`; what was spawned is gone.
            RuntimeError, ValueError: vLLM's own reasons; what was spawned is gone.
        """
        arguments = engine_arguments(self._settings)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        # In a thread: the ranks call back into this process's event loop to register before the constructor returns.
        constructing = asyncio.ensure_future(asyncio.to_thread(self._construct, arguments))
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                self._llm = await asyncio.shield(constructing)
                # The first call from this loop also starts watching for the engine core's death.
                await self._engine().get_supported_tasks()
                await self._warm_up()
        except BaseException:
            self._children = _new_children(before)
            await asyncio.to_thread(_kill, self._children)
            with contextlib.suppress(Exception):
                # Its children are dead, so the constructor fails soon; a thread cannot be cancelled.
                async with asyncio.timeout(30.0):
                    self._llm = await constructing
            await self.stop()
            raise
        self._children = _new_children(before)
        if self._settings.nice:
            make_nice(self._children, self._settings.nice)
        config = self._engine().vllm_config
        return EngineInfo(
            model=self._settings.served_model_name,
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_tokens=config.cache_config.block_size,
            num_kv_blocks=config.cache_config.num_gpu_blocks or 0,
            world_size=self._settings.world_size,
            start_arguments={"vllm_version": vllm_version(), **plain_arguments(arguments)},
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request; see the protocol. Prompt and limits are checked by vLLM before anything is queued."""
        llm = self._engine()
        model = llm.model_config
        check_prompt(request, max_model_len=model.max_model_len, vocab_size=model.get_vocab_size())
        params = self._sampling_params(request)
        # "type" marks a prompt as processed already; releases that know no such mark ignore it.
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        request_id = str(request.request_id)
        called_s = time.monotonic()
        outputs: AsyncGenerator[Any, None] = llm.generate(prompt, params, request_id)
        finished = False
        first = True
        self._live += 1
        try:
            async for output in outputs:
                finished = output.finished
                yield engine_output(output, first=first, called_s=called_s, read_s=time.monotonic())
                first = False
        except vllm_exceptions.EngineDeadError as error:
            finished = True
            raise EngineDeadError("the vLLM engine core is dead") from error
        except vllm_exceptions.EngineGenerateError as error:
            if llm.errored:
                finished = True
                raise EngineDeadError("the vLLM engine core is dead") from error
            raise
        except Exception as error:
            finished = True
            if _is_refusal(error):
                raise ValueError(_refusal_text(error)) from error
            raise
        finally:
            self._live -= 1
            await outputs.aclose()
            if not finished and not llm.errored:
                # vLLM aborts only what its own generator had already received; a cancellation in between left it running.
                await llm.abort(request_id)

    def load(self) -> EngineLoad:
        """The last step's numbers, which cannot exceed what is live now: an idle engine takes no step and reports nothing."""
        running = min(self._load.running, self._live)
        return EngineLoad(
            running=running,
            waiting=self._live - running,
            kv_usage=self._load.kv_usage if self._live else 0.0,
        )

    async def reset_prefix_cache(self) -> bool:
        """See the protocol."""
        return bool(await self._engine().reset_prefix_cache())

    async def check_health(self) -> None:
        """See the protocol."""
        llm = self._engine()
        if llm.errored:
            raise EngineDeadError("the vLLM engine core is dead")

    async def stop(self) -> None:
        """See the protocol. Children that outlive vLLM's own shutdown are killed."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        children, self._children = self._children, []
        await asyncio.to_thread(_kill, children, 5.0)

    def _construct(self, arguments: dict[str, Any]) -> AsyncLLM:
        extra: dict[str, Any] = {}
        if self._kv is not None:
            extra["kv_transfer_config"] = self._transfer_config(self._kv)
        with _environment(child_environment(self._settings)):
            args = AsyncEngineArgs(**arguments, **extra)
            return AsyncLLM.from_engine_args(args, stat_loggers=[self._make_load_logger])

    def _make_load_logger(self, vllm_config: Any, engine_index: int = 0) -> _LoadLogger:
        return self._load

    def _transfer_config(self, kv: KvEngineConfig) -> KVTransferConfig:
        ranks = RankSettings(
            settings=kv.settings,
            incarnation=kv.incarnation,
            control_token=kv.control_token,
            register_address=kv.register_address,
            model=self._settings.served_model_name,
            model_hash=kv.model_hash,
            tokenizer_hash=kv.tokenizer_hash,
        )
        return KVTransferConfig(
            kv_connector=connector.CLASS_NAME,
            kv_connector_module_path=connector.MODULE_PATH,
            kv_role="kv_both",
            kv_connector_extra_config=ranks.to_extra_config(),
            # A load cannot fail unless we have a fault; then the request must fail, not quietly cost a prefill.
            kv_load_failure_policy="fail",
        )

    async def _warm_up(self) -> None:
        # With log-probabilities: ranking them compiles a kernel, which no client should wait for.
        request = EngineRequest(
            request_id="warm-up",
            prompt_token_ids=[0] * min(8, self._settings.max_model_len - 2),
            sampling=RequestParams(max_tokens=2, ignore_eos=True, temperature=0.0, logprobs=1, prompt_logprobs=1),
        )
        async for _ in self.generate(request):
            pass
        await self.reset_prefix_cache()

    def _sampling_params(self, request: EngineRequest) -> SamplingParams:
        arguments = sampling_arguments(request)
        try:
            structured = arguments.pop("structured_outputs", None)
            if structured is not None:
                arguments["structured_outputs"] = StructuredOutputsParams(**structured)
            return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        except Exception as error:
            if _is_refusal(error):
                raise ValueError(_refusal_text(error)) from error
            raise

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDeadError("the engine is not running")
        return self._llm


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`, without the connector's. The three limits are always explicit: vLLM's defaults
    depend on which devices the calling process sees. `extra_arguments` win."""
    arguments: dict[str, Any] = {
        "model": str(settings.model_path),
        "served_model_name": settings.served_model_name,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "load_format": settings.load_format,
        "seed": settings.seed,
        # vLLM's own loggers are off; ours still gets the numbers.
        "disable_log_stats": True,
    }
    if settings.block_tokens is not None:
        arguments["block_size"] = settings.block_tokens
    if current_platform.is_cpu() and settings.world_size == settings.omp_threads == 1:
        # As on a GPU, one rank computes inside the engine core: one process less to start and to kill, and no core that polls
        # shared memory while its rank computes. vLLM gives a CPU rank its own process only to bind OpenMP's threads to cores,
        # which matters with more than one. A class, since vLLM turns the name "uni" back into "mp" on a CPU.
        arguments["distributed_executor_backend"] = UniProcExecutor
    kv_cache_bytes = settings.kv_cache_bytes
    if current_platform.is_cpu():
        # Compiling for a CPU takes minutes and a C++ compiler, and gains about a third of a decode step of a small model.
        arguments["enforce_eager"] = True
        if kv_cache_bytes is None:
            kv_cache_bytes = CPU_KV_CACHE_BYTES
            logger.info("engine.kv_cache_bytes is not set; on a CPU it is %d", kv_cache_bytes)
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    return arguments | settings.extra_arguments


def child_environment(settings: EngineSettings) -> dict[str, str]:
    """Variables of the engine's processes, beside what this process has."""
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
    if current_platform.is_cpu():
        wanted["OMP_NUM_THREADS"] = str(settings.omp_threads)
        # vLLM would bind every engine of this host to the same first cores.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if settings.extra_arguments.get("enforce_eager", True):
            # vLLM compiles a few helpers even in eager mode.
            wanted["TORCHDYNAMO_DISABLE"] = "1"
        kv_cache_bytes = settings.kv_cache_bytes or CPU_KV_CACHE_BYTES
        if tuple(int(part) for part in vllm_version().split(".")[:2]) < (0, 32):
            # Before 0.32 the CPU build reads its cache size only here, in whole GiB.
            wanted["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(kv_cache_bytes / GIB))
    elif importlib.util.find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return wanted


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables while children are spawned. The environment is the process's, so one engine starts at a time."""
    with _environment_lock:
        previous = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _is_refusal(error: BaseException) -> bool:
    """Whether vLLM refuses the request itself. 0.32 has a class for it that is no `ValueError`; earlier releases have not."""
    return isinstance(error, ValueError) or any(cls.__name__ == "VLLMClientError" for cls in inspect.getmro(type(error)))


def _refusal_text(error: BaseException) -> str:
    parameter = getattr(error, "parameter", None)
    text = str(error)
    return f"{parameter}: {text}" if parameter and parameter not in text else text


def _new_children(before: set[int]) -> list[psutil.Process]:
    # Spawning also starts this process's resource tracker, which serves all of its children and ends with it.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in before and child.pid != tracker]


def _kill(children: list[psutil.Process], grace_s: float = 0.0) -> None:
    """Kill those that are still running after `grace_s`."""
    _, alive = psutil.wait_procs(children, timeout=grace_s)
    for child in alive:
        logger.warning("killing vLLM's process %d, which outlived its shutdown", child.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=5.0)
