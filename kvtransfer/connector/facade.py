"""The class that vLLM loads. It has no logic: each method hands its arguments to the half that this process runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvtransfer.connector import shim
from kvtransfer.connector.metrics import SplitpointPromMetrics
from kvtransfer.connector.scheduler import SchedulerHalf, StepPlan
from kvtransfer.connector.stats import Increments, SplitpointStats
from kvtransfer.connector.worker import CacheFacts, RankSettings, WorkerHalf


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's plan on its way from the scheduler to the ranks."""

    plan: StepPlan


class SplitpointConnector(KVConnectorBase_V1, SupportsHMA):
    """Staging to engine blocks and back, for vLLM 0.26 to 0.32, role `kv_both`.

    vLLM never learns of a transfer: sends are gathered within a step and never hold blocks, loads are synchronous. So none of
    its asynchronous reports, which it asserts on, is ever made; the only report is of blocks whose load failed.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        shim.check_version()
        self._spec = shim.require_single_full_attention_group(kv_cache_config)
        self.scheduler_half: SchedulerHalf | None = None
        self.worker_half: WorkerHalf | None = None
        self._increments = Increments()
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_half = SchedulerHalf(self._spec.block_size)
        else:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self.worker_half = WorkerHalf(RankSettings.from_extra_config(extra))

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what a preemption frees has been gathered by the step that computed it."""
        return False

    # Scheduler's process

    def on_new_request(self, request: Any) -> None:
        self._scheduler.started(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        plan = self._scheduler.plan_step(scheduler_output)
        if plan.scatters and not shim.loads_precede_forward(scheduler_output):
            raise RuntimeError("vLLM would load KV after the forward pass that reads it")
        return StepMetadata(plan)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._scheduler.finished(request)
        return False, None

    # Each rank's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        parallel, cache = self._vllm_config.parallel_config, self._vllm_config.cache_config
        first = next(iter(kv_caches.values()))
        self._worker.register(
            kv_caches,
            CacheFacts(
                num_blocks=self._kv_cache_config.num_blocks,
                block_tokens=self._spec.block_size,
                num_kv_heads=self._spec.num_kv_heads,
                head_dim=self._spec.head_size,
                cache_dtype=f"{cache.cache_dtype}:{first.dtype}",
                layout=shim.cache_layout(self._vllm_config, self._kv_cache_config, self._spec, first),
                rank=parallel.rank,
                world_size=parallel.world_size,
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
                place=shim.cache_place(self._vllm_config, self._kv_cache_config, self._spec, kv_caches),
            ),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._plan)

    def wait_for_save(self) -> None:
        self._worker.save(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are gathered in `wait_for_save`; this tells how far the forward pass is."""
        self._worker.computed(layer_name)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def shutdown(self) -> None:
        if self.worker_half is not None:
            self.worker_half.shutdown()

    # Statistics: both processes, then the one that logs

    def get_kv_connector_stats(self) -> SplitpointStats | None:
        """What this half has counted since the last call; None when nothing, which then costs no message."""
        if self.scheduler_half is not None:
            stats = SplitpointStats.of_scheduler(self._increments.take(self.scheduler_half.counters))
        else:
            stats = SplitpointStats.of_rank(self._worker.take_observations())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SplitpointStats:
        return SplitpointStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SplitpointPromMetrics:
        return SplitpointPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler_half is not None, "called in a rank's process"
        return self.scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker_half is not None, "called in the scheduler's process"
        return self.worker_half
