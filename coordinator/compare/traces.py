"""Request traces and prompt files as rows. Pure: text in, rows out.

Three sets of columns are known: `TIMESTAMP, ContextTokens, GeneratedTokens` and `arrival_s, input_tokens, output_tokens` as CSV;
`timestamp` (ms), `input_length`, `output_length` and, where there are any, `hash_ids` as JSON lines. An equal hash id is an equal
block of `HASH_BLOCK_TOKENS` prompt tokens after an equal beginning.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

HASH_BLOCK_TOKENS = 512
COARSE_SHARE = 0.5
"""Of the gaps are zero: the time stamps were coarsened, the batches are no arrivals."""


class WorkloadError(ValueError):
    """A workload cannot be made; the text names the field or the line, and the limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `hash_ids` is empty where the trace says nothing about shared prefixes."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a user's own file: text or token ids; the rest may be missing."""

    text: str | None
    token_ids: tuple[int, ...] | None
    output_tokens: int | None
    arrival_s: float | None


def parse_trace(text: str) -> list[Row]:
    """The rows in order of arrival, the first at 0 s. Raises `WorkloadError` with the line's number."""
    rows = _parse_lines(text) if text.lstrip().startswith("{") else _parse_csv(text)
    if len(rows) < 2:
        raise WorkloadError("a trace needs two rows at least")
    rows.sort(key=lambda row: row.arrival_s)
    begin = rows[0].arrival_s
    return [Row(row.arrival_s - begin, row.input_tokens, row.output_tokens, row.hash_ids) for row in rows]


def parse_prompts(text: str) -> list[Prompt]:
    """A user's JSON lines: `prompt` or `token_ids`, and where wanted `output_tokens` and `arrival_s`. Raises `WorkloadError`."""
    prompts = []
    for number, found in _json_lines(text):
        words, ids = found.get("prompt"), found.get("token_ids")
        if (words is None) == (ids is None):
            raise WorkloadError(f"line {number}: give prompt or token_ids, one of them")
        if words is not None and not (isinstance(words, str) and words):
            raise WorkloadError(f"line {number}: prompt must be a text that is not empty")
        if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
            raise WorkloadError(f"line {number}: token_ids must be a list of whole numbers from 0 up")
        output = found.get("output_tokens")
        arrival = found.get("arrival_s")
        prompts.append(
            Prompt(
                words,
                None if ids is None else tuple(ids),
                None if output is None else _whole(output, "output_tokens", number),
                None if arrival is None else _seconds(arrival, "arrival_s", number),
            )
        )
    if not prompts:
        raise WorkloadError("the file has no line")
    timed = sum(prompt.arrival_s is not None for prompt in prompts)
    if timed not in (0, len(prompts)):
        raise WorkloadError(f"arrival_s must be on every line or on none; it is on {timed} of {len(prompts)}")
    return prompts


def is_coarse(arrivals_s: Sequence[float]) -> bool:
    """Whether the time stamps come in batches that the clock made, not the users."""
    gaps = np.diff(np.asarray(arrivals_s))
    return bool(len(gaps)) and float(np.mean(gaps == 0)) > COARSE_SHARE


def spread_batches(arrivals_s: Sequence[float], generator: np.random.Generator) -> tuple[npt.NDArray[np.float64], int]:
    """Each batch of equal time stamps spread evenly at random over the usual distance of batches; and how many rows moved."""
    arrivals = np.asarray(arrivals_s, dtype=float)
    distinct = np.unique(arrivals)
    tick = float(np.median(np.diff(distinct)))
    moved = np.sort(arrivals + tick * generator.random(len(arrivals)))
    return moved - moved[0], int(len(arrivals) - len(distinct))


def _parse_csv(text: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text))
    columns = set(reader.fieldnames or ())
    read = next((read for needed, read in _CSV_FORMATS if needed <= columns), None)
    if read is None:
        raise WorkloadError(
            f"unknown columns {sorted(columns)}; known: {'; '.join(', '.join(sorted(n)) for n, _ in _CSV_FORMATS)}"
        )
    return [read(row, number) for number, row in enumerate(reader, start=2)]


def _parse_lines(text: str) -> list[Row]:
    rows = []
    for number, found in _json_lines(text):
        ids = found.get("hash_ids", [])
        if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise WorkloadError(f"line {number}: hash_ids must be a list of whole numbers")
        length = _whole(found.get("input_length"), "input_length", number)
        blocks = -(-length // HASH_BLOCK_TOKENS)
        if ids and len(ids) != blocks:
            raise WorkloadError(
                f"line {number}: {length} tokens are {blocks} blocks of {HASH_BLOCK_TOKENS}, hash_ids has {len(ids)}"
            )
        arrival_s = _seconds(found.get("timestamp"), "timestamp", number) / 1000.0
        rows.append(Row(arrival_s, length, _whole(found.get("output_length"), "output_length", number), tuple(ids)))
    return rows


def _json_lines(text: str) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise WorkloadError(f"line {number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise WorkloadError(f"line {number}: not a JSON object")
        found.append((number, value))
    return found


def _azure(row: dict[str, str], number: int) -> Row:
    # Seven digits of a second, one more than the standard format knows.
    stamp = row["TIMESTAMP"].strip()
    try:
        at = datetime.datetime.fromisoformat(stamp[:26]).replace(tzinfo=datetime.UTC)
    except ValueError as error:
        raise WorkloadError(f"line {number}: TIMESTAMP {stamp!r} is not a time") from error
    return Row(
        at.timestamp(),
        _whole(row["ContextTokens"], "ContextTokens", number),
        _whole(row["GeneratedTokens"], "GeneratedTokens", number),
    )


def _plain(row: dict[str, str], number: int) -> Row:
    return Row(
        _seconds(row["arrival_s"], "arrival_s", number),
        _whole(row["input_tokens"], "input_tokens", number),
        _whole(row["output_tokens"], "output_tokens", number),
    )


_CSV_FORMATS: tuple[tuple[frozenset[str], Callable[[dict[str, str], int], Row]], ...] = (
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    (frozenset({"arrival_s", "input_tokens", "output_tokens"}), _plain),
)


def _whole(value: Any, name: str, number: int) -> int:
    try:
        found = int(value)
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"line {number}: {name} must be a whole number, is {value!r}") from error
    if found < 1 or isinstance(value, bool) or (isinstance(value, float) and value != found):
        raise WorkloadError(f"line {number}: {name} must be a whole number from 1 up, is {value!r}")
    return found


def _seconds(value: Any, name: str, number: int) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"line {number}: {name} must be a number, is {value!r}") from error
    if not 0 <= found < float("inf"):
        raise WorkloadError(f"line {number}: {name} must be from 0 up, is {value!r}")
    return found
