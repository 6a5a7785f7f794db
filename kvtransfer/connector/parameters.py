"""What one engine request says to the connector, and its form inside `SamplingParams.extra_args`. Pure.

The form is `{"kv_transfer_params": {"splitpoint": {"send": hex} | {"receive": hex, "tokens": n}}}`. Only the engine adapter
writes it; a public request cannot carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.ids import TransferId

_KEY = "splitpoint"


@dataclass(frozen=True, slots=True)
class SendParameters:
    """Gather this request's prompt KV into the transfer's send slot."""

    transfer_id: TransferId

    def to_extra_args(self) -> dict[str, Any]:
        """The value of `SamplingParams.extra_args`."""
        return {"kv_transfer_params": {_KEY: {"send": self.transfer_id.hex()}}}


@dataclass(frozen=True, slots=True)
class ReceiveParameters:
    """`staged_tokens` of this request's prompt lie verified in the transfer's receive slot on every rank."""

    transfer_id: TransferId
    staged_tokens: int

    def to_extra_args(self) -> dict[str, Any]:
        """The value of `SamplingParams.extra_args`."""
        return {"kv_transfer_params": {_KEY: {"receive": self.transfer_id.hex(), "tokens": self.staged_tokens}}}


def parse(kv_transfer_params: Mapping[str, Any] | None) -> SendParameters | ReceiveParameters | None:
    """Read what `to_extra_args` wrote, from the value under `kv_transfer_params`. None: an ordinary request.

    Raises:
        ValueError: the entry is there and is not what the engine adapter writes.
    """
    if not kv_transfer_params or _KEY not in kv_transfer_params:
        return None
    entry = kv_transfer_params[_KEY]
    match entry:
        case {"send": str(transfer), **rest} if not rest:
            return SendParameters(TransferId(bytes.fromhex(transfer)))
        case {"receive": str(transfer), "tokens": int(tokens), **rest} if not rest and tokens > 0:
            return ReceiveParameters(TransferId(bytes.fromhex(transfer)), tokens)
        case _:
            raise ValueError(f"kv_transfer_params[{_KEY!r}] is neither a send nor a receive: {entry!r}")
