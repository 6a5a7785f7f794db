"""What both front ends of a gateway share: settings, tokenizer, the served model, hooks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.tokenizer import TextTokenizer
from coordinator.gateway.validate import TRANSPORTS, Limits
from protos.errors import Code, SplitpointError


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


class Door:
    """Bounds the public requests that are open at once, over both front ends together: each holds its body and its prompt."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.open_requests = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, one more request is open. Raises `SplitpointError(QUEUE_FULL)` instead of letting in too many."""
        if self.open_requests >= self._most:
            raise SplitpointError(
                Code.QUEUE_FULL,
                f"{self.open_requests} requests are open at this gateway, max_open_requests is {self._most}",
                retry_after_s=1.0,
            )
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Everything that `build_http_app` and `build_grpc_server` need beside the core.

    `manifest` returns the run manifest; GET /version shows its `versions`. Setting `draining` makes this gateway unready, so
    that balancers go elsewhere; requests that still come are served until the ports are closed.
    """

    settings: GatewaySettings
    tokenizer: TextTokenizer
    model: ServedModel
    metrics: FrontEndMetrics = field(default_factory=NoMetrics)
    manifest: Callable[[], Mapping[str, Any]] = no_manifest
    transports: tuple[str, ...] = TRANSPORTS
    """Those that a request may name."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    door: Door = field(init=False)
    key_names: Mapping[str, str] = field(init=False)
    """Of the API keys that have an objective of their own, by SHA-256."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "door", Door(self.settings.max_open_requests))
        object.__setattr__(self, "key_names", self.settings.auto.key_names)

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
