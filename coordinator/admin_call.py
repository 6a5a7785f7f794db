"""Calls of `AdminService` from the command line, and how their answers are printed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_ADMIN = "127.0.0.1:50052"

Admin = Annotated[str, typer.Option(envvar="SPLITPOINT_ADMIN", metavar="HOST:PORT", help="Admin address of a gateway.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


WHOLE_CELLS = 10_000
"""Wider than any table: a table is as wide as what it shows."""


def output_console() -> Console:
    """Standard output for tables. Where it is no terminal nothing is wrapped or cut: `grep` and `awk` find whole names."""
    console = Console()
    return console if console.is_terminal else Console(width=WHOLE_CELLS)


def folding_table(*names: str, **options: Any) -> Table:
    """A table whose cells go on in their next line where a terminal is too narrow: no name, reason or address is cut.
    `options`: `Table`'s."""
    from rich.table import Column, Table

    return Table(*(Column(name, overflow="fold") for name in names), **options)


def fail(message: str) -> typer.Exit:
    """Say why on standard error; raise what is returned."""
    Console(stderr=True).print(message, style="bold red", markup=False, soft_wrap=True)
    return typer.Exit(1)


def print_json(value: Any) -> None:
    """Indented, on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def call(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
    """One unary call; ends the program with the error's own words."""
    from protos.errors import SplitpointError

    answer = ask(address, method, request, timeout_s)
    if isinstance(answer, SplitpointError):
        hint = f" (is `splitpoint serve` running, with its admin port at {address}?)" if answer.code == "worker_lost" else ""
        raise fail(f"{answer}{hint}") from None
    return answer


def ask(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
    """One unary call: its answer, or the `SplitpointError` that it failed with."""
    import grpc

    from protos.grpc_errors import from_rpc_error
    from protos.splitpoint.v1 import admin_pb2_grpc

    # A proxy in the environment is for the outside; admin addresses are inside.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return from_rpc_error(error)


def state_of(worker: Any) -> str:
    """A `WorkerStatus`'s state with what keeps requests from it."""
    return ", ".join([worker.state, *(name for name in ("spare", "cordoned", "silent") if getattr(worker, name))])


def as_dict(message: Any) -> Any:
    """Every field, by its name in the proto."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
