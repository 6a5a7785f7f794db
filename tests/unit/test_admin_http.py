"""Scaling over HTTP: Kubernetes' Scale, Ray Serve's path, and every refusal with its status, field and limit."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.pools import admin
from coordinator.pools.admin_http import MAX_BODY_BYTES, SCALE_PATH, SERVE_PATH, build_admin_app
from coordinator.pools.autoscale_policy import AutoscalePolicy
from protos.splitpoint.v1 import admin_pb2
from tests.unit.test_autoscaler import Coordinator

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()
PREFILL = SCALE_PATH.format(pool="prefill")
SERVE = SERVE_PATH.format(application="splitpoint", deployment="decode")
MERGE = {"content-type": "application/merge-patch+json"}


class Backend:
    """The coordinator's part of `AdminBackend`; `away` makes it a coordinator that does not answer."""

    def __init__(self, made: Coordinator) -> None:
        self.made = made
        self.away = False

    async def status(self) -> admin_pb2.GetStatusResponse:
        self._answer()
        pools = [admin.pool_status(target, {}, (), 0, "") for target in self.made.pools.targets]
        for pool in pools:
            pool.ready, pool.starting, pool.draining = 1, 1, 4
        return admin_pb2.GetStatusResponse(pools=pools, version=self.made.pools.present.version)

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        self._answer()
        self.made.scaler.check_operator(request)
        expected = request.expected_version if request.HasField("expected_version") else None
        target, _ = self.made.pools.scale(request.pool, request.replicas, expected=expected, dry_run=request.dry_run)
        status = admin.pool_status(target, {}, (), 0, "")
        return admin_pb2.ScalePoolResponse(pool=status, version=self.made.pools.present.version)

    def _answer(self) -> None:
        if self.away:
            raise admin.unavailable("TimeoutError")


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    made = Coordinator(tmp_path)
    yield Backend(made)
    made.store.close()


@pytest.fixture
async def client(backend: Backend) -> AsyncIterator[httpx.AsyncClient]:
    app = build_admin_app(backend, model="tiny/model", host="127.0.0.1")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:50053") as made:
        yield made


def scale_of(replicas: int, version: str | None = None) -> dict[str, Any]:
    metadata = {"name": "prefill"} | ({"resourceVersion": version} if version else {})
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": {"replicas": replicas}}


async def test_the_scale_of_a_pool_is_read_replaced_and_patched(client: httpx.AsyncClient, backend: Backend) -> None:
    first = (await client.get(PREFILL)).json()
    version = first["metadata"]["resourceVersion"]
    assert first == {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {"name": "prefill", "resourceVersion": version},
        "spec": {"replicas": 1},
        "status": {"replicas": 2, "selector": "pool=prefill"},
    }
    put = await client.put(PREFILL, json={**first, "spec": {"replicas": 3}})
    assert (put.status_code, put.json()["spec"]) == (200, {"replicas": 3})
    assert int(put.json()["metadata"]["resourceVersion"]) > int(version)
    patched = await client.patch(PREFILL, content='{"spec": {"replicas": 2}}', headers=MERGE)
    assert (patched.status_code, patched.json()["spec"]) == (200, {"replicas": 2})
    assert backend.made.replicas("prefill") == 2
    nothing = await client.patch(PREFILL, content="{}", headers=MERGE)
    assert nothing.json()["metadata"] == patched.json()["metadata"]


async def test_a_stale_version_is_409_and_changes_nothing(client: httpx.AsyncClient, backend: Backend) -> None:
    version = (await client.get(PREFILL)).json()["metadata"]["resourceVersion"]
    backend.made.pools.scale("decode", 3)  # somebody else's
    stale = {"metadata": {"resourceVersion": version}}
    for reply in (
        await client.put(PREFILL, json=scale_of(4, version)),
        await client.patch(PREFILL, content=f'{{"metadata": {{"resourceVersion": "{version}"}}}}', headers=MERGE),
        await client.request("PATCH", PREFILL, json={**stale, "spec": {"replicas": 4}}, headers=MERGE),
    ):
        said = reply.json()
        assert (reply.status_code, said["kind"], said["reason"]) == (409, "Status", "Conflict")
        assert "look again and repeat" in said["message"]
    assert backend.made.replicas("prefill") == 1
    assert (await client.put(PREFILL, json=scale_of(4))).status_code == 200, "who names no version has seen none"


async def test_a_dry_run_answers_what_would_be_and_changes_nothing(client: httpx.AsyncClient, backend: Backend) -> None:
    reply = await client.put(PREFILL, params={"dryRun": "All"}, json=scale_of(7))
    assert (reply.status_code, reply.json()["spec"]["replicas"], backend.made.replicas("prefill")) == (200, 7, 1)


async def test_ray_serves_external_scaler_path(client: httpx.AsyncClient, backend: Backend) -> None:
    for application, replicas in (("splitpoint", 3), ("tiny/model", 4)):
        path = SERVE_PATH.format(application=application, deployment="decode")
        reply = await client.post(path, json={"target_num_replicas": replicas})
        assert (reply.status_code, "asynchronously" in reply.json()["message"]) == (200, True)
        assert backend.made.replicas("decode") == replicas


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "field", "said"),
    [
        ("PUT", PREFILL, {"spec": {"replicas": -1}}, 400, "spec.replicas", "an integer, 0 to 4096, got -1"),
        ("PUT", PREFILL, {"spec": {"replicas": 4097}}, 400, "spec.replicas", "0 to 4096, got 4097"),
        ("PUT", PREFILL, {"spec": {"replicas": "3"}}, 400, "spec.replicas", "got '3'"),
        ("PUT", PREFILL, {"spec": {"replicas": True}}, 400, "spec.replicas", "got True"),
        ("PUT", PREFILL, {"spec": {"replicas": 1.5}}, 400, "spec.replicas", "got 1.5"),
        ("PUT", PREFILL, {}, 400, "spec.replicas", "is missing"),
        ("PUT", PREFILL, {"spec": 3}, 400, "spec", "must be an object"),
        ("PUT", PREFILL, [], 400, "body", "must be a JSON object"),
        ("PUT", PREFILL, {**scale_of(2), "kind": "Pod"}, 400, "kind", "'Scale', got 'Pod'"),
        ("PUT", PREFILL, {**scale_of(2), "apiVersion": "v2"}, 400, "apiVersion", "'autoscaling/v1'"),
        ("PUT", PREFILL, {**scale_of(2), "metadata": {"name": "decode"}}, 400, "metadata.name", "got 'decode'"),
        ("PUT", PREFILL, scale_of(2, "x1"), 400, "metadata.resourceVersion", "got 'x1'"),
        ("PUT", PREFILL, scale_of(2, "9" * 30), 400, "metadata.resourceVersion", "got '999"),
        ("PUT", PREFILL + "?dryRun=Some", scale_of(2), 400, "dryRun", "'All', got 'Some'"),
        ("PUT", SCALE_PATH.format(pool="x"), {"spec": {"replicas": 1}}, 404, "pool", "pools: prefill, decode"),
        ("GET", SCALE_PATH.format(pool="x"), None, 404, "pool", "no pool 'x'; pools: prefill, decode"),
        ("GET", "/apis/splitpoint/v1/pools", None, 404, "", "Not Found"),
        ("DELETE", PREFILL, None, 405, "", "Method Not Allowed"),
        ("POST", SERVE, {"target_num_replicas": -1}, 400, "", "target_num_replicas must be an integer, 0 to 4096"),
        ("POST", SERVE, {}, 400, "", "target_num_replicas is missing"),
        ("POST", SERVE.replace("splitpoint", "other"), {"target_num_replicas": 1}, 404, "", "'splitpoint' or 'tiny/model'"),
        ("POST", SERVE.replace("decode", "x"), {"target_num_replicas": 1}, 404, "", "no pool 'x'"),
    ],
)
async def test_a_bad_request_names_the_field_and_the_limit(
    client: httpx.AsyncClient, backend: Backend, method: str, path: str, body: Any, code: int, field: str, said: str
) -> None:
    before = backend.made.pools.present.version
    reply = await client.request(method, path, json=body)
    answer = reply.json()
    assert (reply.status_code, backend.made.pools.present.version) == (code, before)
    if path.startswith("/api/"):
        assert said in answer["error"]
        return
    assert (answer["kind"], answer["status"], answer["code"]) == ("Status", "Failure", code)
    assert said in answer["message"]
    assert [cause["field"] for cause in answer["details"].get("causes", [])] == ([field] if field else [])


@pytest.mark.parametrize("raw", [b"", b"{", b'{"spec": ' * 200_000, b"\xff"])
async def test_what_is_not_json_is_refused(client: httpx.AsyncClient, raw: bytes) -> None:
    reply = await client.put(PREFILL, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == (413 if len(raw) > MAX_BODY_BYTES else 400)


async def test_an_autoscaled_pool_is_not_an_outside_scalers(client: httpx.AsyncClient, backend: Backend) -> None:
    backend.made.set("prefill", **{"max_replicas": AutoscalePolicy(max_replicas=4).max_replicas})
    reply = await client.put(PREFILL, json=scale_of(3))
    assert (reply.status_code, reply.json()["reason"]) == (409, "Conflict")
    assert "prefill is autoscaled, 1 to 4 workers" in reply.json()["message"]
    again = await client.post(SERVE.replace("decode", "prefill"), json={"target_num_replicas": 3})
    assert (again.status_code, "autoscaled" in again.json()["error"]) == (409, True)
    assert backend.made.replicas("prefill") == 1


async def test_without_the_coordinator_it_is_503_and_says_when_to_come_again(client: httpx.AsyncClient, backend: Backend) -> None:
    backend.away = True
    for reply in (
        await client.get(PREFILL),
        await client.put(PREFILL, json=scale_of(2)),
        await client.post(SERVE, json={"target_num_replicas": 2}),
    ):
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        assert "does not answer" in reply.text


async def test_a_fault_of_ours_is_500_with_an_id_and_no_more(
    client: httpx.AsyncClient, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(backend, "status", broken)
    reply = await client.get(PREFILL)
    assert (reply.status_code, reply.json()["message"].startswith("internal error ")) == (500, True)
    assert "secret" not in reply.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/json-patch+json"])
async def test_a_web_page_cannot_send_a_change(client: httpx.AsyncClient, backend: Backend, content_type: str) -> None:
    """Those are the types that a browser sends to another site without asking it first; of a patch too only one kind is known."""
    headers = {"content-type": content_type} if content_type else {}
    for method, path in (("PUT", PREFILL), ("PATCH", PREFILL), ("POST", SERVE)):
        reply = await client.request(method, path, content='{"spec":{"replicas":2},"target_num_replicas":2}', headers=headers)
        assert reply.status_code == 415
    assert (backend.made.replicas("prefill"), backend.made.replicas("decode")) == (1, 2)


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("127.0.0.1", "localhost:50053", 200),
        ("127.0.0.1", "[::1]:50053", 200),
        ("127.0.0.1", "evil.example:50053", 421),
        ("10.0.0.1", "splitpoint.internal:50053", 200),
    ],
)
async def test_a_name_that_leads_to_loopback_is_not_answered(backend: Backend, bound: str, host: str, status: int) -> None:
    app = build_admin_app(backend, model="m", host=bound)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.get(PREFILL, headers={"host": host})).status_code == status


async def test_the_calls_of_the_guide_are_answered(client: httpx.AsyncClient) -> None:
    shown = re.findall(r"^curl .*127\.0\.0\.1:50053.*$", GUIDE, re.MULTILINE)
    assert len(shown) == 3
    for line in shown:
        words = shlex.split(line)
        options = dict(zip(words[1::2], words[2::2], strict=False))
        name, _, value = options.get("-H", "").partition(": ")
        path = words[-1].removeprefix("http://127.0.0.1:50053")
        reply = await client.request(
            options.get("-X", "GET"), path, content=options.get("-d"), headers={name: value} if name else {}
        )
        assert reply.status_code == 200, (line, reply.text)
