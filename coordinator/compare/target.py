"""Which client a target means: `HOST:PORT` is a gateway's gRPC address, `http://HOST:PORT` an OpenAI server."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.compare.http_client import SCHEMES, HttpClient
from coordinator.compare.load import ArmTarget, GrpcClient


def connect(
    target: str, *, model: str = "", api_key: str = "", arms: Mapping[str, ArmTarget] | None = None
) -> GrpcClient | HttpClient:
    """The client of a target; it connects when it is first used. Use it as an async context manager."""
    kind = HttpClient if target.startswith(SCHEMES) else GrpcClient
    return kind(target, model=model, api_key=api_key, arms=arms)
