"""Settings of one engine, frozen. Composed into the whole configuration by `coordinator.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from kvtransfer.config import KvTransferSettings
from protos.ids import Incarnation


class SimulatedSettings(BaseModel):
    """The simulated engine's step-time model: step = a + b * new tokens + c * context tokens, seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_base_s: float = Field(0.005, ge=0)
    prefill_token_s: float = Field(20e-6, ge=0)
    decode_sequence_s: float = Field(0.2e-3, ge=0)
    context_token_s: float = Field(1e-9, ge=0)
    num_kv_blocks: PositiveInt = 2048
    block_bytes: PositiveInt = 4096
    vocab_size: PositiveInt = 32000
    eos_token_id: NonNegativeInt | None = Field(2, description="None: the model never ends by itself.")
    time_scale: float = Field(1.0, gt=0, description="Model seconds are multiplied by this before they are slept.")


class EngineSettings(BaseModel):
    """`max_num_batched_tokens`, `max_num_seqs` and `max_model_len` are always explicit: vLLM's defaults depend on which
    devices the process happens to see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["vllm", "simulated"] = "vllm"
    model_path: Path = Path("models/smollm2-135m-instruct")
    served_model_name: str = "smollm2-135m-instruct"
    dtype: str = "bfloat16"
    max_model_len: PositiveInt = 4608
    max_num_batched_tokens: PositiveInt = 256
    max_num_seqs: PositiveInt = 16
    block_tokens: PositiveInt | None = Field(None, description="None: the backend's own block size.")
    kv_cache_bytes: PositiveInt | None = Field(None, description="None: the engine's own measure of free memory.")
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    enable_prefix_caching: bool = True
    load_format: str = "auto"
    seed: int = 0
    omp_threads: PositiveInt = Field(1, description="CPU only: threads of one rank's forward pass.")
    nice: int = Field(
        0,
        ge=0,
        le=19,
        description="Niceness of vLLM's processes once they run. Above 0 all else that serves comes first on a host whose cores "
        "engines keep busy.",
    )
    start_timeout_s: float = Field(300.0, gt=0)
    extra_arguments: dict[str, Any] = Field(default_factory=dict, description="Passed to vLLM's AsyncEngineArgs as they are.")
    simulated: SimulatedSettings = SimulatedSettings()

    @property
    def world_size(self) -> int:
        """Ranks of one engine: one placement-group bundle each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEngineConfig:
    """What an engine's ranks need to run their transfer nodes. Not configuration of the user's: the worker actor fills it
    at start. `None` in its place means an engine without KV transfer.

    `register_address` (host:port) is where a rank calls `WorkerService.RegisterRank`; `control_token` guards that call and
    every control call back to the node. `model_hash` and `tokenizer_hash` enter `KvCompatibility` as they are.
    """

    settings: KvTransferSettings
    incarnation: Incarnation
    control_token: str = field(repr=False)
    register_address: str
    model_hash: str
    tokenizer_hash: str
