"""`make demo`: the whole system on this machine, from two engines to a verdict, saying what it does.

Fetches the model, starts one prefill and one decode worker, asks one question over HTTP and gRPC on every path and transport,
shows where the time went, compares the two paths, ends everything and checks that nothing is left.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from coordinator.manifest import gpus, hardware
from coordinator.pools.shared_memory import segments_of
from coordinator.served import Running, ServeError, served
from protos.splitpoint.v1 import common_pb2, generation_pb2, generation_pb2_grpc

QUESTION = "What is the capital of France? Answer in one sentence."
WAYS = (("split", "ucx"), ("split", "grpc"), ("colocated", ""))
ROOT = Path(__file__).resolve().parent.parent
STATE_DIR = Path("runs") / "demo"
RECORD = STATE_DIR / "compare.json"


class DemoError(RuntimeError):
    """A step failed; the text says which and where to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer and where its time went."""

    front: str
    path: str
    transport: str
    text: str
    ledger: dict[str, Any]

    @property
    def way(self) -> str:
        return f"{self.path} over {self.transport}" if self.transport else self.path


def main() -> int:
    """Returns the exit status: 0 when every step worked and nothing was left."""
    console, began_s = Console(), time.monotonic()
    steps = Steps(console)
    try:
        run(console, steps)
    except (DemoError, ServeError) as error:
        console.print(f"[bold red]the demo failed:[/bold red] {error}")
        return 1
    console.print(
        f"\n[bold]done in {time.monotonic() - began_s:.0f} s[/bold]; record {RECORD}, logs and manifest below {STATE_DIR}"
    )
    return 0


class Steps:
    """Numbers what the demo does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0

    def say(self, text: str) -> None:
        self._number += 1
        self._console.print(f"\n[bold cyan]{self._number}. {text}[/bold cyan]")


def run(console: Console, steps: Steps) -> None:
    """All steps. Raises `DemoError` or `ServeError`; what was started has ended then too."""
    found = gpus()
    machine = hardware()
    steps.say("This machine")
    memory_gib = machine["memory_bytes"] / 2**30
    console.print(f"{machine['cpu']}, {machine['usable_cores']} cores, {memory_gib:.0f} GiB; GPUs: {', '.join(found) or 'none'}")
    console.print(f"using {'the GPUs' if found else 'the CPU build of vLLM, one core per engine'}")

    steps.say("Fetch SmolLM2-135M-Instruct (nothing to do when it is there)")
    fetch(console)

    steps.say("Start one prefill and one decode worker, a coordinator and a gateway on a private Ray")
    with served(configuration(found), STATE_DIR) as system:
        family = psutil.Process(system.process.pid).children(recursive=True)
        steps.say(f"Ask over HTTP and gRPC, on both paths and both transports: {QUESTION!r}")
        answers = ask_all(system)
        show_answers(console, answers)

        steps.say("Where the time went, milliseconds at the gateway (the stages add up to e2e)")
        show_ledgers(console, answers)

        steps.say("Compare the two paths on these two workers: splitpoint compare --quick")
        compare(system)

        steps.say("Drain, and end everything")
        family += psutil.Process(system.process.pid).children(recursive=True)
        segments = {segment for process in family for segment in segments_of(process.pid)}
    check_nothing_left(console, system, family, segments)


def configuration(found: list[str]) -> list[str]:
    """Arguments of `serve` for this machine: GPUs when there are any."""
    file = ROOT / "deploy" / ("demo-gpu.toml" if found else "demo-cpu.toml")
    arguments = ["-c", str(file)]
    if len(found) == 1:
        arguments += ["--set=coordinator.worker_gpus=0.5", "--set=engine.extra_arguments.gpu_memory_utilization=0.4"]
    return arguments


def fetch(console: Console) -> None:
    """Raises `DemoError`."""
    from engine.fetch_progress import RichProgress
    from engine.models import ModelFetchError
    from engine.models import fetch as run_fetch

    try:
        with RichProgress(console) as progress:
            checkpoint = run_fetch("smollm2", None, progress)
    except ModelFetchError as error:
        raise DemoError(f"the model could not be fetched: {error}") from error
    console.print(f"{checkpoint.path}, from the {checkpoint.source}, hashes verified", soft_wrap=True)


def ask_all(system: Running) -> list[Answer]:
    """Six answers. Each way is asked once before, unseen: the first transfer of a pair sets up its connections."""
    try:
        for path, transport in WAYS:
            ask_http(system, path, transport, max_tokens=2)
        return [ask(system, path, transport, max_tokens=24) for path, transport in WAYS for ask in (ask_http, ask_grpc)]
    except (httpx.HTTPError, grpc.RpcError) as error:
        raise DemoError(f"a question was not answered: {error}") from error


def ask_http(system: Running, path: str, transport: str, *, max_tokens: int) -> Answer:
    """One chat over the OpenAI API. Raises `httpx.HTTPError`."""
    headers = {"x-splitpoint-path": path, **({"x-splitpoint-transport": transport} if transport else {})}
    body = {
        "model": system.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    reply = httpx.post(f"http://{system.http}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)
    reply.raise_for_status()
    answer = reply.json()
    ledger = {key.removesuffix("_ms"): value for key, value in answer["metrics"].items()}
    return Answer(front="HTTP", path=path, transport=transport, text=answer["choices"][0]["message"]["content"], ledger=ledger)


def ask_grpc(system: Running, path: str, transport: str, *, max_tokens: int) -> Answer:
    """The same over gRPC, streamed. Raises `grpc.RpcError`."""
    request = generation_pb2.GenerateRequest(
        model=system.model,
        chat=generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="user", content=QUESTION)]),
        sampling_params=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
        stream=True,
    )
    metadata = [("x-splitpoint-path", path), *([("x-splitpoint-transport", transport)] if transport else [])]
    with grpc.insecure_channel(system.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel:
        replies = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=120, metadata=metadata))
    complete = replies[-1].complete
    ledger = {
        field.name.removesuffix("_s"): getattr(complete.metrics, field.name) * (1000.0 if field.name.endswith("_s") else 1)
        for field in complete.metrics.DESCRIPTOR.fields
    }
    return Answer(front="gRPC", path=path, transport=transport, text=complete.text, ledger=ledger)


def show_answers(console: Console, answers: list[Answer]) -> None:
    """The texts, and whether they are one."""
    table = Table("front", "path", "answer", "TTFT ms", "KV moved")
    for answer in answers:
        moved = f"{answer.ledger['transfer_bytes'] / 2**20:.1f} MiB" if answer.ledger["transfer_bytes"] else "-"
        table.add_row(answer.front, answer.way, answer.text.strip(), f"{answer.ledger['ttft']:.0f}", moved)
    console.print(table)
    texts = {answer.text for answer in answers}
    console.print("all six answers are the same" if len(texts) == 1 else f"[yellow]{len(texts)} different answers[/yellow]")


def show_ledgers(console: Console, answers: list[Answer]) -> None:
    """One column per answer. What is in brackets overlaps other stages and is not part of the sum."""
    stages = (
        "gateway",
        "prefill_queue",
        "prefill",
        "transfer_wait",
        "decode_queue",
        "decode",
        "worker",
        "retry",
        "residual",
        "e2e",
    )
    table = Table("ms", *(f"{a.front}\n{a.path}\n{a.transport or '-'}" for a in answers), padding=(0, 0))
    for stage in stages:
        table.add_row(stage, *(f"{a.ledger[stage]:.1f}" for a in answers), end_section=stage == "residual")
    table.add_row("(transfer)", *(f"{a.ledger['transfer']:.1f}" if a.transport else "-" for a in answers))
    table.add_row("(2nd token)", *(f"{a.ledger['second_token_gap']:.1f}" for a in answers))
    console.print(table)


def compare(system: Running) -> None:
    """The real command in a process of its own, its output shown. Raises `DemoError`."""
    command = [sys.executable, "-m", "coordinator.cli", "compare", "--quick", "--json", str(RECORD)]
    command += ["--url", f"http://{system.http}", "--admin", system.admin]
    try:
        done = subprocess.run(command, timeout=300, check=False)
    except subprocess.TimeoutExpired as error:
        raise DemoError("compare did not end within 300 s") from error
    if done.returncode != 0:
        raise DemoError(f"compare ended with status {done.returncode}")


def check_nothing_left(console: Console, system: Running, family: list[psutil.Process], segments: set[str]) -> None:
    """No process, port or shared-memory segment of the system. Raises `DemoError` naming what is left."""
    _, alive = psutil.wait_procs(family, timeout=10)
    left = [f"pid {p.pid}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for address in (system.http, system.grpc, system.admin):
        host, port = address.rsplit(":", 1)
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                left.append(f"port {address}")
    left += [name for name in segments if Path(name).exists()]
    left += [str(path) for path in Path("/tmp").glob(f"sp-ray-{system.process.pid}-*")]
    if left:
        raise DemoError(f"left behind: {', '.join(left)}")
    console.print("nothing is left: no process, no port, no shared memory, no temporary directory")


if __name__ == "__main__":
    raise SystemExit(main())
