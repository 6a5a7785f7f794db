"""What both front ends of a gateway share: settings, tokenizer, the served model, hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.tokenizer import TextTokenizer
from coordinator.gateway.validate import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model behind this gateway. `vocab_size` is the model's, `created_s` Unix seconds."""

    id: str
    root: str
    max_model_len: int
    vocab_size: int
    created_s: int


class FrontEndMetrics(Protocol):
    """Where front ends report. Neither method may raise (rule 11)."""

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of GET /metrics."""

    def request_ended(self, *, front: str, endpoint: str, code: str) -> None:
        """One public request ended. `front` is "http" or "grpc"; `code` an error code, or "ok"."""


class NoMetrics:
    """For a gateway without metrics, in tests."""

    def exposition(self) -> tuple[bytes, str]:
        return b"", "text/plain; version=0.0.4; charset=utf-8"

    def request_ended(self, *, front: str, endpoint: str, code: str) -> None:
        del front, endpoint, code


def no_manifest() -> Mapping[str, Any]:
    """The run manifest of a gateway that has none."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Everything that `build_http_app` and `build_grpc_server` need beside the core.

    `manifest` returns the run manifest; GET /version shows its `versions`. Setting `draining` makes this gateway unready, so
    that balancers go elsewhere; requests that still come are served until the servers stop.
    """

    settings: GatewaySettings
    tokenizer: TextTokenizer
    model: ServedModel
    metrics: FrontEndMetrics = field(default_factory=NoMetrics)
    manifest: Callable[[], Mapping[str, Any]] = no_manifest
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def limits(self) -> Limits:
        """The bounds that requests are checked against."""
        return Limits(
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            max_choices=self.settings.max_choices,
            max_logprobs=self.settings.max_logprobs,
            max_stop_strings=self.settings.max_stop_strings,
            max_stop_chars=self.settings.max_stop_chars,
        )
