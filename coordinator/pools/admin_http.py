"""Scaling over HTTP, for autoscalers that exist: Kubernetes' Scale resource and Ray Serve's external-scaler path.

On a port of its own (`gateway.admin_http_port`), as open as the gRPC admin port beside it and never on the public one.
Changes need a JSON content type, and on loopback a local `Host`, so that a web page cannot make them through the browser of
whoever sits there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.gateway.faults import internal_error
from coordinator.pools.admin import MAX_REPLICAS, AdminBackend
from kvtransfer.addresses import is_loopback
from protos.errors import Code, SplitpointError, invalid
from protos.splitpoint.v1 import admin_pb2

SCALE_PATH = "/apis/splitpoint/v1/pools/{pool}/scale"
SERVE_PATH = "/api/v1/applications/{application}/deployments/{deployment}/scale"
MAX_BODY_BYTES = 65_536
MERGE_PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")

_REASONS = {400: "BadRequest", 404: "NotFound", 405: "MethodNotAllowed", 409: "Conflict", 413: "RequestEntityTooLarge"}
_REASONS |= {415: "UnsupportedMediaType", 421: "MisdirectedRequest", 500: "InternalError", 503: "ServiceUnavailable"}


def build_admin_app(backend: AdminBackend, *, model: str, host: str) -> ASGIApp:
    """The ASGI application. `model` is the name under which the served model is a Ray Serve application too; `host` is what the
    port is bound to."""
    api = _Api(backend, model, local=is_loopback(host))
    return Starlette(
        routes=[
            Route(SCALE_PATH, api.scale, methods=["GET", "PUT", "PATCH"]),
            # A model's name may have slashes.
            Route(SERVE_PATH.replace("{application}", "{application:path}"), api.serve_scale, methods=["POST"]),
        ],
        exception_handlers={SplitpointError: _refused, HTTPException: _not_routed, Exception: _failed},
    )


class _Api:
    def __init__(self, backend: AdminBackend, model: str, *, local: bool) -> None:
        self._backend = backend
        self._applications = ("splitpoint", model)
        self._local = local

    async def scale(self, request: Request) -> Response:
        """GET, PUT or PATCH of the Scale of one pool."""
        self._check_host(request)
        pool = request.path_params["pool"]
        if request.method == "GET":
            return JSONResponse(await self._present(pool))
        body = await _json(request, ("application/json",) if request.method == "PUT" else MERGE_PATCHES)
        version = _checked_metadata(body, pool)
        spec = _object(body, "spec")
        if "replicas" not in spec and request.method == "PATCH":
            present = await self._present(pool)
            if version is not None and present["metadata"]["resourceVersion"] != str(version):
                raise _stale(present["metadata"]["resourceVersion"], version)
            return JSONResponse(present)
        scaled = await self._backend.scale(
            admin_pb2.ScalePoolRequest(
                pool=pool,
                replicas=_replicas(spec, "replicas", "spec.replicas"),
                expected_version=version,
                dry_run=_dry_run(request),
            )
        )
        return JSONResponse(_scale_of(scaled.pool, scaled.version))

    async def serve_scale(self, request: Request) -> Response:
        """Ray Serve's: answers at once, the workers follow."""
        self._check_host(request)
        body = await _json(request, ("application/json",))
        application = request.path_params["application"]
        if application not in self._applications:
            known = " or ".join(repr(name) for name in self._applications)
            raise SplitpointError(Code.NOT_FOUND, f"no application {application!r}: it is {known}", param="application")
        replicas = _replicas(body, "target_num_replicas", "target_num_replicas")
        await self._backend.scale(admin_pb2.ScalePoolRequest(pool=request.path_params["deployment"], replicas=replicas))
        return JSONResponse({"message": "Scaling request received. Deployment will get scaled asynchronously."})

    async def _present(self, pool: str) -> dict[str, Any]:
        status = await self._backend.status()
        for found in status.pools:
            if found.name == pool:
                return _scale_of(found, status.version)
        known = ", ".join(p.name for p in status.pools)
        raise SplitpointError(Code.NOT_FOUND, f"no pool {pool!r}; pools: {known}", param="pool")

    def _check_host(self, request: Request) -> None:
        """A name that leads here from a web page is not the name by which this port is reached."""
        name = request.url.hostname or ""
        if self._local and not is_loopback(name):
            raise HTTPException(421, f"host {name!r} is not this machine's: this port is bound to loopback")


def _scale_of(pool: admin_pb2.PoolStatus, version: int) -> dict[str, Any]:
    """`status.replicas` are the workers that serve or start; those that drain do not count, as terminating pods do not."""
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {"name": pool.name, "resourceVersion": str(version)},
        "spec": {"replicas": pool.target},
        "status": {"replicas": pool.ready + pool.starting, "selector": f"pool={pool.name}"},
    }


# What comes in ------------------------------------------------------------------------------------------------------------


async def _json(request: Request, content_types: tuple[str, ...]) -> dict[str, Any]:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in content_types:
        wanted = " or ".join(content_types)
        raise HTTPException(415, f"content-type must be {wanted}, got {given!r}", {"accept": ", ".join(content_types)})
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise SplitpointError(Code.BODY_TOO_LARGE, f"body must be at most {MAX_BODY_BYTES} bytes", param="body")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise invalid("body", f"body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid("body", f"body must be a JSON object, got {type(body).__name__}")
    return body


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(name, f"{name} must be an object, got {type(value).__name__}")
    return value


def _checked_metadata(body: Mapping[str, Any], pool: str) -> int | None:
    """The version that the caller has seen; None when it does not say."""
    for name, wanted in (("kind", "Scale"), ("apiVersion", "autoscaling/v1")):
        if body.get(name, wanted) != wanted:
            raise invalid(name, f"{name} must be {wanted!r}, got {body[name]!r}")
    metadata = _object(body, "metadata")
    if metadata.get("name", pool) != pool:
        raise invalid("metadata.name", f"metadata.name must be {pool!r} as in the path, got {metadata['name']!r}")
    version = metadata.get("resourceVersion")
    if version in (None, ""):
        return None
    if not isinstance(version, str) or not version.isascii() or not version.isdigit() or int(version) >= 1 << 64:
        raise invalid("metadata.resourceVersion", f"metadata.resourceVersion must be one that was read here, got {version!r}")
    return int(version)


def _replicas(body: Mapping[str, Any], name: str, path: str) -> int:
    if name not in body:
        raise invalid(path, f"{path} is missing: an integer, 0 to {MAX_REPLICAS}")
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_REPLICAS:
        raise invalid(path, f"{path} must be an integer, 0 to {MAX_REPLICAS}, got {value!r}")
    return value


def _dry_run(request: Request) -> bool:
    given = request.query_params.get("dryRun", "")
    if given not in ("", "All"):
        raise invalid("dryRun", f"dryRun must be 'All', got {given!r}")
    return given == "All"


def _stale(present: str, seen: int) -> SplitpointError:
    message = f"the desired pools are at version {present}, not {seen}: look again and repeat"
    return SplitpointError(Code.CONFLICT, message, param="metadata.resourceVersion")


# What goes out when it is refused -------------------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, SplitpointError)
    headers = {}
    if error.status.http == 503:
        headers["retry-after"] = str(math.ceil(error.retry_delay_s))
    return _failure(request, error.status.http, error.message, error.param, headers)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _failure(request, error.status_code, str(error.detail), "", dict(error.headers or {}))


async def _failed(request: Request, error: Exception) -> Response:
    return _failure(request, 500, internal_error(error, f"{request.method} {request.url.path}").message, "", {})


def _failure(request: Request, code: int, message: str, field: str, headers: Mapping[str, str]) -> Response:
    """Kubernetes' Status; under Ray Serve's path its own form."""
    if request.url.path.startswith("/api/v1/"):
        return JSONResponse({"error": message}, status_code=code, headers=headers)
    details: dict[str, Any] = {"kind": "pools", "name": request.path_params.get("pool", "")}
    if field:
        details["causes"] = [{"field": field, "message": message}]
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}
    body |= {"reason": _REASONS.get(code, ""), "details": details}
    return JSONResponse(body, status_code=code, headers=headers)
