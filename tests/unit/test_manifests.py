"""The cluster manifests of `deploy/`: valid by schema, their parts fit together, their configuration is one that `serve` takes.

Ray's schema of a cluster file is the installed Ray's own. KubeRay's CRD is in no package that is installed here:
`kuberay_schema.json` is the subset that the manifest uses, closed, so that a misspelt field is refused.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from coordinator.config import Settings, load
from coordinator.pools.reach import loopback_settings

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "deploy" / "kuberay" / "raycluster.yaml"
RAY = ROOT / "deploy" / "ray" / "cluster.yaml"
SERVED = ROOT / "deploy" / "ray" / "splitpoint.toml"
SCHEMA = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())


def documents() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(KUBERAY.read_text())}


def pods(cluster: Any) -> list[Any]:
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def containers(cluster: Any) -> list[Any]:
    return [container for pod in pods(cluster) for container in pod["containers"]]


def parsed(text: str, tmp_path: Path) -> Settings:
    file = tmp_path / "splitpoint.toml"
    file.write_text(text)
    return load(file, environment={})


@pytest.fixture
def kuberay(tmp_path: Path) -> Settings:
    return parsed(documents()["ConfigMap"]["data"]["splitpoint.toml"], tmp_path)


@pytest.fixture(params=["kuberay", "ray"])
def served(request: pytest.FixtureRequest, kuberay: Settings, tmp_path: Path) -> Settings:
    return kuberay if request.param == "kuberay" else parsed(SERVED.read_text(), tmp_path)


def test_the_schema_is_one_and_every_document_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert sorted(documents()) == ["ConfigMap", "RayCluster", "Service"]
    for document in documents().values():
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize(
    "place", ["spec", "spec.headGroupSpec", "spec.headGroupSpec.template.spec", "spec.gcsFaultToleranceOptions"]
)
def test_a_misspelt_field_is_refused(place: str) -> None:
    broken = copy.deepcopy(documents()["RayCluster"])
    part = broken
    for name in place.split("."):
        part = part[name]
    part["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_what_is_mounted_is_a_volume_of_the_pod_and_every_volume_is_mounted() -> None:
    for pod in pods(documents()["RayCluster"]):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_every_pod_has_shared_memory_resources_and_runs_confined() -> None:
    cluster = documents()["RayCluster"]
    for pod in pods(cluster):
        (shm,) = [volume for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
        assert shm["emptyDir"]["sizeLimit"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert {"name": shm["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]
            assert container["resources"]["requests"].keys() == container["resources"]["limits"].keys()
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_what_serves_and_the_head_share_their_directories_and_the_secret_of_the_cluster(kuberay: Settings) -> None:
    cluster = documents()["RayCluster"]
    head, serve = pods(cluster)[0]["containers"]
    assert serve["command"] == ["splitpoint", "serve", "-c", "/etc/splitpoint/splitpoint.toml"]
    shared = [mount for mount in head["volumeMounts"] if mount in serve["volumeMounts"]]
    assert {"/tmp/ray", "/dev/shm", str(kuberay.coordinator.state_dir), "/models"} == {mount["mountPath"] for mount in shared}
    # KubeRay names the secret after the cluster.
    (token,) = [entry["valueFrom"]["secretKeyRef"] for entry in serve["env"] if entry["name"] == "RAY_AUTH_TOKEN"]
    assert token == {"name": cluster["metadata"]["name"], "key": "auth_token"}
    assert pods(cluster)[0]["terminationGracePeriodSeconds"] > kuberay.coordinator.drain_timeout_s


def test_doors_probes_and_the_service_are_at_the_ports_of_the_configuration(kuberay: Settings) -> None:
    head = pods(documents()["RayCluster"])[0]["containers"][0]
    probe = head["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/health", kuberay.gateway.http_port)
    ports = {entry["name"]: entry["targetPort"] for entry in documents()["Service"]["spec"]["ports"]}
    assert ports == {"http": kuberay.gateway.http_port, "grpc": kuberay.gateway.grpc_port}
    assert "0.0.0.0" in (kuberay.gateway.http_host, kuberay.gateway.grpc_host)
    assert kuberay.gateway.admin_host == "127.0.0.1", "the admin port has no key of its own"


def test_the_accelerators_of_the_pods_are_those_of_the_pools(kuberay: Settings) -> None:
    cluster = documents()["RayCluster"]
    have = 0
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert group["rayStartParams"]["num-gpus"] == gpus
        assert kuberay.coordinator.placement.rack_label in group["labels"]
        have += group["replicas"] * int(gpus)
    need = sum(pool.replicas * kuberay.engine_of(name).world_size for name, pool in kuberay.pools.items())
    assert have == need


def test_the_configurations_suit_a_cluster_of_several_nodes(served: Settings) -> None:
    assert served.coordinator.ray_address == "auto"
    assert served.coordinator.require_durable_gcs
    assert loopback_settings({"worker": served.worker.advertise_host, "kvtransfer": served.kvtransfer.advertise_host}) == []
    assert served.coordinator.state_dir.is_absolute()


def test_the_head_keeps_its_state_on_disk_or_in_redis() -> None:
    assert documents()["RayCluster"]["spec"]["gcsFaultToleranceOptions"]["redisAddress"]
    (head,) = [c for c in yaml.safe_load(RAY.read_text())["head_start_ray_commands"] if "ray start" in c]
    assert {"RAY_gcs_storage=rocksdb", "RAY_gcs_storage_path=/var/lib/splitpoint/gcs"} <= set(shlex.split(head))


def test_the_cluster_file_is_valid_by_rays_own_schema() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load(RAY.read_text())
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "head_start_commands": []}, schema)
    provider = cluster["provider"]
    assert cluster["max_workers"] == len(provider["worker_ips"])
    assert provider["head_ip"] not in provider["worker_ips"]
    assert (ROOT / cluster["file_mounts"]["/etc/splitpoint/splitpoint.toml"]) == SERVED


def test_every_process_of_the_cluster_file_names_the_same_authentication() -> None:
    cluster = yaml.safe_load(RAY.read_text())
    starts = [c for k in ("head_start_ray_commands", "worker_start_ray_commands") for c in cluster[k] if "ray start" in c]
    assert len(starts) == 2
    said = [sorted(word for word in shlex.split(start) if word.startswith("RAY_AUTH_")) for start in starts]
    assert said[0] == said[1]
    (path,) = [word.partition("=")[2] for word in said[0] if word.startswith("RAY_AUTH_TOKEN_PATH=")]
    assert path in cluster["file_mounts"]


def test_ray_knows_every_option_of_its_start_commands() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    known = set(re.findall(r'"(--[a-z-]+)"', (Path(spec.origin).parent / "scripts" / "scripts.py").read_text()))
    cluster = yaml.safe_load(RAY.read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        for command in cluster[key]:
            used = {word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")}
            assert used <= known, used - known
