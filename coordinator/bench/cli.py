"""`splitpoint bench`: commands that measure a part. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.bench.transfer_cli import transfer

app = typer.Typer(no_args_is_help=True, help="Measure a part of the system.")
app.command()(transfer)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record, raw samples included.")]


@app.command()
def handover(
    device: Annotated[str, typer.Option(help="cuda: two GPUs of this host; cpu: two processes, to try it.")] = "cuda",
    blocks: Annotated[list[int] | None, typer.Option(help="Blocks of 16 tokens to hand over; repeatable.")] = None,
    transport: Annotated[list[str] | None, typer.Option(help="ucx, grpc; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 50,
    checksum: Annotated[str, typer.Option(help="crc32c or off.")] = "crc32c",
    chunk_mib: Annotated[int, typer.Option(min=1, help="kvtransfer.chunk_bytes, MiB.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of 64 KiB a block; 32 is an 8B Llama shape.")] = 32,
    nixl_model: Annotated[str, typer.Option(help="Measure vLLM's NixlConnector too, with this folder's config.json.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Time hand-overs between two caches without an engine: gather, pull until verified, scatter; beside UCX alone."""
    from coordinator.bench.handover import MIB, HandoverSpec, measure, table

    sizes = tuple(blocks or (32, 68, 128))
    spec = HandoverSpec(
        device=device,
        layers=layers,
        sizes_blocks=sizes,
        cache_blocks=4 * max(sizes),
        transports=tuple(transport or ("ucx",)),
        checksum=checksum,
        chunk_bytes=chunk_mib * MIB,
        repeats=repeats,
        nixl_model=nixl_model,
    )
    record = asyncio.run(measure(spec))
    _finish(record, table(record), json_file)


@app.command(name="serve-path")
def serve_path(
    gateway: Annotated[str, typer.Argument(metavar="HOST:PORT", help="gRPC address of a gateway.")] = "127.0.0.1:50051",
    spec: Annotated[str, typer.Option(help="Fields of ServePathSpec to change, as JSON.")] = "{}",
    parity_only: Annotated[bool, typer.Option("--parity", help="Compare the tokens of both paths and nothing else.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time both paths of a system that is up: unloaded, with prefill busy, and under an open loop. Or compare their tokens."""
    from coordinator.bench import serve_path as path

    chosen = path.ServePathSpec(**json.loads(spec))
    if parity_only:
        found = asyncio.run(path.parity(gateway, chosen, path.PARITY_TEXTS))
        text = f"parity: {found['equal']} of {found['compared']} prompts; colocated with itself: {found['floor']}"
        _finish(found, text, json_file)
        raise typer.Exit(0 if found["equal"] == found["compared"] else 1)
    record = asyncio.run(path.measure(gateway, chosen, say=lambda what: typer.echo(what, err=True)))
    _finish(record, path.table(record), json_file)


def _finish(record: dict[str, Any], text: str, json_file: Path | None) -> None:
    sys.stdout.write(text + "\n")
    if json_file is not None:
        from coordinator.manifest import git_commit, gpus, hardware, versions

        record["manifest"] = {
            "hardware": {**hardware(), "gpus": gpus()},
            "versions": versions(),
            "git_commit": git_commit(),
            "command": sys.argv[1:],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")
