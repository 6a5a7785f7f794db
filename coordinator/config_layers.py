"""Values of a configuration as layers: read, named by where they were given, merged; and faults that say so.

Knows no setting by name. `coordinator.config` says what there is and which layer wins.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

ENV_PREFIX = "SPLITPOINT__"


class ConfigError(ValueError):
    """The configuration is refused. `problems` has one line per fault, each naming its path and where it was given."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def parse_bytes(text: str) -> int:
    """`"256MiB"`, `"1.5 GB"`, `"4096"` in bytes. Binary units have an i; others are powers of 1000.

    Raises:
        ValueError: not a size, or not a whole number of bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a byte size such as 256MiB, 1GB or 4096")
    power = " KMGT".index(match[2] or " ")
    value = float(match[1]) * (1024 if match[3] else 1000) ** power
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def layers(file: Path | None, sets: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lowest precedence first."""
    if file is not None:
        try:
            yield str(file), tomllib.loads(file.read_text())
        except OSError as error:
            raise ConfigError([f"{file}: {error.strerror}"]) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError([f"{file}: not TOML: {error}"]) from error
    for key, text in sorted(environment.items()):
        if key.startswith(ENV_PREFIX):
            parts = [part.lower() for part in key[len(ENV_PREFIX) :].split("__")]
            if not all(parts):
                raise ConfigError([f"environment {key}: an empty part; write {ENV_PREFIX}A__B"])
            yield f"environment {key}", _nest(parts, _value(text))
    for item in sets:
        path, equals, text = item.partition("=")
        parts = path.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError([f"--set {item}: write path=value, for example engine.max_num_seqs=32"])
        yield f"--set {item}", _nest(parts, _value(text))


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nest(parts: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return value


def paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        yield path
        if isinstance(value, Mapping):
            yield from paths(value, f"{path}.")


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_sizes(tree: Mapping[str, Any], prefix: str, origins: Mapping[str, str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            parsed[key] = parse_sizes(value, f"{path}.", origins)
        elif key.endswith("_bytes") and isinstance(value, str):
            try:
                parsed[key] = parse_bytes(value)
            except ValueError as error:
                raise ConfigError([f"{path}: {error}{given(origins, path)}"]) from error
        else:
            parsed[key] = value
    return parsed


def fault_lines(error: ValidationError, model: type[BaseModel], prefix: str, origins: Mapping[str, str]) -> list[str]:
    """One line per fault: path, what is wrong, where it was given."""
    lines: list[str] = []
    for fault in error.errors():
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            lines.extend(line + given(origins, line.partition(": ")[0]) for line in cause.problems)
            continue
        loc = [str(part) for part in fault["loc"]]
        path = prefix + ".".join(loc)
        if fault["type"] == "extra_forbidden":
            known = _known_keys(model, loc[:-1])
            near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            lines.append(f"{path}: unknown key, {hint}{given(origins, path)}")
        else:
            shown = "" if fault["type"] in ("missing", "value_error") else f", got {fault['input']!r}"
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{path or 'configuration'}: {message}{shown}{given(origins, path)}")
    return lines


def given(origins: Mapping[str, str], path: str) -> str:
    """Where `path`, or the closest table above it, was given."""
    while path:
        if path in origins:
            return f" ({origins[path]})"
        path = path.rpartition(".")[0]
    return ""


def _known_keys(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """The field names of the model at `loc` below `model`."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = current.model_fields[part].annotation
            if isinstance(current, types.UnionType):
                current = next((a for a in get_args(current) if isinstance(a, type) and issubclass(a, BaseModel)), None)
        else:
            # A table of tables (`pools`): the part is its free key.
            current = next((a for a in get_args(current) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []
