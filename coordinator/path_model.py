"""What path `auto` predicts from, as a file: calibrated step times, or a break-even map whose fit gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, ValidationError

from coordinator.routing.auto import COLOCATED, SPLIT, StepTimes

if TYPE_CHECKING:
    from coordinator.compare.breakeven.map import BreakEvenMap

KIND = "step times"


class PathModelError(ValueError):
    """No predictions can be made from this file; the text names it and what is wrong."""


class _Times(BaseModel):
    """`StepTimes`, checked."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    first_token_s: NonNegativeFloat
    prompt_token_s: PositiveFloat
    step_s: PositiveFloat
    running_s: NonNegativeFloat
    handover_s: NonNegativeFloat = 0.0
    handover_token_s: NonNegativeFloat = 0.0
    chunk_tokens: NonNegativeInt = 0


class _Paths(BaseModel):
    model_config = ConfigDict(extra="forbid")

    split: _Times
    colocated: _Times


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["step times"]
    schema_version: Literal[1]
    paths: _Paths


def read(file: Path) -> dict[str, StepTimes]:
    """Each path's step times.

    Raises:
        PathModelError: it cannot be read, is neither kind, or the map has no fit.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PathModelError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise PathModelError(f"{file}: not JSON: {error}") from error
    if isinstance(content, Mapping) and content.get("kind") == "break-even map":
        return _of_map(file)
    try:
        paths = _File.model_validate(content).paths
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise PathModelError(
            f"{file}: {where}: {first['msg']}; it must be step times or a break-even map (docs/guide-operators.md)"
        ) from error
    return {SPLIT: StepTimes(**paths.split.model_dump()), COLOCATED: StepTimes(**paths.colocated.model_dump())}


def to_json(times: Mapping[str, StepTimes]) -> str:
    """The other direction of `read`, for calibrations."""
    content: dict[str, Any] = {"kind": KIND, "schema_version": 1, "paths": {path: asdict(each) for path, each in times.items()}}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _of_map(file: Path) -> dict[str, StepTimes]:
    from coordinator.compare.breakeven.files import read as read_map
    from coordinator.compare.breakeven.observe import MapError

    try:
        found = read_map(file)
    except MapError as error:
        raise PathModelError(str(error)) from error
    return times_of_map(found, file)


def times_of_map(found: BreakEvenMap, file: Path) -> dict[str, StepTimes]:
    """What a map's fit says of single requests; queues are what the gateway sees itself.

    Raises:
        PathModelError: the records did not determine a fit.
    """
    if found.fit is None:
        raise PathModelError(f"{file}: this break-even map has no fit ({'; '.join(found.notes) or 'no reason given'})")
    model = found.fit.model
    c = model.coefficients
    # Context costs every decode step; the mean over what was measured stands for it.
    contexts = [point.input_tokens + point.output_tokens / 2 for point in found.calibrated]
    context_tokens = sum(contexts) / len(contexts) if contexts else 0.0
    prompt_token_s = c.prompt_token_s + c.context_s
    colocated = StepTimes(
        first_token_s=c.fixed_s + c.step_s,
        prompt_token_s=prompt_token_s,
        step_s=c.step_s,
        running_s=c.decode_token_s + c.context_s * context_tokens,
    )
    split = StepTimes(
        first_token_s=colocated.first_token_s,
        prompt_token_s=prompt_token_s,
        step_s=colocated.step_s,
        running_s=colocated.running_s,
        handover_s=max(0.0, c.transfer_s - c.hidden * c.step_s),
        handover_token_s=max(0.0, c.link_s_per_byte * model.kv_bytes_per_token - c.hidden * prompt_token_s),
    )
    if min(colocated.prompt_token_s, colocated.step_s) <= 0:
        raise PathModelError(f"{file}: the fit has prompts or steps that take no time; no queue can be predicted from it")
    return {SPLIT: split, COLOCATED: colocated}
