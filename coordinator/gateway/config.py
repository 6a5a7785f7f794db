"""Settings of one gateway, frozen. Composed into the whole configuration by `coordinator.config`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.routing.auto import AUTO, PATHS
from coordinator.routing.config import AutoPathSettings, RoutingSettings


class GatewaySettings(BaseModel):
    """Where one gateway listens and what it accepts. Port 0 means "any free port"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    http_host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_host: str = "127.0.0.1"
    grpc_port: int = Field(50051, ge=0, le=65535)
    admin_host: str = "127.0.0.1"
    admin_port: int = Field(50052, ge=0, le=65535)
    admin_http_host: str = "127.0.0.1"
    admin_http_port: int | None = Field(
        None, ge=0, le=65535, description="Scaling over HTTP, for autoscalers of Kubernetes and Ray Serve. None: not at all."
    )

    served_model_name: str | None = Field(None, description="None: the engine's own `served_model_name`.")
    default_path: Literal["split", "colocated", "auto"] = "split"
    default_deadline_s: PositiveFloat = Field(600.0, description="For requests that bring no deadline of their own.")
    max_deadline_s: PositiveFloat = Field(3600.0, description="A longer deadline is cut (gRPC) or refused (header).")
    retry_budget: NonNegativeInt = Field(2, description="Further routes one request may take, before and after its first token.")
    retry_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Further attempts, as a share of the requests of this gateway, that it may make in the long run.",
    )
    retry_reserve: NonNegativeInt = Field(
        256, description="Further attempts it may make at once: what one lost worker had running. 0: none at all."
    )
    allow_recompute: bool = Field(True, description="False: a transfer that fails is never replaced by computing on decode.")

    max_open_requests: PositiveInt = Field(4096, description="Public requests at once; beyond them one is refused unread.")
    max_body_bytes: PositiveInt = Field(16 * 1024 * 1024, description="HTTP request body.")
    grpc_max_receive_bytes: PositiveInt = 64 * 1024 * 1024
    max_choices: PositiveInt = Field(64, description="Choices of one request: its prompts times `n`.")
    max_logprobs: NonNegativeInt = Field(20, description="Alternatives per position.")
    max_stop_strings: PositiveInt = 16
    max_stop_chars: PositiveInt = Field(256, description="Characters of one stop string.")

    sse_keepalive_s: NonNegativeFloat = Field(15.0, description="Silence after which a stream gets an SSE comment; 0: never.")
    tokenize_inline_chars: NonNegativeInt = Field(
        8192, description="Longer texts are tokenised, and longer bodies checked, on a thread."
    )
    grpc_reflection: bool = True
    grpc_keepalive_min_ping_ms: PositiveInt = 10_000
    routing: RoutingSettings = RoutingSettings()
    auto: AutoPathSettings = AutoPathSettings()
    worker_client: WorkerClientSettings = WorkerClientSettings()
    drain_notice_s: NonNegativeFloat = Field(
        1.0, description="A gateway that drains still takes requests for so long, for balancers to see that it is not ready."
    )
    readiness_poll_s: PositiveFloat = Field(0.2, description="How often a health watch looks at the core.")

    @model_validator(mode="after")
    def _auto_has_a_model(self) -> GatewaySettings:
        if self.default_path == AUTO and self.auto.model_file is None:
            raise ValueError('auto.model_file is missing: default_path "auto" predicts from it')
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that a request may name."""
        return PATHS if self.auto.model_file is None else (*PATHS, AUTO)
