"""The lock files still say what pyproject.toml asks for, and the CPU ones hold nothing that breaks a CPU torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
EVERY_LOCK = sorted((ROOT / "requirements").glob("*.lock"))
OF_CLIENTS = {"clients": {"guidellm", "openai", "grpcio"}, "aiperf": {"aiperf", "grpcio"}}
LOCKS = [path for path in EVERY_LOCK if path.stem not in OF_CLIENTS]
CPU_LOCKS = [path for path in LOCKS if path.name.startswith("cpu-")]


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", path.read_text(), re.MULTILINE))


def asked(extras: tuple[str, ...]) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_dependency_is_pinned_within_its_range(path: Path) -> None:
    found = pins(path)
    wrong = {
        str(wanted): found.get(canonicalize_name(wanted.name))
        for wanted in asked((path.name[:3], "dev"))
        if not (have := found.get(canonicalize_name(wanted.name))) or not wanted.specifier.contains(have, prereleases=True)
    }
    assert wrong == {}, "run make lock"


@pytest.mark.parametrize("path", EVERY_LOCK, ids=lambda path: path.name)
def test_every_pin_has_a_hash(path: Path) -> None:
    entries = re.split(r"^(?=[a-z0-9])", path.read_text(), flags=re.MULTILINE)
    assert [entry.split()[0] for entry in entries if "==" in entry and "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("path", [*CPU_LOCKS, ROOT / "requirements" / "clients.lock"], ids=lambda path: path.name)
def test_a_cpu_lock_leaves_torch_and_its_friends_out(path: Path) -> None:
    found = set(pins(path))
    assert found & {"torch", "torchvision", "torchaudio", "torchcodec"} == set()
    assert not [name for name in found if re.match(r"nvidia-(?!ml-py)", name)]


@pytest.mark.parametrize("name", OF_CLIENTS)
def test_a_clients_lock_pins_what_its_list_asks_for(name: str) -> None:
    found = pins(ROOT / "requirements" / f"{name}.lock")
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert {w.name for w in wanted} >= OF_CLIENTS[name]
    wrong = [str(w) for w in wanted if not w.specifier.contains(found.get(canonicalize_name(w.name), "0"))]
    assert wrong == [], "run make lock"


def test_there_is_a_lock_for_each_python_we_promise() -> None:
    assert [path.name for path in CPU_LOCKS] == ["cpu-py311.lock", "cpu-py312.lock", "cpu-py313.lock"]
