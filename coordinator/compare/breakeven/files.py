"""Maps as JSON, with their schema."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coordinator.compare.breakeven.map import SCHEMA_VERSION, BreakEvenMap
from coordinator.compare.breakeven.observe import MapError


@functools.cache
def _adapter() -> TypeAdapter[BreakEvenMap]:
    return TypeAdapter(BreakEvenMap)


def schema() -> dict[str, Any]:
    """The JSON schema of a map."""
    found = _adapter().json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Splitpoint break-even map", **found}


def to_json(found: BreakEvenMap) -> str:
    return json.dumps(dataclasses.asdict(found), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> BreakEvenMap:
    """The map in a file. Raises `MapError`."""
    try:
        text = path.read_text(encoding="utf-8")
        version = json.loads(text).get("schema_version")
    except OSError as error:
        raise MapError(f"{path}: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise MapError(f"{path}: not a map: {error}") from error
    if version != SCHEMA_VERSION:
        raise MapError(f"{path}: schema version {version!r}; this program reads {SCHEMA_VERSION}")
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise MapError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
