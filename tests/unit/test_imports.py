"""Which module may know which library. `lint-imports` holds the layers; file names are held here."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "kvtransfer", "engine", "prefill", "decode", "coordinator")

HOMES = {
    "ucxx": ("kvtransfer/transports/ucx*.py",),
    "vllm": ("engine/vllm.py", "kvtransfer/connector/*"),
    "ray": ("coordinator/pools/ray_*.py", "coordinator/launch.py"),
    "prometheus_client": ("*/*metrics.py",),
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """First names of every module a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_dependency_stays_in_its_home(library: str) -> None:
    users = [str(path.relative_to(ROOT)) for path in sources() if library in imported(path)]
    strangers = [user for user in users if not any(fnmatch(user, home) for home in HOMES[library])]
    assert strangers == []


def test_nobody_pickles_on_a_wire() -> None:
    users = [str(path.relative_to(ROOT)) for path in sources() if imported(path) & {"pickle", "cloudpickle", "dill", "marshal"}]
    assert users == [], "nothing but protobuf on our wires (rule 12)"


def test_importing_the_packages_loads_no_heavy_library() -> None:
    code = (
        f"import sys, {', '.join(PACKAGES)}\n"
        "print(sorted({'vllm', 'torch', 'ray', 'ucxx', 'transformers', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=25, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Contracts: 6 kept, 0 broken." in done.stdout
