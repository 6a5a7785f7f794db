"""`splitpoint plan`: the arithmetic before a purchase or a deployment. No system is needed."""

from __future__ import annotations

import gzip
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.planning.values import MOST, RefusedValueError, format_bytes, parse_count, positive

if TYPE_CHECKING:
    from coordinator.planning.capacity import CapacityPlan, Measured
    from coordinator.planning.kv import KvPlan, Weights
    from coordinator.planning.shape import KvShape

app = typer.Typer(no_args_is_help=True, help="Arithmetic of memory and capacity, before anything runs.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def kv(
    tokens: Annotated[int, typer.Option(help="Of one request, prompt and output.")],
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="A checkpoint folder or its config.json.")] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Instead of --model.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Instead of --model.")] = None,
    dtype_bytes: Annotated[float | None, typer.Option(help="Bytes of one KV element; or name a --kv-format.")] = None,
    kv_format: Annotated[str | None, typer.Option(help="bf16, fp8, ...; default: the model's own.")] = None,
    requests: Annotated[int, typer.Option(help="Held at the same time.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of one worker.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages of one worker.")] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens of one KV block.")] = 16,
    parameters: Annotated[str | None, typer.Option(help="Such as 500B; default: counted from --model.")] = None,
    weight_format: Annotated[str | None, typer.Option(help="bf16, fp8, ...; default: the model's own.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of one accelerator, such as 180GB: how much KV fits.")] = None,
    memory_share: Annotated[float, typer.Option(help="Of the memory that the engine may take.")] = 0.9,
    reserve: Annotated[str, typer.Option(help="Of that, kept for activations and graphs, per accelerator.")] = "0",
    as_json: AsJson = False,
) -> None:
    """KV bytes per token, request and pool, and weights per accelerator."""
    from coordinator.planning.kv import Accelerator, plan_kv

    try:
        config = _config(model)
        shape = _shape(config, layers, kv_heads, head_dim, dtype_bytes, kv_format)
        accelerator = None
        if memory is not None:
            held = _bytes("--memory", memory)
            accelerator = Accelerator(memory_bytes=held, memory_share=memory_share, reserve_bytes=_bytes("--reserve", reserve))
        plan = plan_kv(
            shape,
            tokens=tokens,
            requests=requests,
            tp=tp,
            pp=pp,
            block_tokens=block_tokens,
            weights=_weights(config, parameters, weight_format),
            accelerator=accelerator,
        )
    except RefusedValueError as error:
        raise _refused(error) from None
    if as_json:
        _print_json(plan.as_dict())
    else:
        _show_kv(plan, Console())


@app.command()
def capacity(
    rate: Annotated[float, typer.Option(help="Expected requests/s, at the busiest.")],
    replica_rate: Annotated[
        float | None, typer.Option(help="Requests/s of one replica within the SLO; or give --record.")
    ] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="A record of `compare`: its system is one replica.")] = None,
    arm: Annotated[str, typer.Option(help="One of the record's arms.")] = "split",
    input_tokens: Annotated[float | None, typer.Option(help="Expected mean prompt length; needed with --record.")] = None,
    output_tokens: Annotated[float | None, typer.Option(help="Expected mean output length; needed with --record.")] = None,
    accept_other_mix: Annotated[
        bool, typer.Option("--accept-other-mix", help="Apply the record to another length mix all the same; the plan says so.")
    ] = False,
    headroom: Annotated[float, typer.Option(help="Share of a replica's rate that is planned with.")] = 0.7,
    spares: Annotated[int, typer.Option(help="Replicas beyond those that the load takes.")] = 0,
    accelerators_per_replica: Annotated[int, typer.Option(help="TP x PP, or those of a whole xP:yD group.")] = 1,
    accelerators_per_server: Annotated[int, typer.Option(help="A replica of several servers takes whole ones.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Replicas, accelerators and servers for an expected load."""
    from coordinator.planning.capacity import OtherMixError, plan_capacity, seed_notes

    try:
        if (replica_rate is None) == (record is None):
            raise RefusedValueError("--replica-rate", "give this or --record, one of them")
        measured: Measured | None = None
        notes: tuple[str, ...] = ()
        if record is not None:
            measured, notes = _measured(record, arm, input_tokens, output_tokens, accept_other_mix)
            notes = (*notes, *seed_notes(measured))
        elif input_tokens is not None or output_tokens is not None:
            notes = ("--replica-rate holds for one length mix and one SLO; this plan cannot check that they are yours",)
        plan = plan_capacity(
            rate_per_s=rate,
            replica_rate_per_s=measured.rate_per_s if measured else replica_rate or 0.0,
            headroom=headroom,
            spares=spares,
            accelerators_per_replica=accelerators_per_replica,
            accelerators_per_server=accelerators_per_server,
            measured=measured,
            notes=notes,
        )
    except RefusedValueError as error:
        raise _refused(error) from None
    except OtherMixError as error:
        text = f"{record}: {error}. Measure at yours, or give --accept-other-mix."
        Console(stderr=True).print(text, style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        _print_json(plan.as_dict())
    else:
        _show_capacity(plan, Console())


def _measured(
    record: Path, arm: str, input_tokens: float | None, output_tokens: float | None, accept_other: bool
) -> tuple[Measured, tuple[str, ...]]:
    from coordinator.planning.capacity import LengthMix, check_mix, measured_rate

    if input_tokens is None or output_tokens is None:
        option = "--input-tokens" if input_tokens is None else "--output-tokens"
        raise RefusedValueError(option, "is needed with --record: a rate holds for one length mix only")
    expected = LengthMix(input_tokens=input_tokens, output_tokens=output_tokens)
    measured = measured_rate(_json("--record", record), arm)
    return measured, check_mix(measured, expected, accept_other=accept_other)


def _config(model: Path | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return _json("--model", model / "config.json" if model.is_dir() else model)


def _json(option: str, path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError) as error:
        raise RefusedValueError(option, f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise RefusedValueError(option, f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RefusedValueError(option, f"{path}: not a JSON object")
    return found


def _shape(
    config: dict[str, Any] | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    dtype_bytes: float | None,
    kv_format: str | None,
) -> KvShape:
    from coordinator.planning.shape import KvShape, kv_shape

    if dtype_bytes is not None and kv_format is not None:
        raise RefusedValueError("--kv-format", "give this or --dtype-bytes, not both")
    given = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim, "--dtype-bytes": dtype_bytes}
    if config is not None:
        if twice := [option for option, value in given.items() if value is not None]:
            raise RefusedValueError(twice[0], "comes from --model; leave it out")
        return kv_shape(config, kv_format)
    if layers is None or kv_heads is None or head_dim is None:
        missing = next(option for option, value in given.items() if value is None)
        raise RefusedValueError(missing, "is needed where no --model is given")
    if dtype_bytes is not None:
        positive("--dtype-bytes", dtype_bytes)
        element_bytes = Fraction(dtype_bytes)
    else:
        element_bytes = format_bytes("--kv-format", kv_format or "bf16")
    return KvShape(layers=layers, kv_heads=kv_heads, head_dim=head_dim, element_bytes=element_bytes)


def _weights(config: dict[str, Any] | None, parameters: str | None, weight_format: str | None) -> Weights | None:
    from coordinator.planning.kv import Weights
    from coordinator.planning.shape import GATED_TYPES, model_format, parameter_count

    if parameters is not None:
        count = parse_count("--parameters", parameters)
    elif config is None or (config.get("text_config", config).get("model_type") not in GATED_TYPES and weight_format is None):
        # The cache of a model can be planned although its parameters cannot be counted; the plan then shows no weights.
        return None
    else:
        count = parameter_count(config)
    return Weights(
        parameters=count,
        element_bytes=format_bytes("--weight-format", weight_format or (model_format(config) if config else "bf16")),
    )


def _bytes(option: str, text: str) -> int:
    from coordinator.config_layers import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RefusedValueError(option, str(error)) from error
    except OverflowError as error:
        raise RefusedValueError(option, f"must be at most {MOST:.0e}") from error


def _refused(error: RefusedValueError) -> typer.BadParameter:
    return typer.BadParameter(error.reason, param_hint=error.option)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def size(count: float) -> str:
    """Bytes for people, decimal units as on a data sheet."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count:g} B"


def _show_kv(plan: KvPlan, console: Console) -> None:
    from rich.table import Table

    shape = plan.shape
    heads = "latent" if shape.kind == "latent" else f"{shape.kv_heads} KV heads of"
    title = f"KV cache: {shape.layers} layers, {heads} {shape.head_dim}, {float(shape.element_bytes):g} B an element"
    table = Table("", "all ranks, one copy", f"one accelerator of TP{plan.tp} x PP{plan.pp}", title=title, title_justify="left")
    here = plan.bytes_per_token_per_accelerator
    table.add_row("a token", f"{plan.bytes_per_token:,} B", f"{here:,} B")
    table.add_row(f"a request of {plan.tokens:,} tokens", size(plan.bytes_per_request), size(here * plan.tokens))
    if plan.bytes_per_request_in_blocks != plan.bytes_per_request:
        table.add_row(f"  in blocks of {plan.block_tokens}", size(plan.bytes_per_request_in_blocks), "")
    if plan.requests > 1:
        table.add_row(f"{plan.requests:,} such requests", size(plan.bytes_for_requests), size(here * plan.tokens * plan.requests))
    if plan.weight_bytes is not None and plan.weight_bytes_per_accelerator is not None:
        table.add_row("weights", size(plan.weight_bytes), size(plan.weight_bytes_per_accelerator))
    if plan.room is not None:
        table.add_row("room for KV", f"{plan.room.tokens:,} tokens", size(plan.room.kv_bytes_per_accelerator))
        table.add_row("  requests of this length", f"{plan.room.requests:,}", "")
    console.print(table)
    _show_notes(plan.notes, console)


def _show_capacity(plan: CapacityPlan, console: Console) -> None:
    from rich.table import Table

    table = Table("", "", title=f"Capacity for {plan.rate_per_s:g} requests/s", title_justify="left", show_header=False)
    if plan.measured is not None:
        found = plan.measured
        table.add_row("measured", f"{found.arm}, {found.seeds} seeds, {found.mix} tokens, {found.slo}")
    table.add_row("a replica", f"{plan.replica_rate_per_s:.4g} requests/s, planned with {plan.headroom:.0%} of it")
    table.add_row("replicas", f"{plan.replicas} + {plan.spares} spare = {plan.total_replicas}")
    table.add_row("accelerators", f"{plan.total_replicas} x {plan.accelerators_per_replica} = {plan.accelerators}")
    idle = f", {plan.idle_accelerators} accelerators idle" if plan.idle_accelerators else ""
    table.add_row("servers", f"{plan.servers} of {plan.accelerators_per_server}{idle}")
    lost = "" if plan.load_share_one_lost is None else f"; {plan.load_share_one_lost:.0%} with one lost"
    table.add_row("load of each", f"{plan.load_share:.0%} of its rate{lost}")
    console.print(table)
    _show_notes(plan.notes, console)


def _show_notes(notes: tuple[str, ...], console: Console) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
