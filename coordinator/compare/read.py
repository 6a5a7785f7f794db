"""Records read back: checked against the schema, found in a folder."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from coordinator.compare.record import SCHEMA_VERSION, Record


class RecordError(ValueError):
    """A file is no record that this version reads; the text says why."""


class NotARecordError(RecordError):
    """The file is something else."""


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of a comparison's record."""
    found: dict[str, Any] = TypeAdapter(Record).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Splitpoint comparison", **found}


def read(path: Path) -> dict[str, Any]:
    """The record in a file, compressed where its name ends in .gz. Raises `RecordError`."""
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError) as error:
        raise RecordError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise NotARecordError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict) or "judgement" not in found:
        raise NotARecordError(f"{path}: not a record of a comparison")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise RecordError(f"{path}: schema version {found.get('schema_version')!r}; this program reads {SCHEMA_VERSION}")
    if fault := next(iter(sorted(Draft202012Validator(schema()).iter_errors(found), key=lambda e: list(e.path))), None):
        where = ".".join(map(str, fault.absolute_path)) or "record"
        raise RecordError(f"{path}: {where}: {fault.message[:200]}")
    return found


def load(path: Path) -> Record:
    """The same as objects. Raises `RecordError`."""
    return TypeAdapter(Record).validate_python(read(path))


def find(folder: Path) -> Iterator[tuple[Path, dict[str, Any] | RecordError]]:
    """Every record in a folder and below, by name, or why it cannot be read; other files are passed over.

    Raises `RecordError` where there is no such folder.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: not a folder")
    for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.json.gz")]):
        try:
            yield path, read(path)
        except NotARecordError:
            continue
        except RecordError as error:
            yield path, error
