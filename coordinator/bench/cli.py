"""`splitpoint bench`: commands that measure a part. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.bench.auto_cli import auto
from coordinator.bench.failover_cli import failover
from coordinator.bench.routing_cli import routing
from coordinator.bench.transfer_cli import transfer

if TYPE_CHECKING:
    from coordinator.bench.serve_path import ServePathSpec

app = typer.Typer(no_args_is_help=True, help="Measure a part of the system.")
app.command()(transfer)
app.command()(routing)
app.command()(auto)
app.command()(failover)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record, raw samples included.")]


@app.command()
def handover(
    device: Annotated[
        str, typer.Option(help="cuda: two GPUs of this host, or one that both sides share; cpu: two processes, to try it.")
    ] = "cuda",
    blocks: Annotated[list[int] | None, typer.Option(help="Blocks of 16 tokens to hand over; repeatable.")] = None,
    transport: Annotated[list[str] | None, typer.Option(help="ucx, grpc; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 50,
    checksum: Annotated[str, typer.Option(help="crc32c or off.")] = "crc32c",
    chunk_mib: Annotated[int, typer.Option(min=1, help="kvtransfer.chunk_bytes and device_chunk_bytes, MiB.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of 64 KiB a block; 32 is an 8B Llama shape.")] = 32,
    nixl_model: Annotated[str, typer.Option(help="Measure vLLM's NixlConnector too, with this folder's config.json.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Time hand-overs between two caches without an engine: gather, pull until verified, scatter; beside UCX alone."""
    from coordinator.bench.handover import MIB, HandoverSpec, gpu_count, measure, table

    _one_of("--device", device, ("cuda", "cpu"))
    _one_of("--checksum", checksum, ("crc32c", "off"))
    for name in transport or ():
        _one_of("--transport", name, ("ucx", "grpc"))
    if device == "cuda" and gpu_count() == 0:
        raise _failed("a hand-over between GPUs needs one at least, and this host shows none; --device cpu tries it without")
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
    try:
        record = asyncio.run(measure(spec))
    except (RuntimeError, TimeoutError) as error:
        raise _failed(error) from error
    _finish(record, table(record), json_file)


@app.command(name="serve-path")
def serve_path(
    gateway: Annotated[str, typer.Argument(metavar="HOST:PORT", help="gRPC address of a gateway.")] = "127.0.0.1:50051",
    spec: Annotated[str, typer.Option(help="Fields of ServePathSpec to change, as JSON.")] = "{}",
    parity_only: Annotated[bool, typer.Option("--parity", help="Compare the tokens of both paths and nothing else.")] = False,
    admin: Annotated[
        str,
        typer.Option(
            envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="With --parity: empty the prefix caches before each answer."
        ),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Time both paths of a system that is up: unloaded, with prefill busy, and under an open loop. Or compare their tokens."""
    import grpc.aio

    from coordinator.bench import serve_path as path
    from coordinator.compare.load import RequestFailedError
    from coordinator.compare.rig import RigError

    try:
        chosen = path.ServePathSpec(**json.loads(spec))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"not fields of ServePathSpec as JSON: {error}", param_hint="--spec") from error
    if parity_only:
        try:
            found = asyncio.run(_parity(gateway, admin, chosen))
        except grpc.aio.AioRpcError as error:
            raise _failed(f"{gateway}: {error.code().name}: {error.details()}") from error
        except RigError as error:
            raise _failed(f"{admin}: {error}") from error
        text = f"parity: {found['equal']} of {found['compared']} prompts; colocated with itself: {found['floor']}"
        text += f"; gaps moved by {found['moved_nats']:.4f} nats, colocated with itself by {found['floor_nats']:.4f}"
        text += "" if admin else "; prefix caches were not emptied between answers (--admin)"
        for one in found["different"]:
            gaps = "split {split_gap_nats:.4f}, colocated {colocated_gap_nats:.4f}; same two best: {same_two_best}"
            text += f"\n{one['prompt']}: part at {one.get('position')}" + (", " + gaps.format(**one) if "position" in one else "")
        _finish(found, text, json_file)
        raise typer.Exit(0 if found["equal"] == found["compared"] else 1)
    try:
        record = asyncio.run(path.measure(gateway, chosen, say=lambda what: typer.echo(what, err=True)))
    except RequestFailedError as error:
        raise _failed(f"{gateway}: {error}") from error
    _finish(record, path.table(record), json_file)


async def _parity(gateway: str, admin: str, spec: ServePathSpec) -> dict[str, Any]:
    from coordinator.bench.serve_path import PARITY_TEXTS, parity
    from coordinator.compare.admin_rig import AdminRig

    if not admin:
        return await parity(gateway, spec, PARITY_TEXTS)
    async with AdminRig(admin) as rig:
        return await parity(gateway, spec, PARITY_TEXTS, cleared=rig.reset_caches)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}", param_hint=option)


def _failed(why: object) -> typer.Exit:
    typer.echo(str(why), err=True)
    return typer.Exit(1)


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
